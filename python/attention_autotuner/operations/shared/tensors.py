"""Tensors of a launch in torch's memory: outputs that show what was not written or written beside, and workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from .launching import (
    GUARD,
    GUARD_BYTE,
    NAN_BYTE,
    WORKSPACE_ALIGNMENT,
    GrowingWorkspace,
    Inputs,
    Outputs,
    Workspace,
    bind,
)

__all__ = ["GUARD", "Inputs", "Outputs", "Workspace", "bind"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
GUARD_BITS = {size: int.from_bytes([GUARD_BYTE] * size, "little") for size in INTEGERS}

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class PoisonedWorkspace:
    """New memory for every launch, full of NaN, between guards.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[tuple[torch.Tensor, int, int]] = []

    def take(self, num_bytes: int) -> int:
        """See :meth:`Workspace.take`."""
        size = num_bytes + 2 * GUARD + WORKSPACE_ALIGNMENT
        storage = torch.full((size,), GUARD_BITS[1], dtype=torch.uint8, device=self._device)
        start = GUARD + -storage.data_ptr() % WORKSPACE_ALIGNMENT
        storage[start : start + num_bytes] = NAN_BYTE
        self._taken.append((storage, start, start + num_bytes))
        return storage.data_ptr() + start

    def intact(self) -> bool:
        """Return True where nothing was written beside the memory that was asked for."""
        return all(
            bool((torch.cat((storage[:start], storage[stop:])) == GUARD_BITS[1]).all())
            for storage, start, stop in self._taken
        )


class SharedWorkspace(GrowingWorkspace):
    """The workspace of launches on one stream, in torch's memory.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        def allocate(num_bytes: int) -> tuple[torch.Tensor, int]:
            piece = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return piece, piece.data_ptr()

        super().__init__(allocate)


@dataclass(frozen=True, kw_only=True)
class GuardedOutputs(Outputs):
    """Outputs between guards.

    Attributes:
        storages: of the tensors, with the guards around them.
    """

    storages: tuple[torch.Tensor, ...]

    def intact(self) -> bool:
        """Return True where nothing was written beside the tensors."""
        return all(_guards_intact(storage) for storage in self.storages)


def guarded_outputs(shapes: Shapes, workspace: Workspace, device: torch.device) -> GuardedOutputs:
    """Outputs full of NaN between guards of a known pattern."""
    made = {name: _guarded(shape, dtype, device) for name, (shape, dtype) in shapes.items()}
    return GuardedOutputs(
        tensors={name: tensor for name, (tensor, _) in made.items()},
        workspace=workspace,
        storages=tuple(storage for _, storage in made.values()),
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True where two tensors of one dtype hold the same bits, NaN or not."""
    integer = INTEGERS[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def current_device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def _guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor full of NaN, and its storage with guards around it."""
    count = prod(shape)
    storage = torch.empty(count + 2 * GUARD, dtype=dtype, device=device)
    storage.view(INTEGERS[storage.element_size()]).fill_(GUARD_BITS[storage.element_size()])
    inner = storage[GUARD : GUARD + count].view(shape)
    inner.fill_(float("nan"))
    return inner, storage


def _guards_intact(storage: torch.Tensor) -> bool:
    bits = storage.view(INTEGERS[storage.element_size()])
    expected = GUARD_BITS[storage.element_size()]
    guards = torch.cat((bits[:GUARD], bits[-GUARD:]))
    return bool((guards == expected).all())
