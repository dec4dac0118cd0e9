"""Fake dispatch for tests without a GPU: host-side kernel libraries replace GPU kernels, everything else is real."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from attention_autotuner.api.shared import launch
from attention_autotuner.arch import naming
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import NotWarmError
from attention_autotuner.serving import dispatch, loader
from tests.gradients import forget_plans

CPU = -1  # Tensor.get_device of CPU tensors
STREAM = 0x5EED


class FakeDispatch:
    """Dispatch with one host-side kernel for each direction; it records the problems it is asked for."""

    def __init__(self, kernels: dict[str, loader.LoadedKernel]) -> None:
        self.kernels = kernels
        self.asked: list[tuple[Problem, Any, bool]] = []

    def kernel_for(
        self, problem: Problem, policy: Any, *, device: int, must_be_warm: bool
    ) -> loader.LoadedKernel:
        """Replaces :func:`attention_autotuner.serving.dispatch.kernel_for`."""
        assert device == CPU
        self.asked.append((problem, policy, must_be_warm))
        return self.kernels[problem.direction]

    def read(self, name: str, result: Any = ctypes.c_int, *, direction: str = "forward") -> Any:
        """A value that a kernel library recorded about its launches."""
        function = getattr(ctypes.CDLL(str(self.kernels[direction].path)), f"fake_{name}")
        function.restype = result
        return function()


@contextmanager
def refuse_cold_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make dispatch raise NotWarmError; the caller must have asked for warm kernels only."""

    def refuse(*arguments: Any, must_be_warm: bool, **options: Any) -> loader.LoadedKernel:
        assert must_be_warm
        raise NotWarmError("call it once outside graph capture")

    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "kernel_for", refuse)
        yield


@contextmanager
def serve_fakes(
    fake_kernel: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...] = (),
    source: str = "fake_kernel.c",
) -> Iterator[FakeDispatch]:
    """Serve fake kernels, with CPU tensors accepted as a GPU's; both libraries share the options and the source."""
    fake = FakeDispatch(
        {
            "forward": loader.load(fake_kernel(*options, source=source)),
            "backward": loader.load(fake_kernel("-DBACKWARD", *options, source=source)),
        }
    )
    monkeypatch.setattr(launch, "current_device", lambda: CPU)
    monkeypatch.setattr(launch, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "kernel_for", fake.kernel_for)
    monkeypatch.setattr(naming, "policy_named", lambda name, device: (name, device))
    forget_plans()
    yield fake
    forget_plans()


def in_threads(work: Callable[..., None], jobs: Iterable[tuple[Any, ...]]) -> None:
    """Run the jobs in one thread each and wait for all of them."""
    threads = [Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def params_of_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets a copy of the params of each launch that is planned from now on."""
    seen: list[Any] = []
    make_launch = launch.Launch

    def record(kernel: Any, params: Any, **named: Any) -> Any:
        seen.append(type(params).from_buffer_copy(bytes(params)))
        return make_launch(kernel, params, **named)

    monkeypatch.setattr(launch, "Launch", record)
    return seen
