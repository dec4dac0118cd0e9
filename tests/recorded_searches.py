"""Recorded searches of another implementation: timings that the cost model is held against where no GPU of ours was.

``recorded_searches.csv`` has attention forward, fp16, batch 4, 8 heads, sequence length 2048, not causal, on an A100
and an RTX 4090: figures taken, in columns of our own and to a nanosecond, from the tables that the public
repository smallscientist1/attention_autotuner keeps under ``docs/tuning_result_*``. Where power clocks were and how
often each was run is not known.

The kernels are others, of the same ``mma.sync`` and ``cp.async`` instructions. The columns are knobs of ours, times in
microseconds, and the shared memory that the other kernels take: it says what no knob of ours does, among it V in slices
of fewer keys, with stages of their own, and P between the two GEMMs in shared memory.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from attention_autotuner.arch import resolve
from attention_autotuner.arch.spec import ArchSpec
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem, of_shape
from attention_autotuner.kernels import resources
from attention_autotuner.kernels.cost_model import predict
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.kernels.shared.coefficients import FITTED, Coefficients
from attention_autotuner.kernels.shared.estimates import expected_usage

TABLE = Path(__file__).with_name("data") / "recorded_searches.csv"
KNOBS = ("block_m", "block_n", "warps_m", "warps_n", "num_stages", "k_slice")

# Start values by hand (latencies as micro-benchmarks of these parts publish them) of what the logs decide.
BY_HAND = replace(
    FITTED,
    tensor_efficiency=0.95,
    smem_efficiency=0.9,
    unit_sharpness=2.0,
    warp_overlap_power=1.0,
    ahead_exposure=0.5,
    scores_alu_instructions=4.0,
    barrier_clk=40.0,
    load_latency_clk=600.0,
    cta_clk=1500.0,
    memory_overlap_loss=0.1,
)


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """One configuration of a search and its time; the shared memory is the other implementation's."""

    candidate: Candidate
    smem_bytes: int
    measured_us: float


@dataclass(frozen=True, kw_only=True)
class Log:
    """A recorded search: everything that was tried on one problem and GPU."""

    name: str
    problem: Problem
    spec: ArchSpec
    runs: tuple[LoggedRun, ...]

    def predict_us(self, run: LoggedRun, coefficients: Coefficients) -> float:
        """The model's time of a run, microseconds."""
        (kernel,) = resources.kernels(run.candidate)
        usage = replace(expected_usage(kernel, self.spec), smem_bytes=run.smem_bytes)
        return predict(self.problem, run.candidate, self.spec, (usage,), coefficients).us

    def ranked(self, coefficients: Coefficients) -> list[LoggedRun]:
        """All runs, the fastest by prediction first."""

        def place(run: LoggedRun) -> tuple[float, str, int]:
            return self.predict_us(run, coefficients), run.candidate.name, run.smem_bytes

        return sorted(self.runs, key=place)


def read_logs() -> list[Log]:
    """All searches, in the order of the table."""
    with TABLE.open(encoding="utf-8", newline="") as lines:
        rows = groupby(csv.DictReader(lines), lambda row: (row["gpu"], row["dim_qk"], row["dim_v"]))
        return [_log(gpu, int(qk), int(v), group) for (gpu, qk, v), group in rows]


def _log(gpu: str, dim_qk: int, dim_v: int, rows: Iterable[Mapping[str, str]]) -> Log:
    problem = of_shape((4, 8, 2048, dim_qk, dim_v))
    runs = []
    for row in rows:
        knobs: dict[str, Any] = {name: int(row[name]) for name in KNOBS}
        candidate, us = Candidate.of(problem, ForwardKnobs(**knobs)), float(row["us"])
        smem_bytes = int(row["smem_bytes"])
        runs.append(LoggedRun(candidate=candidate, smem_bytes=smem_bytes, measured_us=us))
    name = f"{gpu} {dim_qk}/{dim_v}"
    return Log(name=name, problem=problem, spec=resolve(gpu).spec, runs=tuple(runs))
