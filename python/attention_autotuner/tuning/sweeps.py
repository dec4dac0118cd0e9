"""The problems that a GPU is tuned for before anyone has asked: 24 of six pairs of head dims.

A record serves its neighbours, too, up to four doublings of lengths and heads away, so that a few shapes of a head dim
cover what models have.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.problem import Direction, DType, Op, Problem, Shape, of_shape
from ..errors import UnsupportedProblemError

Shaped = tuple[Shape, bool]  # whether causal

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
# 16k tokens and a hidden size of 2048, mostly: the head dims of GPT, of diffusion models, of Llama, and of MLA.
SHAPES: dict[Op, tuple[Shaped, ...]] = {
    "attention": (
        ((4, 16, 4096, 128, 128), True),
        ((4, 16, 4096, 128, 128), False),
        ((16, 16, 1024, 128, 128), True),
        ((8, 32, 2048, 64, 64), True),
        ((16, 32, 1024, 64, 64), False),
        ((8, 20, 2048, 96, 96), False),
        ((4, 16, 4096, 192, 128), True),
        ((8, 8, 2048, 256, 256), True),
    ),
    "retention": (
        ((8, 8, 2048, 256, 512), True),
        ((2, 8, 8192, 256, 512), True),
        ((4, 16, 4096, 128, 128), True),
        ((8, 32, 2048, 64, 64), True),
    ),
}


def default_sweep(dtype: DType = "fp16") -> tuple[Problem, ...]:
    """Attention forward and backward, then retention; what is shared most comes first."""
    return tuple(
        of_shape(shape, op=op, direction=direction, dtype=dtype, causal=causal)
        for op, shapes in SHAPES.items()
        for direction in DIRECTIONS
        for shape, causal in shapes
    )


def only(problems: Sequence[Problem], words: Sequence[str]) -> tuple[Problem, ...]:
    """The problems whose descriptions contain every word as a word, e.g. ``forward d64``.

    Raises:
        UnsupportedProblemError: nothing is left.
    """
    kept = tuple(p for p in problems if set(words) <= set(p.describe().split()))
    if not kept:
        raise UnsupportedProblemError(
            f"no problem of the sweep is described by {' '.join(words)!r}"
        )
    return kept
