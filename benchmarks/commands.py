"""What the benchmarks of one operation and direction have in common: tune a grid, compare it, report it.

``tune`` builds the cost model's best of each head dim in one batch, verifies them and races them on every problem.
``compare`` times what dispatch would run against the peers in interleaved random rounds, confirms the records or takes
them back, and writes RESULTS/<gpu>/<benchmark>.json after every problem. ``run`` does both, each in a process of its
own. Status 1 means that a bar was missed, 2 that there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_autotuner import settings as settings_module
from attention_autotuner.arch import Policy, resolve
from attention_autotuner.codegen.files import write_atomic
from attention_autotuner.core.identity import slug
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.settings import Settings
from attention_autotuner.tuning import class_pools
from attention_autotuner.tuning.environment import collect
from attention_autotuner.tuning.pipeline import LocalPipeline, Pipeline
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipping import evidence, ship, trimmed

from . import class_search, comparison, report, verdict
from .cases import GRIDS, Grid
from .peer import Peer
from .peers import PEERS
from .rivals import meeting_of, variants
from .side_by_side import side_by_side

RESULTS = Path(__file__).resolve().parent / "results"
STARTED = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark and what its commands do when not told otherwise.

    Attributes:
        name: of the module, of its grid and peers, and of its result file.
        title: what ``--help`` begins with.
        peers: whom it meets.
        top_k: candidates that a problem adds to its class.
        class_limit: candidates of a class inspect the defaults, for each mode; None is no limit.
        tune_seconds: of timing rounds a problem while tuning.
        seconds: of a problem's rounds in the comparison.
    """

    name: str
    title: str
    peers: tuple[str, ...]
    top_k: int
    class_limit: int | None = None
    tune_seconds: float = 3.0
    seconds: float = 3.0


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(benchmark, given)
    if options.command == "run":
        return run(benchmark, given[given.index("run") + 1 :])
    with opened(options, options.device_type) as found:
        if isinstance(found, str):
            say(found)
            return 2
        policy, pipeline, settings = found
        records = RecordStore(settings.cache_dir / "records")
        grid = GRIDS[benchmark.name].only(options.only, options.dims)
        if options.command == "tune":
            return tune(grid, policy, pipeline, records, options)
        return compare(grid, policy, pipeline, records, options)


@contextmanager
def opened(
    options: argparse.Namespace, device_type: str | None = None
) -> Iterator[tuple[Policy, LocalPipeline, Settings] | str]:
    """What measures kernels under the settings that ``--cache-dir`` and ``--jobs`` give, or why nothing can.

    Args:
        options: of the command line, with ``cache_dir`` and ``jobs``.
        device_type: whose policy; by default the present GPU's.
    """
    changes = {"cache_dir": options.cache_dir, "jobs": options.jobs}
    changes = {name: value for name, value in changes.items() if value is not None}
    with settings_module.override(mode="cached", **changes) as settings:
        try:
            policy = resolve(device_type)
        except UnsupportedArchitectureError as error:
            yield str(error)
            return
        pipeline = LocalPipeline(policy, settings)
        can = pipeline.can_measure()
        yield (policy, pipeline, settings) if can else "no GPU here: nothing can be measured"


def parse(benchmark: Benchmark, arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=benchmark.title, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "tune", "compare"):
        command = commands.add_parser(name, allow_abbrev=False)
        option = command.add_argument
        option("--device-type", help="whose picks; the present GPU's by default")
        option("--cache-dir", type=Path, help="kernels and records; the setting's")
        option("--jobs", type=int, help="compilations at once")
        option("--only", nargs="+", default=[], metavar="WORD", help="e.g. d64 causal")
        option("--dims", nargs="+", type=int, default=[], metavar="DIM", help="head dims; all")
        option("--top-k", type=int, default=benchmark.top_k, help="candidates a problem adds")
        option(
            "--class-limit",
            type=int,
            default=benchmark.class_limit,
            help="candidates of a head dim inspect the defaults, for each mode",
        )
        option(
            "--again",
            type=Path,
            metavar="FOLDER",
            help="tune among what the GPU's file in this folder holds and the defaults, and no others",
        )
        option(
            "--tune-seconds",
            type=float,
            default=benchmark.tune_seconds,
            help="of rounds a problem while tuning",
        )
        option(
            "--seconds",
            type=float,
            default=benchmark.seconds,
            help="of a problem's rounds in the comparison",
        )
        option("--peers", nargs="+", choices=list(PEERS[benchmark.name]), default=benchmark.peers)
        option("--results", type=Path, default=RESULTS)
        option("--ship", type=Path, help="folder to write the GPU's picks to")
        option("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def run(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    """Both halves; the worse status."""
    for command in ("tune", "compare"):
        status = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{benchmark.name}", command, *arguments],
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
    problems = [each for problem in grid.problems for each in variants(problem)]
    if options.again is not None:
        gpu_name = pipeline.environment.gpu_name or "unknown"
        held = evidence(verdict.evidence_file(options.again, gpu_name))
        known = [entry.candidate for record in held.values() for entry in trimmed(record).entries]
        pool_of = class_pools.known_pools(problems, policy, known)
    else:
        pool_of = class_pools.pools(
            problems, policy, top_k=options.top_k, class_limit=options.class_limit
        )
    class_search.search(
        problems,
        policy,
        pipeline,
        records,
        pool_of=pool_of,
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
    peers = {name: PEERS[grid.name][name] for name in options.peers}
    inspect = None
    if measurer is None:
        from attention_autotuner.tuning.measure import InProcessMeasurer

        measurer, inspect = InProcessMeasurer(seed=options.seed), side_by_side
        get_ready(grid, peers, settings_module.current().jobs or os.cpu_count() or 1)
    gpu_name = pipeline.environment.gpu_name or "unknown"
    path = options.results / slug(gpu_name) / f"{grid.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    place = {problem.describe(): index for index, problem in enumerate(grid.problems)}
    rows: list[dict[str, Any]] = []
    found = verdict.document(grid.name, rows, peers, policy, pipeline.environment)
    for row in comparison.compare(
        [meeting_of(problem, policy) for problem in grid.problems],
        peers,
        pipeline,
        measurer,
        seconds=options.seconds,
        device_type=options.device_type,
        environment=collect,
        say=say,
        seed=options.seed,
        inspect=inspect,
    ):
        rows.append(row)
        rows.sort(key=lambda each: place[each["name"]])
        found = verdict.document(grid.name, rows, peers, policy, pipeline.environment)
        write_atomic(path, json.dumps(found, indent=1) + "\n")
    settled = verdict.settle(rows, policy, records, pipeline.environment)
    if options.ship is not None and settled:
        proofs = verdict.evidence_file(options.ship, gpu_name)
        say(f"wrote {ship(options.ship, gpu_name, settled, proofs)}")
    print("\n".join(report.SECTIONS[grid.name](found)))
    say(f"wrote {path}")
    missed = [f"{name}: {bar}" for name, each in found["summary"].items() for bar in each["missed"]]
    say("missed: " + ", ".join(missed) if missed else "every bar is met")
    return 1 if missed else 0


def get_ready(grid: Grid, peers: Mapping[str, Peer], jobs: int) -> None:
    """What peers do before the first race, all at once, and who does not come."""
    with ThreadPoolExecutor() as pool:
        started = []
        for name, peer in peers.items():
            asked = [problem for problem in grid.problems if peer.asked(problem)]
            refusals = {peer.refusal(problem) for problem in asked}
            if asked and "" not in refusals:
                say(f"{name} is left out: {', '.join(sorted(refusals))}")
            elif peer.ready is not None and asked:
                say(f"{name} gets ready")
                started.append(pool.submit(peer.ready, asked, jobs))
        for each in started:
            each.result()


def say(line: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - STARTED:5.0f} s] {line}", file=sys.stderr, flush=True)
