"""The pipeline of this machine: all its work runs on the device that was current when it was made."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import A100
from attention_autotuner.core.outcome import Crashed, Ok
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.shared.launching import Inputs, Outputs
from attention_autotuner.settings import Settings
from attention_autotuner.tuning import (
    isolated,
    measure,
    pipeline,
    remote,
    search,
    step,
    tasks,
)
from attention_autotuner.tuning.entries import KernelEntry
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.isolated import InProcess
from attention_autotuner.tuning.pipeline import Doubt, LocalPipeline
from attention_autotuner.tuning.racing import Timing
from attention_autotuner.tuning.rounds import FaultError
from attention_autotuner.tuning.worker import Worker
from tests.fake_tasks import HostDevice, Tasks

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
    )


class Sampler:
    """Replaces what takes samples on a GPU."""

    def __init__(self, device: HostDevice, inputs: list[Inputs], outputs: list[Outputs]) -> None:
        self._names: list[str] = []

    def prepare(self, entry: KernelEntry) -> None:
        self._names.append(entry.name)

    def round(self, order: list[str], alone: object) -> dict[str, float]:
        return {name: 100.0 * (1 + self._names.index(name)) for name in order}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two different GPUs; the second is the current device."""

    def collect(device: int = 0) -> Environment:
        name, capability = GPUS[device]
        return Environment(gpu_name=name, compute_capability=capability)

    monkeypatch.setattr(pipeline, "current_device", lambda: 1)
    monkeypatch.setattr(pipeline, "collect", collect)


def test_environment_and_target_are_those_of_the_measured_device(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measured(
        worker: Worker, problem: Problem, entries: dict[str, Any], **options: Any
    ) -> tuple[list[Timing], bool]:
        asked.append(worker.device)
        slow = {"default": 1.2}
        return [timing(name, slow.get(name, 1.0)) for name in entries], False

    monkeypatch.setattr(isolated, "measure", measured)
    monkeypatch.setattr(Worker, "renew", lambda worker: None)
    here = LocalPipeline(A100(), Settings(cache_dir=tmp_path))
    assert here.environment.gpu_name == "NVIDIA GeForce RTX 3090"
    assert here._target.arch == "86"
    built: Any = SimpleNamespace(path=tmp_path / "kernel.so", launch_knobs={})
    timings, interrupted = here.measure(
        PROBLEM,
        {"one": built},
        budget_seconds=1.0,
        keep=[],
        on_round=lambda rounds, still: None,
    )
    assert ([t.name for t in timings], interrupted) == (["one"], False)
    assert here.environment.gpu_name == "NVIDIA GeForce RTX 3090"
    assert asked == [1]

    doubt = Doubt(problem=PROBLEM, pick=("pick", built), default=("default", built))
    (ratio,) = here.confirm_all([doubt])
    assert ratio == pytest.approx(1.2)
    assert asked == [1, 1]


@pytest.mark.parametrize(("blocking", "warned"), [("1", True), ("0", False)])
def test_waits_of_the_host_that_times_would_hold_are_warned_of(
    blocking: str,
    warned: bool,
    two_gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    monkeypatch.setattr(isolated, "measure", lambda *places, **options: ([], False))
    here = LocalPipeline(A100(), Settings(cache_dir=tmp_path))
    here.measure(PROBLEM, {}, budget_seconds=1.0, keep=[], on_round=lambda rounds, still: None)
    assert ("CUDA_LAUNCH_BLOCKING is set" in caplog.text) == warned


def test_a_race_measures_on_the_requested_device(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(measure, "use_device", lambda index, memory_bytes: chosen.append(index))
    monkeypatch.setattr(measure, "TorchDevice", lambda device: HostDevice(device.index))
    monkeypatch.setattr(tasks, "Sampler", Sampler)
    worker = InProcess(1)
    built: dict[str, Any] = {
        name: [SimpleNamespace(path=tmp_path / f"{name}.so", launch_knobs={})]
        for name in ("a", "b")
    }
    timings = [isolated.measure(worker, PROBLEM, built, budget_seconds=1.0)[0] for _ in range(2)]
    figures = [[(t.name, t.outcome, t.median_us, t.ratio_to_best) for t in r] for r in timings]
    assert figures == [[("a", Ok(), 100.0, 1.0), ("b", Ok(), 200.0, pytest.approx(2.0))]] * 2
    assert chosen == [1]


def test_an_error_in_process_is_a_fault_as_of_a_worker(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "use_device", lambda index, memory_bytes: None)
    monkeypatch.setattr(measure, "TorchDevice", lambda device: HostDevice(device.index))
    with pytest.raises(FaultError) as caught:
        InProcess(0).call("prepare", nothing="known")
    assert isinstance(caught.value.outcome, Crashed)


def test_the_worker_ends_with_the_pipeline(two_gpus: None, tmp_path: Path) -> None:
    here = LocalPipeline(A100(), Settings(cache_dir=tmp_path))
    here._worker._tasks = "tests.plain_tasks"
    child = here._worker.call("pid")
    server = here._worker.server
    assert server is not None
    assert server.poll() is None
    del here
    assert server.poll() is not None
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("asked", "setting", "expected"),
    [(None, True, True), (False, True, False), (True, False, True)],
)
def test_tune_takes_where_candidates_run_from_its_argument_or_the_setting(
    asked: bool | None, setting: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AskedError(Exception):
        """Ends the search at once."""

    def pipeline_of(policy: Any, in_force: Settings) -> None:
        assert in_force.in_process is expected
        raise AskedError

    monkeypatch.setattr(search, "LocalPipeline", pipeline_of)
    monkeypatch.setattr(step, "LocalPipeline", pipeline_of)
    with settings.override(in_process=setting):
        for function in (search.tune, step.tune_step):
            with pytest.raises(AskedError):
                function(device_type="A100", in_process=asked, dim_qk=64, dim_v=64)


def test_launches_of_a_large_problem_are_granted_what_a_slow_gpu_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "Sampler", Sampler)
    calls: list[tuple[str | None, float | None]] = []
    there = Tasks(lambda at, seconds: calls.append((at, seconds)))
    there.open(0)
    few = replace(PROBLEM, heads_q=1, heads_kv=1, seqlen_q=16, seqlen_k=16)
    held, asked = remote.race_of(few, 0, 0)
    long = replace(PROBLEM, seqlen_q=131072, seqlen_k=131072)
    entries = {name: [{"path": str(tmp_path / name), "launch_knobs": {}}] for name in ("a", "b")}
    assert there.prepare(asdict(long), asked["handed"], entries) == {}
    del held
    there.round(["b", "a"], alone=False)
    seconds = long.flops / 1e13
    assert seconds > 10
    assert calls == [("a", 10 * seconds), ("b", 10 * seconds), (None, 2 * seconds)]
