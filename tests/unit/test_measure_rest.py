"""Rests between the rounds of a measurement, over a clock and a GPU that are told what to take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import measure, rounds, sampling
from attention_autotuner.tuning.measure import InProcessMeasurer, TorchDevice

PROBLEM = Problem(
    batch=1, heads_q=1, heads_kv=1, seqlen_q=16, seqlen_k=16, dim_qk=64, dim_v=64, dtype="fp16"
)
ROUND_SECONDS = 0.002


class Clock:
    """Stands still until somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rests: list[float] = []
        self.warmed: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds

    def synchronize(self) -> None:
        self.now += ROUND_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    sample = SimpleNamespace(enqueue=lambda: None, read_us=lambda: 10.0)
    monkeypatch.setattr(measure, "time", made)
    monkeypatch.setattr(sampling, "time", made)
    monkeypatch.setattr(rounds, "time", made)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(TorchDevice, "synchronize", lambda device: made.synchronize())
    monkeypatch.setattr(measure, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(measure, "output_makers", lambda *asked: {})
    monkeypatch.setattr(measure, "warm_up", lambda: made.warmed.append(made.now))
    monkeypatch.setattr(sampling, "_Prepared", lambda *asked: sample)
    return made


def rounds_of(clock: Clock, **options: Any) -> int:
    def inputs(problem: Problem, /, *, seed: int) -> Any:
        return None

    measurer = InProcessMeasurer(cold=False, rounds=12, inputs=inputs, **options)
    entry: Any = SimpleNamespace(name="one")
    (timing,) = measurer.measure(PROBLEM, [entry], budget_seconds=10.0)
    assert clock.warmed == [0.0]  # once, before the first round
    return timing.samples


def test_a_rest_lasts_so_many_times_as_long_as_its_round(clock: Clock) -> None:
    assert rounds_of(clock, rest=3.0) == 12
    assert clock.rests == [pytest.approx(3.0 * ROUND_SECONDS)] * 11  # none after the last


def test_rounds_follow_each_other_unless_a_rest_is_asked_for(clock: Clock) -> None:
    assert rounds_of(clock) == 12
    assert clock.rests == []
    assert clock.now == pytest.approx(12 * ROUND_SECONDS)
