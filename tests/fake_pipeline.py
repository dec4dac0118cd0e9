"""Fake pipelines for searches: builds, checks and timings follow rules of the test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import Progress
from attention_autotuner.codegen.render import RenderedKernel
from attention_autotuner.core.outcome import Outcome, Postponed
from attention_autotuner.core.problem import Problem
from attention_autotuner.core.report import CompilerReport
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.pipeline import Built, Doubt
from attention_autotuner.tuning.racing import History, Race, Timing
from tests.record_entries import PROVEN

GPU = Environment(gpu_name="NVIDIA H100 80GB HBM3", num_sms=132, driver="580.1", torch="2.13.0")


@dataclass(frozen=True, kw_only=True)
class FakeBuilt(Artifact):
    """An artifact of which a test says no more than it needs."""

    name: str = ""
    digest: str = ""
    kernel_digest: str = ""
    target: BuildTarget = field(default_factory=lambda: BuildTarget(arch="90"))
    toolchain: dict[str, str] = field(default_factory=dict)
    build_seconds: float = 0.0
    build_peak_bytes: int = 0


def report(
    registers: int = 128, loop_spills: bool | None = False, spilled_each_way: int = 160
) -> CompilerReport:
    spilled = spilled_each_way if loop_spills else 0
    return CompilerReport(
        registers=registers,
        spill_store_bytes=spilled,
        spill_load_bytes=spilled,
        stack_bytes=0,
        static_smem_bytes=0,
        loop_spills=loop_spills,
        kernels=(),
        warnings=(),
    )


@dataclass
class FakePipeline:
    """A pipeline whose outcomes and times follow rules; it records the requests."""

    environment: Environment = GPU
    gpu_id: str = "GPU-0"
    deadline: float = 0.0
    gpu: bool = True
    time_us: Callable[[str], float] = lambda name: 100.0
    build_outcome: Callable[[str], Outcome | None] = lambda name: None
    spills: Callable[[str], bool] = lambda name: False
    spilled_each_way: Callable[[str], int] = lambda name: 160
    verify_outcome: Callable[[str], Outcome] = lambda name: PROVEN
    timing_outcome: Callable[[str], Outcome | None] = lambda name: None
    confirmed_ratio: float | Outcome | None = None
    interrupt_in: str = ""
    built: list[str] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    confirmations: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    claims: dict[str, bool] = field(default_factory=dict)
    budget_seconds: float = 0.0
    steps: dict[str, tuple[str, str]] = field(default_factory=dict)

    def build(
        self,
        kernels: Sequence[RenderedKernel],
        progress: Progress,
        stop: Callable[[], bool] = lambda: False,
    ) -> Sequence[Built | Outcome]:
        if self.interrupt_in == "build":
            raise KeyboardInterrupt
        results: list[Built | Outcome] = []
        for index, kernel in enumerate(kernels, start=1):
            if stop():
                results.append(Postponed(reason="the budget ended before it was compiled"))
                continue
            progress(index, len(kernels), kernel.name, 2.0)
            self.built.append(kernel.name)
            failure = self.build_outcome(kernel.name)
            loop_spills = self.spills(kernel.name)
            good = FakeBuilt(
                path=Path("/kernels") / kernel.name,
                report=report(128, loop_spills, self.spilled_each_way(kernel.name)),
            )
            results.append(failure or good)
        return results

    def can_measure(self) -> bool:
        return self.gpu

    def verify(self, problem: Problem, built: Built, *, deterministic: bool) -> Outcome:
        if self.interrupt_in == "verify" and len(self.verified) == 2:
            raise KeyboardInterrupt
        self.verified.append(built.path.name)
        self.claims[built.path.name] = deterministic
        return self.verify_outcome(built.path.name)

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
        self.measured += built
        self.problems.append(problem)
        self.budget_seconds = budget_seconds
        race = Race(list(built), keep=keep, history=history)
        for name in built:
            failure = self.timing_outcome(name)
            if failure is not None:
                race.fail(name, failure)
        for _ in range(6):
            if race.running and not race.settled(min_rounds=6):
                race.add({name: self.time_us(name) for name in race.running})
                on_round(race.rounds, race.running)
        return race.results(), self.interrupt_in == "measure"

    def measure_steps(
        self,
        problem: Problem,
        steps: Mapping[str, tuple[Built, Built]],
        *,
        budget_seconds: float,
        history: History | None = None,
    ) -> tuple[list[Timing], bool]:
        self.problems.append(problem)
        self.steps = {name: (f.path.name, b.path.name) for name, (f, b) in steps.items()}
        race = Race(list(steps), keep=list(steps), history=history)
        for _ in range(6 - race.rounds):
            race.add({name: sum(map(self.time_us, pair)) for name, pair in self.steps.items()})
            if self.interrupt_in == "step":
                raise KeyboardInterrupt
        return race.results(), False

    def confirm_all(self, doubts: Sequence[Doubt]) -> Sequence[float | Outcome | None]:
        self.confirmations += [(doubt.pick[0], doubt.default[0]) for doubt in doubts]
        return [self.confirmed_ratio for _ in doubts]


def fast(name: str, us: float) -> Callable[[str], float]:
    return lambda asked: us if asked == name else 100.0
