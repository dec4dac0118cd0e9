r"""Decoding with retention: one token for every sequence of a batch, as a share of the bandwidth of a copy.

A step reads and writes the state of every head, far more than an L2 holds, so the bound is the device memory's. The
state is updated where it stands or written elsewhere; a captured graph of a few steps is replayed. Copies of tensors of
two sizes run in the same rounds, in random order, and the faster counts.

    python -m benchmarks.decode --tune        # records of the problem, with form recurrent and with form auto
    python -m benchmarks.decode --output benchmarks/results/<gpu>/retention_decode.json \
        --ship python/attention_autotuner/tuned    # in a process that did not tune: confirms them or takes them back
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from attention_autotuner.arch import Policy
from attention_autotuner.codegen.render import render
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem, of_shape
from attention_autotuner.operations.shared.tensors import (
    Inputs,
    Outputs,
    SharedWorkspace,
    bind,
    current_device,
)
from attention_autotuner.serving import loader
from attention_autotuner.tuning import class_pools
from attention_autotuner.tuning.environment import collect
from attention_autotuner.tuning.measure import warm_up
from attention_autotuner.tuning.pipeline import Built, Pipeline
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.search import MIN_GAIN
from attention_autotuner.tuning.shipping import ship

from . import results
from .contenders import PICK, Selection, select
from .run import opened
from .search import search

DECODE = of_shape((64, 8, 1, 256, 512), op="retention", form="recurrent", causal=True)
"""One token of retention for every sequence of a batch, in the form that decoding asks for."""
PROBLEMS = (DECODE, replace(DECODE, form="auto"))
COPIES_MIB = (256, 2048)
STEPS = 8  # in one graph
BAR = 0.7  # of the copy's bandwidth
WAYS = ("in place", "not in place")
COPY = "copy"

Figures = dict[str, float]


def bytes_of_step(problem: Problem) -> int:
    """Bytes that one step must move: the state read and written, and the rows of q, k, v and o."""
    rows = problem.batch * problem.heads_q
    state = 4 * rows * problem.dim_qk * problem.dim_v
    return 2 * state + 2 * rows * 2 * (problem.dim_qk + problem.dim_v)


def confirmed(selection: Selection, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A problem's row as :func:`.results.settle` reads it: the pick, or the default where that is as fast.

    Args:
        selection: of the problem; both were timed.
        summary: from :func:`summarise`.
    """
    us = {row["candidate"]: row["ways"][WAYS[0]]["us"] for row in summary["rows"]}
    pick, default = selection.pick.name, selection.default.name
    kept = pick if us[default] / us[pick] - 1.0 >= MIN_GAIN else default
    entries = {PICK: {"median_us": us[kept]}}
    return {"problem": asdict(selection.problem), "pick": kept, "entries": entries}


def tensors_of(problem: Problem, device: torch.device | str) -> dict[str, torch.Tensor]:
    """One token's rows, the usual decays, and a state."""
    torch.manual_seed(0)
    p, dtype = problem, torch.float16
    heads = torch.arange(p.heads_q, dtype=torch.float64)
    log2_gamma = torch.log1p(-(2.0 ** (-5 - heads))) / torch.log(torch.tensor(2.0))
    return {
        "q": torch.randn(p.batch, p.heads_q, 1, p.dim_qk, dtype=dtype, device=device),
        "k": torch.randn(p.batch, p.heads_kv, 1, p.dim_qk, dtype=dtype, device=device),
        "v": torch.randn(p.batch, p.heads_kv, 1, p.dim_v, dtype=dtype, device=device),
        "log2_gamma": log2_gamma.to(device, torch.float32),
        "initial_state": torch.randn(p.batch, p.heads_q, p.dim_qk, p.dim_v, device=device),
    }


def step_of(built: Built, problem: Problem, *, in_place: bool) -> Callable[[], None]:
    """A launch of one step on the current GPU."""
    device = current_device()
    tensors = tensors_of(problem, device)
    state = tensors["initial_state"]
    o = torch.empty_like(tensors["v"])
    if problem.heads_q != problem.heads_kv:
        o = o.repeat_interleave(problem.heads_q // problem.heads_kv, 1)
    written = {"o": o, "final_state": state if in_place else torch.empty_like(state)}
    kernel = loader.load(built.path)
    kernel.prepare(torch.cuda.current_device())
    outputs = Outputs(tensors=written, workspace=SharedWorkspace(device))
    return bind(kernel, problem, Inputs(tensors=tensors), outputs)


def captured(step: Callable[[], None], steps: int) -> torch.cuda.CUDAGraph:
    """A graph of several steps, run once."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            step()
    graph.replay()
    return graph


def measure(runs: Mapping[str, Callable[[], None]], rounds: int, seed: int = 0) -> dict[str, float]:
    """Median microseconds of every run, interleaved in random order."""
    order = list(runs)
    shuffle = random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in runs}
    warm_up()
    for _ in range(rounds):
        shuffle(order)
        events = {name: (_event(), _event()) for name in order}
        for name in order:
            events[name][0].record()
            runs[name]()
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(samples) for name, samples in times.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def bandwidths(times_us: Mapping[str, float], moved: Mapping[str, int]) -> Figures:
    """GB/s by name."""
    return {name: moved[name] / us / 1e3 for name, us in times_us.items()}


def summarise(rates: Mapping[str, float], names: Sequence[str], problem: Problem) -> dict[str, Any]:
    """Shares of the best copy, of every candidate and way.

    Args:
        rates: GB/s by ``copy ...`` and ``<way>: <candidate>``.
        names: of the candidates that were timed, the pick first.
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


def missed(summary: Mapping[str, Any]) -> list[str]:
    """The ways in which the pick misses the bar."""
    ways = summary["rows"][0]["ways"]
    return [way for way in WAYS if ways[way]["share_of_copy"] < BAR]


def _copy(mib: int) -> tuple[Callable[[], None], int]:
    source = torch.randn(mib * 2**18, device="cuda")
    target = torch.empty_like(source)
    return lambda: (target.copy_(source), None)[1], 2 * mib * 2**20


def run(problem: Problem, built: Mapping[str, Built], rounds: int) -> dict[str, Any]:
    """Time every candidate in both ways beside the copies."""
    runs: dict[str, Callable[[], None]] = {}
    moved: dict[str, int] = {}
    for mib in COPIES_MIB:
        name = f"{COPY} {mib} MiB"
        runs[name], moved[name] = _copy(mib)
    for name, kernel in built.items():
        for way in WAYS:
            graph = captured(step_of(kernel, problem, in_place=way == WAYS[0]), STEPS)
            runs[f"{way}: {name}"] = graph.replay
            moved[f"{way}: {name}"] = STEPS * bytes_of_step(problem)
    return summarise(bandwidths(measure(runs, rounds), moved), list(built), problem)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, or measure, print and write; answers 1 when the bar is missed and 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--tune", action="store_true", help="write records and nothing else")
    option("--top-k", type=int, default=8, help="candidates that tuning tries beside the default")
    option("--tune-seconds", type=float, default=1.0, help="of rounds a problem while tuning")
    option("--output", type=Path, help="JSON file to write")
    option("--ship", type=Path, help="folder to write the GPU's picks to")
    option("--rounds", type=int, default=30)
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
            tune(policy, pipeline, records, options.top_k, options.tune_seconds)
            return 0
        return compare(policy, pipeline, records, options)


def tune(
    policy: Policy, pipeline: Pipeline, records: RecordStore, top_k: int, seconds: float
) -> None:
    """Records for the problem in both forms."""
    pool_of = class_pools.pools(PROBLEMS, policy, top_k=top_k)
    search(PROBLEMS, policy, pipeline, records, pool_of=pool_of, seconds=seconds, say=print)


def compare(
    policy: Policy, pipeline: Pipeline, records: RecordStore, options: argparse.Namespace
) -> int:
    """Time what dispatch would run and the defaults, and settle the records."""
    selections = [select(problem, policy) for problem in PROBLEMS]
    built = usable([kernel for s in selections for kernel in (s.pick, s.default)], pipeline)
    selections = [s for s in selections if {s.pick.name, s.default.name} <= set(built)]
    if not selections or selections[0].problem != DECODE:
        return 1
    summary = run(DECODE, built, options.rounds)
    for row in summary["rows"]:
        figures = ", ".join(
            f"{way} {figure['us']:.1f} us ({figure['share_of_copy']:.1%})"
            for way, figure in row["ways"].items()
        )
        print(f"{row['candidate']}: {figures} of a copy's {summary['copy_gb_per_s']:.0f} GB/s")
    rows = [confirmed(selection, summary) for selection in selections]
    summary["rows"].sort(key=lambda row: row["candidate"] != rows[0]["pick"])
    settled = results.settle(rows, policy, records, pipeline.environment)
    if options.ship is not None and settled:
        gpu_name = pipeline.environment.gpu_name or "unknown"
        proofs = results.evidence_file(options.ship, gpu_name)
        print(f"wrote {ship(options.ship, gpu_name, settled, proofs)}")
    late = missed(summary)
    print("missed: " + ", ".join(late) if late else "the bar is met")
    if options.output is not None:
        report = {
            "benchmark": "retention_decode",
            "problem": DECODE.describe(),
            "pick": rows[0]["pick"],
            "bar": BAR,
            "environment": collect(torch.cuda.current_device()).to_json(),
            **summary,
        }
        results.write(options.output, report)
    return 1 if late else 0


def usable(wanted: Sequence[Candidate], pipeline: Pipeline) -> dict[str, Built]:
    """The kernels that build and are right, by name."""
    candidates = list(dict.fromkeys(wanted))
    builds = pipeline.build([render(c) for c in candidates], lambda done, total, message: None)
    built: dict[str, Built] = {}
    for candidate, result in zip(candidates, builds, strict=True):
        outcome = (
            result
            if isinstance(result, Outcome)
            else pipeline.verify(DECODE, result, deterministic=candidate.deterministic)
        )
        if outcome.ok and not isinstance(result, Outcome):
            built[candidate.name] = result
        else:
            print(f"{candidate.name}: {outcome.kind}: {outcome.reason}", file=sys.stderr)
    return built


if __name__ == "__main__":
    sys.exit(main())
