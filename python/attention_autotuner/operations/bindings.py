"""The differences between the directions of an operation, for checking and timing kernels.

A *binding* makes a direction's inputs, names its outputs, and knows the reference they are held against; the rest of
:mod:`~..tuning.verify` and :mod:`~..tuning.measure` is the same for all. One direction may have several ways to be
called, e.g. with and without a gradient of LSE; the first is what is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..core.problem import Problem
from .registry import OPERATIONS
from .shared.binding import TORCH_DTYPES, Binding, Reference
from .shared.tensors import Inputs, current_device

__all__ = ["TORCH_DTYPES", "Binding", "Reference", "make_inputs", "output_makers", "ways_of"]


def ways_of(problem: Problem) -> tuple[Binding, ...]:
    """The ways to call a problem's kernels, the one that is timed first."""
    ways: tuple[Binding, ...] = OPERATIONS[problem.op].module("inputs").ways(problem)
    return ways


def make_inputs(problem: Problem, *, seed: int, device: torch.device | str | None = None) -> Inputs:
    """Inputs of the problem's first way to be called, on the current CUDA device by default."""
    where = current_device() if device is None else torch.device(device)
    return ways_of(problem)[0].inputs(problem, seed=seed, device=where)


def output_makers(problem: Problem, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that make the memory of a problem's outputs, by their names."""
    shapes = ways_of(problem)[0].output_shapes(problem)
    return {
        name: partial(torch.empty, shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }
