"""The pipeline of this machine: all its work runs on the device that was current when it was made."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_autotuner.arch import A100
from attention_autotuner.core.outcome import Ok
from attention_autotuner.core.problem import Problem
from attention_autotuner.settings import Settings
from attention_autotuner.tuning import measure, pipeline, worker
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.pipeline import Doubt, LocalPipeline
from attention_autotuner.tuning.racing import Timing

PROBLEM = Problem(dim_qk=64, dim_v=64)
GPUS = (("NVIDIA H200", "9.0"), ("NVIDIA GeForce RTX 3090", "8.6"))


def timing(name: str, ratio: float) -> Timing:
    return Timing(
        name=name,
        outcome=Ok(),
        median_us=100.0 * ratio,
        spread_us=1.0,
        samples=10,
        ratio_to_best=ratio,
        error=0.001,
        tied=False,
    )


class Measurer:
    """Replaces the measurer, which needs a GPU."""

    interrupted = False

    def __init__(self, **options: Any) -> None:
        """Accept the options of the real measurer."""

    def measure(self, problem: Problem, entries: list[Any], **options: Any) -> list[Timing]:
        return [timing(entry.name, 1.0 + place) for place, entry in enumerate(entries)]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two different GPUs; the second is the current device."""

    def collect(device: int = 0) -> Environment:
        name, capability = GPUS[device]
        return Environment(gpu_name=name, compute_capability=capability)

    monkeypatch.setattr(pipeline, "current_device", lambda: 1)
    monkeypatch.setattr(pipeline, "collect", collect)
    monkeypatch.setattr(measure, "InProcessMeasurer", Measurer)


def test_environment_and_target_are_those_of_the_measured_device(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = LocalPipeline(A100(), Settings(cache_dir=tmp_path))
    assert here.environment.gpu_name == "NVIDIA GeForce RTX 3090"
    assert here._target.arch == "86"
    built: Any = SimpleNamespace(path=tmp_path / "kernel.so", launch_knobs={})
    timings, interrupted = here.measure(
        PROBLEM, {"one": built}, budget_seconds=1.0, keep=[], on_round=lambda rounds, still: None
    )
    assert ([t.name for t in timings], interrupted) == (
        ["one"],
        False,
    )
    assert here.environment.gpu_name == "NVIDIA GeForce RTX 3090"

    asked: list[int] = []

    def confirm(races: list[Any], *, budget_seconds: float, device: int) -> list[list[Timing]]:
        asked.append(device)
        return [[timing("default", 1.2), timing("pick", 1.0)] for _ in races]

    monkeypatch.setattr(pipeline, "time_all_in_worker", confirm)
    doubt = Doubt(problem=PROBLEM, pick=("pick", built), default=("default", built))
    (ratio,) = here.confirm_all([doubt])
    assert ratio == pytest.approx(1.2)
    assert asked == [1]


def test_the_second_process_measures_on_the_requested_device(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=worker.main(command[-2:]), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    races: Any = [(PROBLEM, {"a": (tmp_path / "a.so", {}), "b": (tmp_path / "b.so", {})})] * 2
    timings = worker.time_all_in_worker(races, budget_seconds=1.0, device=1)
    assert timings == [[timing("a", 1.0), timing("b", 2.0)]] * 2
    assert chosen == [1]
