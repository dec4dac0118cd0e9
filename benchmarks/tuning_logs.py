"""Reads the recorded searches in tests/data/tuning_logs; see the README there for what maps and what does not."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from attention_autotuner.arch import resolve
from attention_autotuner.arch.spec import ArchSpec
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import resources
from attention_autotuner.kernels.cost_model import predict
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.kernels.shared.coefficients import Coefficients
from attention_autotuner.kernels.shared.estimates import expected_usage

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "tuning_logs"


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
        return sorted(
            self.runs,
            key=lambda run: (
                self.predict_us(run, coefficients),
                run.candidate.name,
                run.smem_bytes,
            ),
        )


def parse_config(line: str) -> dict[str, str]:
    """The fields of a ``Config(...)`` line."""
    body = line.removeprefix("Config(").removesuffix(")")
    return dict(part.strip().split("=") for part in body.split(","))


def read_log(path: Path) -> Log:
    """A file of the folder, parsed; of runs that map to one candidate the fastest is kept."""
    gpu, _, dim_qk, dim_v = path.stem.split("_")
    problem = Problem(
        batch=4,
        heads_q=8,
        heads_kv=8,
        seqlen_q=2048,
        seqlen_k=2048,
        dim_qk=int(dim_qk),
        dim_v=int(dim_v),
    )
    lines = [line.strip() for line in path.read_text().splitlines()]
    lines = lines[: lines.index("best config:")]
    best: dict[tuple[Candidate, int], float] = {}
    for config, time in itertools.pairwise(lines):
        if not config.startswith("Config("):
            continue
        run = _run(problem, parse_config(config), float(time) * 1e3)
        key = (run.candidate, run.smem_bytes)
        best[key] = min(best.get(key, run.measured_us), run.measured_us)
    runs = tuple(
        LoggedRun(candidate=candidate, smem_bytes=smem, measured_us=time)
        for (candidate, smem), time in best.items()
    )
    return Log(name=path.stem, problem=problem, spec=resolve(gpu).spec, runs=runs)


def _run(problem: Problem, config: dict[str, str], measured_us: float) -> LoggedRun:
    warps = int(config["Nthreads"]) // 32
    shared = config["fuse_type"] == "shared"
    warps_n = int(config["warps_mma1_n"]) if shared else 1
    stages, k_slice = int(config["num_stages_qk"]), int(config["BlockKSmem"])
    candidate = Candidate(
        dtype="fp16",
        padded_dim_qk=problem.padded_dim_qk,
        padded_dim_v=problem.padded_dim_v,
        knobs=ForwardKnobs(
            block_m=int(config["Br"]),
            block_n=int(config["Bc"]),
            warps_m=warps // warps_n,
            warps_n=warps_n,
            num_stages=stages,
            k_slice=k_slice,
        ),
    )
    elements = stages * (candidate.knobs.block_m + candidate.knobs.block_n) * k_slice
    elements += int(config["num_stages_v"]) * int(config["BlockKSmem2"]) * problem.dim_v
    if shared:
        elements += candidate.knobs.block_m * candidate.knobs.block_n
    return LoggedRun(candidate=candidate, smem_bytes=2 * elements, measured_us=measured_us)


def read_logs() -> list[Log]:
    """All of them, in the order of their names."""
    return [read_log(path) for path in sorted(FOLDER.glob("*.txt"))]
