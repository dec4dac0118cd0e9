"""Tunable functions that a worker can import; what they take is what they say, so that races end as they must."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from attention_autotuner import autotune

TIMES = {"default": 100.0, "fast": 50.0, "close": 99.5, "faster": 40.0}
MODES = ("default", "fast", "wrong", "raises", "exits", "crashes", "close")
ENDS = ("exits", "crashes")  # the process
SPACE = [{"mode": mode} for mode in MODES]
made: list[str] = []  # modes of the calls in this process


def bench(call: Callable[[], Any]) -> float:
    call()
    return TIMES.get(made[-1], 10.0)


def _double(x: Any, out: Any) -> None:
    out[:] = 2 * x


@autotune(SPACE, reset=["out"], reference=_double, bench=bench, budget_seconds=2.0)
def double(x: Any, out: Any, *, mode: str) -> None:
    made.append(mode)
    if mode == "raises":
        raise ValueError("no such mode")
    if mode == "exits":
        sys.exit(3)
    if mode == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    out += (3 if mode == "wrong" else 2) * x


@autotune({"mode": ["default", "fast"], "size": [1, 2]}, restore=["x"], bench=bench)
def add_one(x: torch.Tensor, *, mode: str, size: int) -> torch.Tensor:
    made.append(mode)
    x += 1
    return x * 2


@autotune({"mode": ["default", "fast", "local", "fails"]}, collective=True, bench=bench)
def summed(x: torch.Tensor, group: Any, *, mode: str) -> torch.Tensor:
    made.append(mode)
    if mode == "fails":
        raise ValueError("on every rank")
    if mode == "local" and dist.get_rank(group) == 1:
        raise ValueError("on one rank")
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


@autotune({"mode": ["default", "fast"]}, bench=bench)
def laid_out(x: np.ndarray[Any, Any], strides: tuple[int, ...], *, mode: str) -> Any:
    made.append(mode)
    if x.strides != strides:
        raise ValueError(f"strides {x.strides}, not {strides}")
    return x


class Layer:
    @autotune({"mode": ["default", "fast"]}, key=["x"], bench=bench)
    def forward(self, x: int, *, mode: str) -> int:
        made.append(mode)
        return x


def largest(x: np.ndarray[Any, Any], *, slowly: bool) -> float:
    return max(x.tolist()) if slowly else float(x.max())
