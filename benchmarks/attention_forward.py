"""Attention forward on the grid of published comparisons: tuned picks against other implementations.

    python -m benchmarks.attention_forward run --results benchmarks/results --ship python/attention_autotuner/tuned
    python -m benchmarks.attention_forward tune      # the first half: records for every problem of the grid
    python -m benchmarks.attention_forward compare   # the second half, in a process that did not tune

``tune`` builds the cost model's best of each head dim in one batch, verifies them and races them on every problem.
``compare`` times what dispatch would run against the peers in interleaved random rounds, confirms the records or takes
them back, and writes RESULTS/<gpu>/attention_forward.json after every problem. ``run`` does both, each in a process of
its own. Status 1 means that a bar was missed, 2 that there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_autotuner import settings as settings_module
from attention_autotuner.arch import Policy, resolve
from attention_autotuner.codegen.files import write_atomic
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.tuning.environment import collect
from attention_autotuner.tuning.lookup import slug
from attention_autotuner.tuning.pipeline import LocalPipeline, Pipeline
from attention_autotuner.tuning.records import RecordStore

from . import class_search, comparison, report
from .cases import GRIDS, Grid
from .peers import PEERS
from .shipping import ship

NAME = "attention_forward"
RESULTS = Path(__file__).resolve().parent / "results"
STARTED = time.monotonic()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    if options.command == "run":
        return run(given[given.index("run") + 1 :])
    changes = {"cache_dir": options.cache_dir, "jobs": options.jobs}
    changes = {name: value for name, value in changes.items() if value is not None}
    with settings_module.override(mode="cached", **changes) as settings:
        try:
            policy = resolve(options.device_type)
        except UnsupportedArchitectureError as error:
            say(str(error))
            return 2
        pipeline = LocalPipeline(policy, settings)
        if not pipeline.can_measure():
            say("no GPU here: nothing can be measured")
            return 2
        records = RecordStore(settings.cache_dir / "records")
        grid = GRIDS[NAME].only(options.only)
        if options.command == "tune":
            return tune(grid, policy, pipeline, records, options)
        return compare(grid, policy, pipeline, records, options)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "tune", "compare"):
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("--device-type", help="whose picks; the present GPU's by default")
        command.add_argument("--cache-dir", type=Path, help="kernels and records; the setting's")
        command.add_argument("--jobs", type=int, help="compilations at once")
        command.add_argument(
            "--only", nargs="+", default=[], metavar="WORD", help="e.g. d64 causal"
        )
        command.add_argument("--top-k", type=int, default=10, help="candidates a problem adds")
        command.add_argument("--tune-seconds", type=float, default=3.0, help="of rounds a problem")
        command.add_argument(
            "--seconds", type=float, default=3.0, help="of the comparison's rounds"
        )
        command.add_argument(
            "--peers", nargs="+", choices=list(PEERS[NAME]), default=["sdpa_flash"]
        )
        command.add_argument("--results", type=Path, default=RESULTS)
        command.add_argument("--ship", type=Path, help="folder to write the GPU's picks to")
        command.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def run(arguments: Sequence[str]) -> int:
    """Both halves; the worse status."""
    for command in ("tune", "compare"):
        status = subprocess.run(
            [sys.executable, "-m", "benchmarks.attention_forward", command, *arguments],
            cwd=Path(__file__).resolve().parents[1],
            check=False,
        ).returncode
        if status != 0:
            return status
    return 0


def tune(
    grid: Grid,
    policy: Policy,
    pipeline: Pipeline,
    records: RecordStore,
    options: argparse.Namespace,
) -> int:
    """Records for every problem."""
    class_search.search(
        grid.problems,
        policy,
        pipeline,
        records,
        top_k=options.top_k,
        seconds=options.tune_seconds,
        say=say,
    )
    return 0


def compare(
    grid: Grid,
    policy: Policy,
    pipeline: Pipeline,
    records: RecordStore,
    options: argparse.Namespace,
    measurer: comparison.RacingMeasurer | None = None,
) -> int:
    """Race the picks, write the result as it grows, settle the records."""
    if measurer is None:
        from attention_autotuner.tuning.measure import InProcessMeasurer

        measurer = InProcessMeasurer(seed=options.seed)
    peers = {name: PEERS[NAME][name] for name in options.peers}
    gpu_name = pipeline.environment.gpu_name or "unknown"
    path = options.results / slug(gpu_name) / f"{NAME}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    place = {problem.describe(): index for index, problem in enumerate(grid.problems)}
    rows: list[dict[str, Any]] = []
    found = comparison.document(NAME, rows, peers, policy, pipeline.environment)
    for row in comparison.compare(
        comparison.rivals_of(grid.problems, policy),
        peers,
        pipeline,
        measurer,
        seconds=options.seconds,
        environment=collect,
        say=say,
        seed=options.seed,
    ):
        rows.append(row)
        rows.sort(key=lambda each: place[each["name"]])
        found = comparison.document(NAME, rows, peers, policy, pipeline.environment)
        write_atomic(path, json.dumps(found, indent=1) + "\n")
    settled = comparison.settle(rows, policy, records, pipeline.environment)
    if options.ship is not None and settled:
        say(f"wrote {ship(options.ship, gpu_name, settled)}")
    print("\n".join(report.attention_table(found)))
    say(f"wrote {path}")
    missed = [f"{peer}: {bar}" for peer, each in found["summary"].items() for bar in each["missed"]]
    say("missed: " + ", ".join(missed) if missed else "every bar is met")
    return 1 if missed else 0


def say(line: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - STARTED:5.0f} s] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
