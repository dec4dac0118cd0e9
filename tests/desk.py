"""Plans driven without a GPU: host-side kernel libraries stand in for GPU kernels, everything else is real."""

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

CPU = -1  # what Tensor.get_device says of CPU tensors
STREAM = 0x5EED


class Desk:
    """What dispatch was asked, and the kernels it answers with, by direction."""

    def __init__(self, kernels: dict[str, loader.LoadedKernel]) -> None:
        self.kernels = kernels
        self.asked: list[tuple[Problem, Any, bool]] = []

    def kernel_for(
        self, problem: Problem, policy: Any, *, device: int, must_be_warm: bool
    ) -> loader.LoadedKernel:
        """Stands in for dispatch's own."""
        assert device == CPU
        self.asked.append((problem, policy, must_be_warm))
        return self.kernels[problem.direction]

    def said(self, name: str, result: Any = ctypes.c_int, *, direction: str = "forward") -> Any:
        """What a kernel library noted of its launches."""
        function = getattr(ctypes.CDLL(str(self.kernels[direction].path)), f"fake_{name}")
        function.restype = result
        return function()


@contextmanager
def closed_desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dispatch has no kernel ready, and the call must have said that it cannot wait for one."""

    def refuse(*arguments: Any, must_be_warm: bool, **options: Any) -> loader.LoadedKernel:
        assert must_be_warm
        raise NotWarmError("call it once outside graph capture")

    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "kernel_for", refuse)
        yield


@contextmanager
def open_desk(
    fake_kernel: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...] = (),
    source: str = "fake_kernel.c",
) -> Iterator[Desk]:
    """Dispatch asks the desk, and CPU tensors pass for a GPU's; options and source are for both kernel libraries."""
    desk = Desk(
        {
            "forward": loader.load(fake_kernel(*options, source=source)),
            "backward": loader.load(fake_kernel("-DBACKWARD", *options, source=source)),
        }
    )
    monkeypatch.setattr(launch, "current_device", lambda: CPU)
    monkeypatch.setattr(launch, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "kernel_for", desk.kernel_for)
    monkeypatch.setattr(naming, "policy_named", lambda name, device: (name, device))
    forget_plans()
    yield desk
    forget_plans()


def at_once(work: Callable[..., None], jobs: Iterable[tuple[Any, ...]]) -> None:
    """Do the work of every job, each in a thread of its own; back when all have ended."""
    threads = [Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
