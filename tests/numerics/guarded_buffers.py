"""Tensors inside larger storages that reveal reads and writes out of bounds.

Inputs lie in storages full of NaN, so that a value read out of bounds shows in the result. Outputs lie in storages of a
known pattern and hold NaN before the run, so that an element that is not written shows, and so does a write out of
bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_autotuner.operations.shared.launching import GUARD, GUARD_BYTE
from attention_autotuner.operations.shared.tensors import INTEGERS

from .cases import Layout

GUARD_BITS = {size: int.from_bytes([GUARD_BYTE] * size, "little") for size in INTEGERS}

BROADCAST: dict[Layout, tuple[int, ...]] = {
    "batch_broadcast": (0,),
    "heads_broadcast": (1,),
    "broadcast": (0, 1, 2),
}  # layout -> axes of stride 0


@dataclass(frozen=True, kw_only=True)
class GuardedBuffer:
    """A tensor and the storage around it."""

    view: torch.Tensor
    storage: torch.Tensor

    @property
    def bits(self) -> torch.Tensor:
        """The whole storage as integers."""
        return self.storage.view(INTEGERS[self.storage.element_size()])

    def intact(self) -> bool:
        """True when everything around the view still has the pattern."""
        copy, pattern = self.bits.clone(), GUARD_BITS[self.storage.element_size()]
        view = self.view
        copy.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(pattern)
        return bool((copy == pattern).all())


def strides_of(shape: Sequence[int], layout: Layout) -> tuple[int, int, int, int]:
    """Strides of a ``[batch, heads, rows, columns]`` tensor before any of its dims is broadcast."""
    _, heads, rows, columns = shape
    if layout == "transposed":  # [batch, rows, heads, columns] in memory
        return rows * heads * columns, columns, heads * columns, 1
    row = columns + {"padded": 8, "unaligned": 1}.get(layout, 0)
    return heads * rows * row, rows * row, row, 1


def place_input(
    values: torch.Tensor, layout: Layout, shape: Sequence[int] | None = None
) -> GuardedBuffer:
    """A copy of values among NaNs.

    Args:
        values: ``[batch, heads, rows, columns]``, each extent that of the shape or, where the layout broadcasts, 1.
        layout: memory layout of the result.
        shape: shape of the result; by default that of the values.
    """
    whole = list(values.shape)
    strides = list(strides_of(whole, layout))
    offset = GUARD + (1 if layout == "unaligned" else 0)
    extent = whole[0] * strides[0] if layout != "transposed" else values.numel()
    storage = torch.full(
        (offset + extent + GUARD,), float("nan"), dtype=values.dtype, device=values.device
    )
    storage.as_strided(whole, strides, offset).copy_(values)
    shape = whole if shape is None else list(shape)
    for axis, (have, want) in enumerate(zip(whole, shape, strict=True)):
        if have != want:
            strides[axis] = 0
    return GuardedBuffer(view=storage.as_strided(shape, strides, offset), storage=storage)


def make_input(
    shape: Sequence[int], layout: Layout, dtype: torch.dtype, generator: torch.Generator
) -> GuardedBuffer:
    """A tensor of normal numbers in a layout."""
    whole = [1 if axis in BROADCAST.get(layout, ()) else n for axis, n in enumerate(shape)]
    values = torch.randn(whole, dtype=dtype, device=generator.device, generator=generator)
    return place_input(values, layout, shape)


def make_output(
    shape: Sequence[int], layout: Layout, dtype: torch.dtype, device: torch.device
) -> GuardedBuffer:
    """A tensor full of NaN inside a storage of a known pattern."""
    strides = strides_of(shape, layout)
    extent = shape[0] * strides[0]
    storage = torch.empty(2 * GUARD + extent, dtype=dtype, device=device)
    storage.view(INTEGERS[dtype.itemsize]).fill_(GUARD_BITS[dtype.itemsize])
    view = storage.as_strided(list(shape), strides, GUARD)
    view.fill_(float("nan"))
    return GuardedBuffer(view=view, storage=storage)
