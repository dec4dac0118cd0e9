"""The command ``model``, and the model card of ``report``: what the cost model learns, and how it does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..arch import resolve
from ..codegen.files import write_atomic
from ..core.trust import make_folder
from ..errors import MissingPackageError, RecordError
from ..settings import current
from ..tuning.learning import compared, fit, helps
from ..tuning.model_card import Card, Search, cards, searches
from ..tuning.ranking import user_path
from ..tuning.records import RecordStore
from ..tuning.shipping import evidence
from .console import print_json, print_line, print_table
from .options import FAILED, command, option

HEADINGS = ("scope", "problems", "times", "1", "3", "5", "10", "default", "behind", "rank", "rms")


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the searches to learn from."""
    words = "searches, one record a line, compressed or not; your own records without any"
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help=words)


add_arch = option("--device-type", help="learn of this architecture; of the only one by default")
add_output = option("--output", type=Path, metavar="FILE", help="the user's own model by default")


@command("model fit", add_files, add_arch, add_output)
def run_fit(arguments: argparse.Namespace) -> int:
    """Learn from measured searches what the cost model gets wrong.

    Fit small regression trees to predicted and measured times, and keep them where first picks and predictions are no
    worse on problems that they were not fitted to. Needs scikit-learn, no GPU.
    """
    measured = searches_in(arguments.files)
    if arguments.device_type is not None:
        arch = resolve(arguments.device_type).name
        measured = [search for search in measured if search.policy.name == arch]
    analytic, learned = compared(measured)
    said = {"analytic": analytic[0].to_json(), "learned": learned[0].to_json()}
    gpus = sorted({search.gpu_name for search in measured})
    residual = fit(measured, {"gpu_names": gpus, **said})
    kept = helps(analytic[0], learned[0])
    path = arguments.output or user_path(residual.arch)
    if kept:
        make_folder(path.parent)
        write_atomic(path, json.dumps(residual.to_json(), separators=(",", ":")) + "\n")
    if arguments.json:
        print_json({"kept": kept, "path": str(path), **said})
    else:
        print_cards("analytic", analytic)
        print_cards("learned, on problems left out", learned)
        print_line(f"wrote {path}" if kept else "not kept: the analytic model does better alone")
    return 0 if kept else FAILED


def searches_in(files: Sequence[Path]) -> list[Search]:
    """The searches of files, or of the user's own records.

    Raises:
        RecordError: there are none, or a file is damaged or missing.
    """
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise RecordError(f"there is no file {missing[0]}")
    records = [record for path in files for record in evidence(path).values()]
    if not files:
        kept = RecordStore(current().cache_dir / "records").kept()
        records = [entry.record for entry in kept if entry.record is not None]
    measured = searches(records)
    if not measured:
        raise RecordError("there are no searches with two candidates timed: tune something first")
    return measured


def print_model_card(files: Sequence[Path], others: Sequence[Path], *, as_json: bool) -> int:
    """Print how the model does on searches: the analytic one, and with what it learns from the other problems.

    Args:
        files: of the searches; the user's own records without any.
        others: files to learn from besides; they may name the same searches.
        as_json: print one JSON object.
    """
    measured = searches_in(files)
    besides = searches_in(others) if others else []
    said: dict[str, list[Card]] = {"analytic": cards(measured)}
    try:
        said["learned"] = compared(measured, besides)[1]
    except MissingPackageError as error:
        if not as_json:
            print_line(str(error))
    if as_json:
        print_json({name: [card.to_json() for card in shown] for name, shown in said.items()})
        return 0
    titles = {"analytic": "analytic", "learned": "learned, on problems left out"}
    for name, shown in said.items():
        print_cards(titles[name], shown)
    return 0


def print_cards(title: str, shown: Sequence[Card]) -> None:
    """Print a table of cards: regret after so many builds, of the default, and predicted over measured."""
    print_table(title, HEADINGS, [_row(card) for card in shown], spare=("times", "3", "10", "rank"))


def _row(card: Card) -> list[Any]:
    picks = [""] * 7
    if card.problems:
        ratios = [*(card.regret[k] for k in (1, 3, 5, 10)), card.default]
        picks = [f"{ratio - 1:.2%}" for ratio in ratios]
        picks += [str(card.behind), f"{card.correlation:.2f}"]
    return [card.name, str(card.problems), str(card.candidates), *picks, f"{card.rms:.1%}"]
