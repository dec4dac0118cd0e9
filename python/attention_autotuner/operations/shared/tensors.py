"""Tensors of a launch in torch's memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .launching import Inputs, Outputs, Workspace, bind

__all__ = ["Inputs", "Outputs", "Workspace", "bind"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True where two tensors of one dtype hold the same bits, NaN or not."""
    integer = INTEGERS[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def current_device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())
