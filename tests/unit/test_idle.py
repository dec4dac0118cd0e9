"""The looks at a GPU before a search measures on it, with a driver and figures of the test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import H100
from attention_autotuner.errors import (
    BusyError,
    MissingPackageError,
    SettingsError,
    UnsupportedArchitectureError,
)
from attention_autotuner.tuning import idle, isolated
from attention_autotuner.tuning import pipeline as pipeline_module
from attention_autotuner.tuning.pipeline import LocalPipeline
from tests.fake_pipeline import GPU

DEFAULT = 0


@dataclass
class Driver:
    mode: int

    def attribute(self, device: int, number: int) -> int:
        assert number == idle.COMPUTE_MODE
        return self.mode


@pytest.mark.parametrize(
    ("mode", "said"),
    [(DEFAULT, ""), (idle.EXCLUSIVE, "in_process=True"), (idle.PROHIBITED, "prohibited")],
)
def test_a_gpu_that_takes_no_second_process_is_said_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, mode: int, said: str
) -> None:
    monkeypatch.setattr(idle, "cuda_driver", lambda: Driver(mode))
    if not said:
        idle.require_room(0)
        return
    with pytest.raises(BusyError, match=said):
        idle.require_room(0)


def test_without_a_driver_nothing_is_known_and_nothing_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> Any:
        raise UnsupportedArchitectureError("no driver")

    monkeypatch.setattr(idle, "cuda_driver", none)
    idle.require_room(0)
    assert idle.utilization(0) is None
    idle.require_rest(0)


def test_a_gpu_that_comes_to_rest_is_waited_for_and_one_that_does_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle, "REST_SECONDS", 0.3)
    monkeypatch.setattr(idle, "POLL_SECONDS", 0.01)
    figures = [100, 100, idle.BUSY_PERCENT]
    idle.require_rest(0, lambda device: figures.pop(0))
    assert figures == []
    with pytest.raises(BusyError, match=r"cuda:1 is at work 99 % .*ALLOW_BUSY=1"):
        idle.require_rest(1, lambda device: 99)


class _Runner:
    """Stands in for a worker; the first answer of a check is an outcome, here a word."""

    def call(self, task: str, **arguments: Any) -> Any:
        return task


@pytest.mark.parametrize("allowed", [False, True])
def test_a_pipeline_looks_once_and_not_at_all_where_it_is_forced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: bool
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(pipeline_module, "require_rest", looked.append)
    monkeypatch.setattr(isolated, "verify", lambda runner, *a, **b: runner.call("verify"))
    with settings.override(cache_dir=tmp_path, allow_busy=allowed) as now:
        pipeline = LocalPipeline(H100(), now)
    pipeline._runner = _Runner()  # type: ignore[assignment]
    for _ in range(2):
        pipeline.verify(None, None, deterministic=False)  # type: ignore[arg-type]
    assert looked == ([] if allowed else [0])


def test_no_kernel_is_built_for_a_gpu_without_room_unless_candidates_run_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Built(Exception):  # noqa: N818  # no error
        pass

    def built(settings: Any) -> None:
        raise Built

    monkeypatch.setattr(idle, "cuda_driver", lambda: Driver(idle.EXCLUSIVE))
    monkeypatch.setattr(pipeline_module, "find_toolchain", built)
    monkeypatch.setattr(pipeline_module, "find_spec", lambda name: name)
    for in_process, error in ((False, BusyError), (True, Built)):
        with settings.override(in_process=in_process) as now:
            pipeline = LocalPipeline(H100(), now)
        pipeline.environment = GPU
        with pytest.raises(error):
            pipeline.build([], lambda *_: None)


def test_a_search_without_cupy_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline_module, "find_spec", lambda name: name != "cupy" or None)
    with settings.override(in_process=False) as now:
        pipeline = LocalPipeline(H100(), now)
    pipeline.environment = GPU
    with pytest.raises(
        MissingPackageError, match=r"pip install 'attention-autotuner\[tune\]'"
    ) as e:
        pipeline.build([], lambda *_: None)
    assert "in_process=True" in str(e.value)
    assert e.value.name == "cupy"
    assert pipeline._worker.server is None


def test_a_bound_on_memory_is_of_a_process_of_its_own() -> None:
    with settings.override(memory_bytes=1 << 30) as now:
        assert LocalPipeline(H100(), now)._worker.memory_bytes == 1 << 30
    with (
        settings.override(memory_bytes=1 << 30, in_process=True) as now,
        pytest.raises(SettingsError, match=r"memory_bytes=1073741824.*in_process"),
    ):
        LocalPipeline(H100(), now)
