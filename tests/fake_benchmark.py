"""Stand-ins for compiler and GPU under the benchmarks: they build, check and time by rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attention_autotuner.arch import H100
from attention_autotuner.codegen.build import Progress
from attention_autotuner.codegen.render import RenderedKernel
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.core.report import CompilerReport
from attention_autotuner.tuning import class_pools
from attention_autotuner.tuning.entries import Entry
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.measure import InProcessMeasurer
from attention_autotuner.tuning.pipeline import Built, Doubt
from attention_autotuner.tuning.racing import History, Race, Timing
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from benchmarks.search import search
from benchmarks.session import Session
from benchmarks.suites import Trial
from tests.fake_pipeline import FakeBuilt
from tests.record_entries import PROVEN

SHORT = Problem(batch=2, heads_q=32, heads_kv=32, seqlen_q=512, seqlen_k=512, dim_qk=64, dim_v=64)
LONG = replace(SHORT, seqlen_q=4096, seqlen_k=4096, causal=True)
WIDE = replace(SHORT, dim_qk=128, dim_v=128)
POLICY = H100()
GPU = Environment(
    gpu_name="NVIDIA H100 80GB HBM3", num_sms=132, driver="580.1", torch="2.13.0", nvcc="13.0.88"
)


@dataclass
class FakePipeline:
    """Builds, checks and times by rule; remembers the calls."""

    environment: Environment = GPU
    gpu_id: str = "GPU-0"
    deadline: float = 0.0
    time_us: Callable[[Problem, str], float] = lambda problem, name: 100.0
    build_outcome: Callable[[str], Outcome | None] = lambda name: None
    report: Callable[[str], CompilerReport] = lambda name: parse_ptxas("")
    check: Callable[[str], Outcome] = lambda name: PROVEN
    interrupt: bool = False
    batches: list[list[str]] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    claims: dict[str, bool] = field(default_factory=dict)
    raced: list[tuple[Problem, list[str]]] = field(default_factory=list)

    def build(
        self,
        kernels: Sequence[RenderedKernel],
        progress: Progress,
        stop: Callable[[], bool] = lambda: False,
    ) -> Sequence[Built | Outcome]:
        self.batches.append([kernel.name for kernel in kernels])
        progress(len(kernels), len(kernels), "done", 1.0)
        return [
            self.build_outcome(kernel.name)
            or FakeBuilt(path=Path("/kernels", kernel.name), report=self.report(kernel.name))
            for kernel in kernels
        ]

    def can_measure(self) -> bool:
        return True

    def verify(self, problem: Problem, built: Built, *, deterministic: bool) -> Outcome:
        self.verified.append(built.path.name)
        self.claims[built.path.name] = deterministic
        return self.check(built.path.name)

    def measure(
        self,
        problem: Problem,
        built: dict[str, Built],
        *,
        budget_seconds: float,
        keep: Collection[str],
        on_round: Callable[[int, list[str]], None],
        history: History | None = None,
    ) -> tuple[list[Timing], bool]:
        self.raced.append((problem, list(built)))
        race = Race(list(built), keep=keep, history=history)
        for _ in range(12):
            race.add({name: self.time_us(problem, name) for name in race.running})
        return race.results(), self.interrupt

    def measure_steps(self, problem: Problem, *arguments: Any, **rest: Any) -> Any:
        raise AssertionError("a race of the benchmarks times steps")

    def confirm_all(self, doubts: Sequence[Doubt]) -> list[float | None]:
        raise AssertionError("a second process confirms, not the search")


class FakeMeasurer(InProcessMeasurer):
    """Times by rule; an entry whose time is an outcome fails with it."""

    def __init__(self, time_us: Callable[[Problem, str], float | Outcome]) -> None:
        super().__init__()
        self.time_us = time_us
        self.raced: list[list[str]] = []

    def measure(
        self,
        problem: Problem,
        entries: Sequence[Entry],
        *,
        budget_seconds: float,
        keep: Collection[str] = (),
    ) -> list[Timing]:
        names = [entry.name for entry in entries]
        self.raced.append(names)
        race = self.race = Race(names, keep=keep)
        times = {}
        for name in names:
            time = self.time_us(problem, name)
            if isinstance(time, Outcome):
                race.fail(name, time)
            else:
                times[name] = time
        for wobble in (1.0, 1.2, 0.9, 1.1, 1.0):  # of the clock: pairs do not see it
            race.add({name: time * wobble for name, time in times.items()})
        return race.results()


def run_search(
    problems: Sequence[Problem], pipeline: FakePipeline, records: RecordStore, top_k: int = 3
) -> list[TuningRecord]:
    """Tune without a GPU."""
    return search(
        problems,
        POLICY,
        pipeline,
        records,
        pool_of=class_pools.pools(problems, POLICY, top_k=top_k),
        seconds=1.0,
        say=lambda line: None,
    )


def candidates_of(
    problem: Problem, tuned: Sequence[Problem] = (SHORT, LONG, WIDE)
) -> list[Candidate]:
    """The pool of a problem's class when all three are tuned, or some."""
    return class_pools.pools(tuned, POLICY, top_k=3)[class_pools.class_of(problem)]


def session_of(
    wanted: Sequence[Trial],
    time_us: Callable[[Problem, str], float | Outcome] = lambda problem, name: 100.0,
    **rest: Any,
) -> Session:
    """A session over the stand-ins; fields of it may be replaced."""
    fields: dict[str, Any] = {
        "policy": POLICY,
        "pipeline": FakePipeline(),
        "measurer": FakeMeasurer(time_us),
        "seconds": 0.1,
        "environment": lambda: replace(GPU, sm_clock_mhz=1700.0, power_draw_w=500.0),
        "alive": lambda: True,
        "say": lambda line: None,
    }
    return Session(trials=wanted, **(fields | rest))
