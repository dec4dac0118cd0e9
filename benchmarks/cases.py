"""What is benchmarked: named grids of problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attention_autotuner.core.problem import Direction, Problem, Shape, of_shape

TOKENS = 16384  # per batch, as in published comparisons of attention kernels
HIDDEN = 2048  # heads times head dim
DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Problems that are reported together.

    Attributes:
        name: of the benchmark and of its result file.
        problems: in the order of the table: row by row, seqlens rising.
    """

    name: str
    problems: tuple[Problem, ...]

    def only(self, words: Sequence[str], dims: Sequence[int] = ()) -> Grid:
        """The part whose descriptions contain every word as a word, e.g. ``d64 causal``.

        Args:
            words: all must be there.
            dims: ``dim_qk`` must be one of these; none given allows all.

        Raises:
            ValueError: nothing is left.
        """
        kept = tuple(
            p
            for p in self.problems
            if set(words) <= set(p.describe().split()) and (not dims or p.dim_qk in dims)
        )
        if not kept:
            asked = " ".join([*words, *(f"dim {dim}" for dim in dims)])
            raise ValueError(f"no problem of {self.name} is described by {asked!r}")
        return Grid(name=self.name, problems=kept)


def row_label(problem: Problem) -> str:
    """The table row that a problem belongs to, e.g. ``d64 causal``."""
    dims = f"d{problem.dim_qk}" + (f"/{problem.dim_v}" if problem.dim_v != problem.dim_qk else "")
    return f"{dims} causal" if problem.causal else dims


def column_label(problem: Problem) -> str:
    """The table column, e.g. ``512`` or ``4k``."""
    seqlen = problem.seqlen_k
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _attention(direction: Direction) -> Grid:
    return Grid(
        name=f"attention_{direction}",
        problems=tuple(
            of_shape(
                (TOKENS // seqlen, HIDDEN // dim, seqlen, dim, dim),
                direction=direction,
                causal=causal,
            )
            for dim in DIMS
            for causal in (False, True)
            for seqlen in SEQLENS
        ),
    )


DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
RETNET_SHAPES: tuple[Shape, ...] = (
    (8, 8, 2048, 256, 512),
    (4, 8, 4096, 256, 512),
    (8, 8, 2048, 256, 256),
    (8, 16, 2048, 128, 128),
    (8, 16, 2048, 64, 64),
)
RETENTION_SHAPES: tuple[Shape, ...] = (
    (8, 8, 2048, 256, 512),
    (4, 8, 4096, 256, 512),
    (2, 8, 8192, 256, 512),
    (1, 8, 16384, 256, 512),
    (8, 8, 2048, 256, 256),
    (8, 16, 2048, 128, 256),
    (8, 16, 4096, 128, 128),
    (8, 32, 2048, 64, 64),
)
DECODE_SHAPE: Shape = (64, 8, 1, 256, 512)


def _both_directions(name: str, shapes: Sequence[Shape], **fields: Any) -> Grid:
    return Grid(
        name=name,
        problems=tuple(
            of_shape(shape, op=name, direction=direction, **fields)
            for direction in DIRECTIONS
            for shape in shapes
        ),
    )


DECODE = of_shape(DECODE_SHAPE, op="retention", form="recurrent", causal=True)
"""One token of retention for every sequence of a batch, in the form that decoding asks for."""
GRIDS: dict[str, Grid] = {
    grid.name: grid
    for grid in (
        _attention("forward"),
        _attention("backward"),
        _both_directions("retnet", RETNET_SHAPES, mask="explicit"),
        _both_directions("retention", RETENTION_SHAPES, causal=True),
    )
}
