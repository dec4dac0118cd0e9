r"""Named cases against everyone who computes the same: one table and one result file for each suite.

    python -m benchmarks.run --list                                     # cases, peers, and who cannot run what
    python -m benchmarks.run --suite models,short --budget-seconds 120
    python -m benchmarks.run --suite models --filter llama --peers sdpa_flash,flex --direction step --dtype bf16

Nothing is tuned: our kernels are what a call would run, from the user's records, the shipped picks, or the
default. All of them are built first, in parallel; each is verified on the case, then raced against the peers in random
order, round after round, in one process with a cold L2. Rows of earlier runs stay in the file until they are measured
anew. Status 1 means that something was not measured, 2 that there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from attention_autotuner.tuning.environment import collect

from .commands import RESULTS, opened, say
from .implementations import IMPLEMENTATIONS, WAYS, Implementation
from .suite_results import SuiteFile, table
from .suite_run import Run
from .suites import SUITES, Trial, trials

DEFAULT_SUITES = "models,short,decode"


def names_of(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    """A reader of comma-separated names for the command line."""

    def read(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            wrong = unknown[0] if unknown else text
            raise argparse.ArgumentTypeError(
                f"{wrong!r} is no {what}; there are {', '.join(known)}"
            )
        return found

    return read


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    option = parser.add_argument
    option(
        "--suite",
        type=names_of(list(SUITES), "suite"),
        default=DEFAULT_SUITES,
        metavar="NAME[,NAME]",
        help=f"of {', '.join(SUITES)} (default {DEFAULT_SUITES})",
    )
    option(
        "--peers",
        type=names_of(list(IMPLEMENTATIONS), "peer"),
        default=",".join(IMPLEMENTATIONS),
        metavar="NAME[,NAME]",
        help="whom to meet (default all)",
    )
    option(
        "--direction",
        type=names_of(WAYS, "direction"),
        default=[],
        metavar="WAY[,WAY]",
        help="forward, backward, step; what each case is usually measured in by default",
    )
    option("--filter", default="", metavar="WORD", help="only cases with this in their name")
    option("--dtype", choices=("fp16", "bf16"), default="fp16")
    option("--seconds-per-case", type=float, default=0.5, help="of timing rounds (default 0.5)")
    option(
        "--budget-seconds", type=float, help="of wall time for everything; what is left out is said"
    )
    option("--output", type=Path, default=RESULTS, help="folder of results/<gpu>/")
    option("--jobs", type=int, help="compilations at once")
    option("--cache-dir", type=Path, help="kernels and records; the setting's")
    option("--device-type", help="whose picks; the present GPU's by default")
    option("--seed", type=int, default=0, help="of the inputs and of the order in a round")
    option("--list", action="store_true", help="show the cases and who can run them, and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or list."""
    started = time.monotonic()
    options = parse(arguments)
    try:
        wanted = trials(
            options.suite, ways=options.direction, words=options.filter, dtype=options.dtype
        )
    except ValueError as error:
        print(f"benchmarks.run: {error}", file=sys.stderr)
        return 2
    met = [IMPLEMENTATIONS[name] for name in options.peers]
    if options.list:
        print("\n".join(listing(wanted, met)))
        return 0
    with opened(options, options.device_type) as found:
        if isinstance(found, str):
            say(found)
            return 2
        policy, pipeline, settings = found
        from attention_autotuner.tuning.measure import InProcessMeasurer

        return measure(
            Run(
                trials=wanted,
                peers=met,
                policy=policy,
                pipeline=pipeline,
                measurer=InProcessMeasurer(seed=options.seed),
                seconds=options.seconds_per_case,
                budget_seconds=options.budget_seconds,
                device_type=options.device_type,
                environment=collect,
                alive=answers,
                say=say,
                jobs=settings.jobs or os.cpu_count() or 1,
                started=started,
            ),
            options.output,
        )


def measure(run: Run, output: Path) -> int:
    """Do a run, write each suite's file as it grows, and print the tables.

    Args:
        run: what is measured.
        output: folder of all results.
    """
    files: dict[str, SuiteFile] = {}
    missing = 0
    for trial, found in run.rows():
        if trial.suite not in files:  # by now the pipeline knows its compiler
            environment = run.pipeline.environment
            files[trial.suite] = SuiteFile(
                output, trial.suite, environment, run.policy, run.peers, run.seconds
            )
        files[trial.suite].take(trial, found)
        missing += isinstance(found, str)
    for file in files.values():
        print("\n".join(["", file.path.name, *table(file.document())]))
        say(f"wrote {file.path}")
    if missing:
        say(f"not measured: {missing} of {len(run.trials)}")
    return 1 if missing else 0


def answers() -> bool:
    """Whether the GPU still does what it is asked; after a fault nothing else can be timed in this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def listing(wanted: Sequence[Trial], met: Sequence[Implementation]) -> list[str]:
    """Every trial, where its numbers come from, and what each peer that computes its operation says."""
    lines = []
    for trial in wanted:
        lines.append(f"{trial.suite} {trial.key}: {trial.problem.describe()}")
        lines.append(f"    {trial.case.title}; {trial.case.source}")
        lines += [
            f"    {each.name}: {each.can_run(trial.problem) or 'can run'}"
            for each in met
            if each.op == trial.problem.op
        ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
