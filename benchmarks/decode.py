r"""Decoding with retention: one token for every sequence of a batch, as a share of the bandwidth of a copy.

A step reads and writes the state of every head, far more than an L2 holds, so the bound is the device memory's. The
state is updated where it stands or written elsewhere; copies of tensors of two sizes run in the same rounds, in random
order, and the faster counts.

    python -m benchmarks.decode --tune        # records of the problem, with form recurrent and with form auto
    python -m benchmarks.decode --output benchmarks/results/<gpu>/retention_decode.json \
        --ship python/attention_autotuner/tuned    # in a process that did not tune: confirms them or takes them back
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem, of_shape
from attention_autotuner.operations.shared.tensors import Inputs, Outputs
from attention_autotuner.tuning import class_pools
from attention_autotuner.tuning.entries import Entry, KernelEntry
from attention_autotuner.tuning.environment import collect
from attention_autotuner.tuning.measure import InProcessMeasurer
from attention_autotuner.tuning.pipeline import Built, Pipeline
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.stages import MIN_GAIN, built_of

from . import results
from .contenders import PICK, Selection, select, usable
from .run import opened
from .search import search
from .settling import settle_and_ship

DECODE = of_shape((64, 8, 1, 256, 512), op="retention", form="recurrent", causal=True)
"""One token of retention for every sequence of a batch, in the form that decoding asks for."""
PROBLEMS = (DECODE, replace(DECODE, form="auto"))
COPIES_MIB = (256, 2048)
BAR = 0.7  # of the copy's bandwidth
WAYS = ("in place", "not in place")
COPY = "copy"


def bytes_of_step(problem: Problem) -> int:
    """Bytes that one step must move: the state read and written, and the rows of q, k, v and o."""
    rows = problem.batch * problem.heads_q
    state = 4 * rows * problem.dim_qk * problem.dim_v
    return 2 * state + 2 * rows * 2 * (problem.dim_qk + problem.dim_v)


class InPlaceEntry(KernelEntry):
    """A step that writes the state where it read it."""

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """See :meth:`KernelEntry.prepare`."""
        in_place = [
            replace(o, tensors={**o.tensors, "final_state": i.tensors["initial_state"]})
            for i, o in zip(inputs, outputs, strict=True)
        ]
        super().prepare(inputs, in_place)


@dataclass
class CopyEntry:
    """A copy within the device memory.

    Attributes:
        name: how it is reported.
        mib: size of the tensor, which is read and written.
    """

    name: str
    mib: int

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Make both tensors."""
        self._source = torch.randn(self.mib * 2**18, device="cuda")
        self._target = torch.empty_like(self._source)

    def run(self, index: int) -> None:
        """Copy."""
        self._target.copy_(self._source)


def run(
    problem: Problem, built: Mapping[str, Built], measurer: InProcessMeasurer, seconds: float
) -> Any:
    """Time every candidate in both ways beside the copies.

    Returns:
        GB/s of the fastest copy, and for every candidate and way the time, GB/s and the share of that copy.

    Raises:
        RuntimeError: one could not be timed.
    """
    kinds = (InPlaceEntry, KernelEntry)
    moved = {f"{COPY} {mib} MiB": 2 * mib * 2**20 for mib in COPIES_MIB}
    copies = [CopyEntry(name=name, mib=mib) for name, mib in zip(moved, COPIES_MIB, strict=True)]
    steps = [
        kind(name=f"{way}: {name}", path=kernel.path, problem=problem)
        for name, kernel in built.items()
        for way, kind in zip(WAYS, kinds, strict=True)
    ]
    moved |= {entry.name: bytes_of_step(problem) for entry in steps}
    entries: list[Entry] = [*copies, *steps]
    rates = {}
    for timing in measurer.measure(problem, entries, budget_seconds=seconds, keep=list(moved)):
        if not timing.outcome.ok:
            raise RuntimeError(f"{timing.name}: {timing.outcome.kind}: {timing.outcome.reason}")
        rates[timing.name] = moved[timing.name] / timing.median_us / 1e3
    return summarise(rates, list(built), problem)


def summarise(rates: Mapping[str, float], names: Sequence[str], problem: Problem) -> dict[str, Any]:
    """Shares of the best copy, of every candidate and way.

    Args:
        rates: GB/s by ``copy ...`` and ``<way>: <candidate>``.
        names: of the candidates that were timed.
        problem: what was computed.
    """
    copy = max(rate for name, rate in rates.items() if name.startswith(COPY))
    rows = []
    for name in names:
        ways = {}
        for way in WAYS:
            rate = rates[f"{way}: {name}"]
            us = bytes_of_step(problem) / rate / 1e3
            ways[way] = {"us": us, "gb_per_s": rate, "share_of_copy": rate / copy}
        rows.append({"candidate": name, "ways": ways})
    return {"copy_gb_per_s": copy, "rows": rows}


def confirmed(selection: Selection, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A problem's row as :func:`.settling.settle_and_ship` reads it: the pick, or the default where that is as fast.

    Args:
        selection: of the problem; both were timed.
        summary: from :func:`summarise`.
    """
    us = {row["candidate"]: row["ways"][WAYS[0]]["us"] for row in summary["rows"]}
    pick, default = selection.pick.name, selection.default.name
    kept = pick if us[default] / us[pick] - 1.0 >= MIN_GAIN else default
    entries = {PICK: {"median_us": us[kept]}}
    return {"problem": asdict(selection.problem), "pick": kept, "entries": entries}


def missed(summary: Mapping[str, Any]) -> list[str]:
    """The ways in which the pick, the first row, misses the bar."""
    ways = summary["rows"][0]["ways"]
    return [way for way in WAYS if ways[way]["share_of_copy"] < BAR]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, or measure, print and write; returns 1 when the bar is missed and 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--tune", action="store_true", help="write records and nothing else")
    option("--top-k", type=int, default=8, help="candidates that tuning tries beside the default")
    option("--tune-seconds", type=float, default=1.0, help="of rounds a problem while tuning")
    option("--output", type=Path, help="JSON file to write")
    option("--ship", type=Path, help="folder to write the GPU's picks to")
    option("--seconds", type=float, default=2.0, help="of timing rounds (default 2)")
    option("--jobs", type=int, help="compilations at once")
    option("--cache-dir", type=Path, help="kernels and records; the setting's")
    parser.set_defaults(device_type=None)
    options = parser.parse_args(arguments)
    with opened(options) as machine:
        if isinstance(machine, str):
            print(f"decode: {machine}", file=sys.stderr)
            return 2
        policy, pipeline, settings = machine
        records = RecordStore(settings.cache_dir / "records")
        if options.tune:
            pool_of = class_pools.pools(PROBLEMS, policy, top_k=options.top_k)
            seconds = options.tune_seconds
            search(PROBLEMS, policy, pipeline, records, pool_of=pool_of, seconds=seconds, say=print)
            return 0
        return compare(policy, pipeline, InProcessMeasurer(), records, options)


def compare(
    policy: Policy,
    pipeline: Pipeline,
    measurer: InProcessMeasurer,
    records: RecordStore,
    options: argparse.Namespace,
) -> int:
    """Time what dispatch would run and the defaults, and settle the records."""
    selections = [select(problem, policy) for problem in PROBLEMS]
    built = kernels_of([kernel for s in selections for kernel in (s.pick, s.default)], pipeline)
    selections = [s for s in selections if {s.pick.name, s.default.name} <= set(built)]
    if not selections or selections[0].problem != DECODE:
        return 1
    summary = run(DECODE, built, measurer, options.seconds)
    for row in summary["rows"]:
        figures = ", ".join(
            f"{way} {figure['us']:.1f} us ({figure['share_of_copy']:.1%})"
            for way, figure in row["ways"].items()
        )
        print(f"{row['candidate']}: {figures} of a copy's {summary['copy_gb_per_s']:.0f} GB/s")
    rows = [confirmed(selection, summary) for selection in selections]
    summary["rows"].sort(key=lambda row: row["candidate"] != rows[0]["pick"])
    settle_and_ship(rows, policy, records, pipeline.environment, options.ship, print)
    late = missed(summary)
    print("missed: " + ", ".join(late) if late else "the bar is met")
    if options.output is not None:
        report = {
            "benchmark": "retention_decode",
            "problem": DECODE.describe(),
            "pick": rows[0]["pick"],
            "bar": BAR,
            "environment": collect().to_json(),
            **summary,
        }
        results.write(options.output, report)
    return 1 if late else 0


def kernels_of(wanted: Sequence[Candidate], pipeline: Pipeline) -> dict[str, Built]:
    """The kernels that build and are right, by name."""
    problems = dict.fromkeys(wanted, DECODE)
    right, outcomes = usable(problems, built_of(problems, pipeline), pipeline)
    for candidate, outcome in outcomes.items():
        if candidate not in right:
            print(f"{candidate.name}: {outcome.kind}: {outcome.reason}", file=sys.stderr)
    return {candidate.name: kernel for candidate, kernel in right.items()}


if __name__ == "__main__":
    sys.exit(main())
