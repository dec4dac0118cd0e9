"""Searches in processes of their own over fake kernels; a log says who built, checked and timed what."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_autotuner.arch import H100
from attention_autotuner.codegen.build import Progress
from attention_autotuner.codegen.render import RenderedKernel
from attention_autotuner.core.outcome import Outcome, Postponed, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.tuning import tune
from attention_autotuner.tuning.pipeline import Built, Doubt
from attention_autotuner.tuning.racing import History, Race, Timing
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.result import TuneResult
from tests.fake_pipeline import FakeBuilt, FakePipeline, report
from tests.record_entries import PROVEN

PROBLEM = Problem(batch=1, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024)
POLICY = H100()
ROUNDS = 12  # of a race
TOP_K = 4


@dataclass
class SlowPipeline(FakePipeline):
    """A pipeline whose steps take a while, and are written down when they are done.

    Attributes:
        folder: of the log, and of what was built.
        step_seconds: of one build, check, sample of a round, or confirmation.
        on_step: called with a step's name before it begins.
    """

    folder: Path = Path()
    step_seconds: float = 0.0
    on_step: Callable[[str], None] = lambda step: None

    def _step(self, kind: str, name: str) -> None:
        self.on_step(f"{kind} {name}")
        self.folder.mkdir(parents=True, exist_ok=True)
        time.sleep(self.step_seconds)
        with (self.folder / "log").open("a") as log:
            log.write(f"{kind} {name}\n")

    def build(
        self,
        kernels: Sequence[RenderedKernel],
        progress: Progress,
        stop: Callable[[], bool] = lambda: False,
    ) -> Sequence[Built | Outcome]:
        results: list[Built | Outcome] = []
        for index, kernel in enumerate(kernels, start=1):
            place = self.folder / "kernels" / kernel.name
            if stop():
                results.append(Postponed(reason="the budget ended"))
                continue
            if not place.exists():
                self._step("build", kernel.name)
                place.mkdir(parents=True)
            progress(index, len(kernels), kernel.name, 1.0)
            results.append(FakeBuilt(path=place, report=report()))
        return results

    def verify(self, problem: Problem, built: Built, *, deterministic: bool) -> Outcome:
        self._step("verify", built.path.name)
        return Wrong(reason="all zeros") if built.path.name == wrong() else PROVEN

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
        race = Race(list(built), keep=keep, history=history)
        while race.rounds < ROUNDS:
            self._step("round", str(race.rounds))
            race.add({name: 80.0 if name == best() else 100.0 for name in race.order()})
        return race.results(), False

    def confirm_all(self, doubts: Sequence[Doubt]) -> list[float | Outcome | None]:
        self._step("confirm", doubts[0].pick[0])
        return [1.25]


@functools.cache  # forks of a test have it, too
def _ranked() -> list[str]:
    default = POLICY.default(PROBLEM)
    ranked = rank(PROBLEM, POLICY.legal(PROBLEM), POLICY.spec)
    return [candidate.name for candidate, _ in ranked if candidate != default]


def best() -> str:
    """The kernel that is fastest: the cost model's first that is not the default."""
    return _ranked()[0]


def wrong() -> str:
    """A kernel that computes the wrong thing."""
    return _ranked()[1]


def search(
    folder: Path,
    step_seconds: float = 0.0,
    on_step: Callable[[str], None] = lambda step: None,
) -> TuneResult:
    """Tune the problem with records in a folder."""
    pipeline = SlowPipeline(folder=folder, step_seconds=step_seconds, on_step=on_step)
    records = RecordStore(folder / "records")
    return tune(PROBLEM, POLICY, records=records, pipeline=pipeline, top_k=TOP_K)


def search_until_killed(folder: Path, step_seconds: float, kill_at: int) -> None:
    """:func:`search` in a process that kills itself when it begins its n-th step."""
    left = iter(range(kill_at, 0, -1))

    def on_step(step: str) -> None:
        if next(left, 0) == 1:
            os.kill(os.getpid(), 9)

    search(folder, step_seconds, on_step)


def log(folder: Path) -> list[str]:
    """The steps that came to their end, in their order."""
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []
