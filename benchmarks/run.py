r"""Measures suites: our kernels against every baseline that computes the same, in one interleaved run.

    python -m benchmarks.run --list                                     # cases, and what cannot run them
    python -m benchmarks.run --suite models,short --budget-seconds 120
    python -m benchmarks.run --suite attention_forward --baselines sdpa_flash,sdpa_cudnn
    python -m benchmarks.run tune --suite retnet                        # records for every problem of a suite
    python -m benchmarks.run all --suite retnet --ship python/attention_autotuner/tuned   # tune, then compare

``compare``, the default, times what a call would run, from the user's records, the shipped picks or the default, beside
the baselines; suites of tuned grids race the defaults, too, and confirm records or take them back. ``all`` runs both
halves, each in a process of its own. Status 1 means that something was not measured or a bar was missed, 2 that there
is no GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from attention_autotuner import settings as settings_module
from attention_autotuner.arch import Policy, resolve
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.settings import Settings
from attention_autotuner.tuning import class_pools
from attention_autotuner.tuning.environment import collect
from attention_autotuner.tuning.pipeline import LocalPipeline, Pipeline
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipping import trimmed

from .baselines import BASELINES
from .baselines.base import MODES
from .baselines.flash_attn import add_site, beside_suites
from .calls import inputs_of, side_by_side
from .contenders import variants
from .results import RESULTS, ROOT, SuiteFile, table
from .search import search
from .session import Session
from .settling import all_evidence, settle_and_ship
from .suites import SUITES, Trial, Tuning, trials

DEFAULT_SUITES = "models,short,decode"
STARTED = time.monotonic()


def names_of(known: Sequence[str], kind: str) -> Callable[[str], list[str]]:
    """A reader of comma-separated names for the command line."""

    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known] or ([] if names else [text])
        if unknown:
            reason = f"{unknown[0]!r} is no {kind}; there are {', '.join(known)}"
            raise argparse.ArgumentTypeError(reason)
        return names

    return read


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    program, about = "python -m benchmarks.run", (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=program, description=about, allow_abbrev=False)
    option = parser.add_argument

    def lists(*flags: str, known: Sequence[str], kind: str, words: str, **rest: Any) -> None:
        name = "MODE[,MODE]" if kind == "direction" else "NAME[,NAME]"
        option(*flags, type=names_of(known, kind), metavar=name, help=words, **rest)

    option("command", nargs="?", choices=("compare", "tune", "all"), default="compare")
    words = f"of {', '.join(SUITES)} (default {DEFAULT_SUITES})"
    lists("--suite", known=list(SUITES), kind="suite", words=words, default=DEFAULT_SUITES)
    words = f"of {', '.join(BASELINES)} (default the suite's)"
    lists("--baselines", "--peers", known=list(BASELINES), kind="baseline", words=words)
    words = "race it from this folder of wheels, deterministic too where ours is"
    option("--flash-attn-4", type=Path, metavar="SITE", help=words)
    words = "forward, backward, step, autograd; by default those of each case"
    lists("--direction", known=MODES, kind="direction", words=words, default=[])
    words = "in case or problem; all"
    option("--filter", "--only", nargs="+", default=[], metavar="WORD", help=words)
    option("--dims", nargs="+", type=int, default=[], metavar="DIM", help="head dims; all")
    option("--dtype", choices=("fp16", "bf16"), help="of every tensor (default the suite's)")
    words = "of timing rounds a race (default the suite's)"
    option("--seconds", "--seconds-per-case", type=float, help=words)
    words = "of wall time for everything; what is left out is said"
    option("--budget-seconds", type=float, help=words)
    words = "race no defaults and no deterministic mode: records are not settled"
    option("--picks-only", action="store_true", help=words)
    option("--output", "--results", type=Path, default=RESULTS, help="folder of results/<gpu>/")
    option("--ship", type=Path, metavar="FOLDER", help="write the GPU's settled picks to it")
    option("--top-k", type=int, help="tune: candidates that a problem adds")
    option("--class-limit", type=int, help="tune: candidates of a class beside the defaults")
    option("--tune-seconds", type=float, help="tune: of rounds a problem")
    words = "tune among what the GPU's file in this folder holds and the defaults, and no others"
    option("--again", type=Path, metavar="FOLDER", help=words)
    option("--jobs", type=int, help="compilations at once")
    option("--cache-dir", type=Path, help="kernels and records; the setting's")
    option("--device-type", help="whose picks; the present GPU's by default")
    option("--seed", type=int, default=0, help="of the inputs and of the order in a round")
    option("--list", action="store_true", help="show the cases and what can run them, and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, tune, or list."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    try:
        if options.flash_attn_4 is not None:
            add_site(options.flash_attn_4)
        wanted = trials(
            options.suite,
            modes=options.direction,
            words=options.filter,
            dims=options.dims,
            dtype=options.dtype,
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"benchmarks.run: {error}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(listing(wanted, options.baselines)))
        return 0
    if options.command == "all":
        return both(arguments)
    with opened(options) as machine:
        if isinstance(machine, str):
            say(machine)
            return 2
        policy, pipeline, settings = machine
        records = RecordStore(settings.cache_dir / "records")
        if options.command == "tune":
            return tune(wanted, policy, pipeline, records, options)
        from attention_autotuner.tuning.measure import InProcessMeasurer

        lengths = {t.problem: tuple(t.suite.lengths) for t in wanted if t.suite.lengths}
        session = Session(
            trials=in_order(wanted, options.seed),
            baselines=options.baselines and [BASELINES[b] for b in options.baselines],
            extra=beside_suites(options.flash_attn_4),
            policy=policy,
            pipeline=pipeline,
            measurer=InProcessMeasurer(seed=options.seed, inputs=partial(inputs_of, lengths)),
            seconds=options.seconds,
            budget_seconds=options.budget_seconds,
            device_type=options.device_type,
            environment=collect,
            alive=answers,
            say=say,
            defaults=not options.picks_only,
            inspect=side_by_side,
            jobs=settings.jobs or os.cpu_count() or 1,
            started=STARTED,
        )
        again = options.again is not None
        return compare(session, options.output, records, options.ship, again=again)


def both(arguments: Sequence[str]) -> int:
    """Tune, then compare, each in a process of its own; the first status that is not 0."""
    rest = list(arguments)
    rest.remove("all")
    for command in ("tune", "compare"):
        status = subprocess.run(
            [sys.executable, "-m", "benchmarks.run", command, *rest], cwd=ROOT, check=False
        ).returncode
        if status != 0:
            return status
    return 0


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[Policy, LocalPipeline, Settings] | str]:
    """The machine under the settings of the command line, or why nothing can be measured here.

    Args:
        options: with ``cache_dir``, ``jobs`` and ``device_type``.
    """
    changes = {"cache_dir": options.cache_dir, "jobs": options.jobs}
    changes = {name: value for name, value in changes.items() if value is not None}
    with settings_module.override(mode="cached", strict_kernels=True, **changes) as settings:
        try:
            policy = resolve(options.device_type)
        except UnsupportedArchitectureError as error:
            yield str(error)
            return
        pipeline = LocalPipeline(policy, settings)
        can = pipeline.can_measure()
        yield (policy, pipeline, settings) if can else "no GPU here: nothing can be measured"


def in_order(wanted: Sequence[Trial], seed: int) -> list[Trial]:
    """The trials suite by suite; those of a tuned grid shuffled, as neighbours heat the GPU alike."""
    suites: dict[str, list[Trial]] = {}
    for trial in wanted:
        suites.setdefault(trial.suite.name, []).append(trial)
    for members in suites.values():
        if members[0].suite.tuning is not None:
            random.Random(seed).shuffle(members)
    return [trial for members in suites.values() for trial in members]


def tune(
    wanted: Sequence[Trial],
    policy: Policy,
    pipeline: Pipeline,
    records: RecordStore,
    options: argparse.Namespace,
) -> int:
    """Records for every problem of the trials, suite by suite."""
    for suite in dict.fromkeys(trial.suite.name for trial in wanted):
        members = [trial for trial in wanted if trial.suite.name == suite]
        tuning = members[0].suite.tuning or Tuning()
        problems = list(dict.fromkeys(v for trial in members for v in variants(trial.problem)))
        if options.again is not None:
            gpu_name = pipeline.environment.gpu_name or "unknown"
            held = all_evidence(options.again, gpu_name)
            known = [entry.candidate for r in held.values() for entry in trimmed(r).entries]
            pool_of = class_pools.known_pools(problems, policy, known)
        else:
            top_k = options.top_k or tuning.top_k
            limit = options.class_limit or tuning.class_limit
            pool_of = class_pools.pools(problems, policy, top_k=top_k, class_limit=limit)
        seconds = options.tune_seconds or tuning.seconds
        search(problems, policy, pipeline, records, pool_of=pool_of, seconds=seconds, say=say)
    return 0


def compare(
    session: Session,
    output: Path,
    records: RecordStore,
    ship_to: Path | None = None,
    *,
    again: bool = False,
) -> int:
    """Do a session, write each suite's file as it grows, settle the records, and print the tables.

    Args:
        session: what is measured.
        output: folder of all results.
        records: those of tuned grids are confirmed or taken back.
        ship_to: folder to write the settled picks to.
        again: True where they come of races among kernels that were shipped before.
    """
    files: dict[str, SuiteFile] = {}
    rows = []
    missing = 0
    for trial, result in session.rows():
        suite = trial.suite
        if suite.name not in files:  # by now the pipeline knows its compiler
            seconds = suite.seconds if session.seconds is None else session.seconds
            files[suite.name] = SuiteFile(
                output, suite, session.pipeline.environment, session.policy, seconds
            )
        files[suite.name].take(trial, result)
        if isinstance(result, str):
            missing += 1
        elif suite.tuning is not None and session.defaults:
            rows.append(result)
    environment = session.pipeline.environment
    settle_and_ship(rows, session.policy, records, environment, ship_to, say, again=again)
    missed = []
    for file in files.values():
        document = file.document()
        print("\n".join(["", file.path.name, *table(document)]))
        say(f"wrote {file.path}")
        for name, figures in document["summary"].items():
            missed += [f"{name}: {bar}" for bar in figures["missed"]]
    say("missed: " + ", ".join(missed) if missed else "every bar is met")
    if missing:
        say(f"not measured: {missing} of {len(session.trials)}")
    return 1 if missing or missed else 0


def answers() -> bool:
    """True while the GPU does what it is asked; after a fault nothing else can be timed in this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def listing(wanted: Sequence[Trial], names: Sequence[str] | None) -> list[str]:
    """Every trial, where its numbers come from, and whether each baseline of its operation can run it."""
    lines = []
    for trial in wanted:
        lines.append(f"{trial.suite.name} {trial.key}: {trial.problem.describe()}")
        lines.append(f"    {trial.case.title}; {trial.case.source}")
        lines += [
            f"    {name}: {BASELINES[name].available(trial.problem) or 'can run'}"
            for name in names or trial.suite.baselines or BASELINES
            if BASELINES[name].op == trial.problem.op
        ]
    return lines


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"[{time.monotonic() - STARTED:5.0f} s] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
