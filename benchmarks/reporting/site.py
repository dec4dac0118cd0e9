"""The documentation's view of the result files: a page that is whole by itself, Markdown, and curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..baselines import BASELINES
from ..contenders import DETERMINISTIC
from ..results import (
    UNITS,
    comparisons,
    failure,
    half_width,
    problem_of,
    rate,
    ratio_text,
    standing,
    write_text,
)
from ..suites import SUITES, column_label, row_label
from .curves import draw, limits_of

TITLE = "attention-autotuner: results"
PAGE, RESULTS, CASES, TABLE = "report.html", "results.md", "cases.md", "baselines.md"
MODE_WORDS = {"step": "forward + backward", "autograd": "forward + backward through autograd"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Our speed over one baseline's on one problem in one mode.

    Attributes:
        case, mode, baseline: what was compared; the baseline by its title.
        row, column: the place in a grid of head dims and sequence lengths.
        ours_us, theirs_us: medians, microseconds; None where there is no time.
        ratio, width: the speed and half of its interval; None and empty without one.
        standing: faster, even or slower; empty without a ratio.
        reason: why there is no ratio, or empty.
    """

    case: str
    mode: str
    baseline: str
    row: str
    column: str
    ours_us: float | None
    theirs_us: float | None
    ratio: float | None
    width: str
    standing: str
    reason: str

    @property
    def colour(self) -> str:
        """Purple where we are faster and orange where we are slower, up to twice and half, as CSS."""
        if self.ratio is None:
            return ""
        share = max(-1.0, min(1.0, log2(self.ratio)))
        return f"rgba({'94,60,153' if share > 0 else '230,97,1'},{0.55 * abs(share):.2f})"


def results_of(document: Mapping[str, Any]) -> list[Result]:
    """Every comparison of a file with a baseline, also those without a ratio."""
    results = []
    for name, rows in comparisons(document["rows"]).items():
        baseline, _, mode = name.partition(" ")
        for row in rows if name != DETERMINISTIC else ():
            measured, problem = row["ratios"].get(name), problem_of(row)
            label = row["ours"] if measured is None else measured["ours"]
            ours, theirs = row["entries"].get(label, {}), row["entries"][name]
            reason = failure(row, name) or (f"ours: {why}" if (why := failure(row, label)) else "")
            width = word = ""
            if measured is not None:
                width = half_width(measured["ratio"], measured["error"])
                word = standing(measured["ratio"], measured["error"])
            results.append(
                Result(
                    case=row["title"],
                    mode=MODE_WORDS.get(mode, mode),
                    baseline=document["baselines"].get(baseline, baseline),
                    row=row_label(problem),
                    column=column_label(problem),
                    ours_us=ours.get("median_us"),
                    theirs_us=theirs.get("median_us"),
                    ratio=None if measured is None else measured["ratio"],
                    width=width,
                    standing=word,
                    reason="" if measured else reason or "not timed in the same rounds",
                )
            )
    return results


def losses(document: Mapping[str, Any]) -> list[Result]:
    """The comparisons that we lose, the furthest behind first."""
    slower = [result for result in results_of(document) if result.standing == "slower"]
    return sorted(slower, key=lambda result: result.ratio or 0.0)


def place_of(document: Mapping[str, Any]) -> str:
    """Where and when a file's figures were taken, in one line; what was not recorded is left out."""
    runs = document.get("runs", {}).values()
    environments = [run["environment"] for run in runs] or [document.get("environment") or {}]
    last = max(environments, key=lambda e: str(e.get("time_utc")))
    words = [str(last.get("gpu_name"))]
    cuda = last.get("nvcc") or last.get("cuda_runtime")
    versions = {"driver": last.get("driver"), "CUDA": cuda, "torch": last.get("torch")}
    words += [f"{name} {version}" for name, version in versions.items() if version]
    clocks = [row["clocks"] for row in document.get("rows", []) if row.get("clocks")]
    for field, what, unit in (("sm_clock_mhz", "SM clock", "MHz"), ("power_draw_w", "power", "W")):
        values = [clock[field] for clock in clocks if clock.get(field) is not None]
        if values:
            words.append(f"{what} after each race {min(values):.0f} to {max(values):.0f} {unit}")
    times = sorted(str(e["time_utc"]) for e in environments if e.get("time_utc"))
    return ", ".join([*words, *dict.fromkeys([*times[:1], *times[-1:]])])


def load(root: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """GPU's folder -> file's name -> document, in the order of the suites and then by name.

    Args:
        root: folder of ``<gpu>/<file>.json``.
    """
    gpus = {}
    order = {name: index for index, name in enumerate(SUITES)}
    for folder in sorted(root.glob("*")):
        paths = sorted(folder.glob("*.json"), key=lambda p: (order.get(p.stem, 99), p.stem))
        if paths:
            gpus[folder.name] = {path.stem: json.loads(path.read_text("utf-8")) for path in paths}
    return gpus


def suites_in(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The documents that are suites' result files."""
    return (document for document in documents.values() if "suite" in document)


def build(root: Path) -> dict[str, str]:
    """The site's files, by path: the page, the Markdown and the curves.

    Args:
        root: folder of ``<gpu>/<file>.json``.
    """
    gpus = load(root)
    curves: dict[str, str] = {}
    for gpu, documents in gpus.items():
        for document in suites_in(documents):
            if document["suite"] in SUITES and SUITES[document["suite"]].grid:
                limits = limits_of(document["spec"], documents.get("bring_up"))
                drawn = draw(document, limits)
                if drawn is not None:
                    curves[f"figures/{gpu}/{document['suite']}.svg"] = drawn
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=lambda name: str(name).endswith(".html.jinja"),
    )
    environment.globals.update(
        title=TITLE,
        gpus=gpus,
        curves=curves,
        suites=SUITES,
        baselines=BASELINES,
        units=UNITS,
        mode_words=MODE_WORDS,
    )
    functions = (results_of, losses, place_of, suites_in, rate, median)
    environment.globals.update({function.__name__: function for function in functions})
    environment.filters["ratio"] = ratio_text
    names = (PAGE, RESULTS, CASES, TABLE)
    texts = {name: environment.get_template(f"{name}.jinja").render() for name in names}
    return {**texts, **curves}


def write(root: Path, folder: Path) -> None:
    """Make the site's files under a folder.

    Args:
        root: folder of ``<gpu>/<file>.json``.
        folder: where they go; what is there under their names is replaced.
    """
    for name, text in build(root).items():
        write_text(folder / name, text)
