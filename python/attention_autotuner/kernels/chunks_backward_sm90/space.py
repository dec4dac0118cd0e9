"""The backward candidates of retention, family ``sm90``, that a policy offers, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...arch.spec import ArchSpec
from ...core.candidate import Rejection
from ...core.problem import Problem
from ..chunks_sm90.resources import PART_DEPTH
from ..chunks_sm90.space import (
    MIN_TOKENS,
    ChunkSm90Space,
    divided,
    fastest,
    undivided,
)
from ..shared.passes import points_of
from . import cost
from .knobs import ChunkwiseBackwardSm90Knobs
from .rules import passes_of

SPACE = ChunkSm90Space(tiles=((2, 1), (1, 2), (1, 1)), super_shares=(2, 4, 8))
# A depth in parts counts as 512: on an H200, a V of 320 takes as long as by warps, 384 and more are worth it untuned.
MIN_IN_PARTS = 384


def points(problem: Problem, spec: ArchSpec) -> Iterator[ChunkwiseBackwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    checked = points_of(problem, spec, _points(problem), passes_of)
    return divided(checked, problem, _width(problem), spec, SPACE)


def default(problem: Problem, spec: ArchSpec) -> ChunkwiseBackwardSm90Knobs | None:
    """The point that takes the least time by the cost model; None where there is none, or it does not pay."""
    if PART_DEPTH < problem.padded_dim_v < MIN_IN_PARTS:
        return None
    checked = points_of(problem, spec, _points(problem), passes_of)
    sizes = partial(divided, problem=problem, width=_width(problem), spec=spec, space=SPACE)
    return fastest(checked, sizes, problem, spec, passes_of, cost.predict)


def _width(problem: Problem) -> int:
    """Columns that the passes with the fewest CTAs have, each as many as the knobs say."""
    # In parts, CTAs of dq and dk have half of them.
    halves = 2 if problem.padded_dim_v > PART_DEPTH else 1
    return min(halves * problem.padded_dim_qk, problem.padded_dim_v)


def _points(problem: Problem) -> Iterator[ChunkwiseBackwardSm90Knobs]:
    if problem.seqlen_q >= MIN_TOKENS:
        yield from undivided(ChunkwiseBackwardSm90Knobs, problem.widest_dim, SPACE)
