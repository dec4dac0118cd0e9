"""The backward candidates of retention, family ``sm90``, that a policy offers, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...arch.spec import ArchSpec
from ...core.candidate import Rejection
from ...core.problem import Problem
from ..chunks_sm80.space import ChunkPasses
from ..chunks_sm90.resources import PART_DEPTH
from ..chunks_sm90.space import (
    MIN_TOKENS,
    WHOLE_TILES,
    ChunkSm90Space,
    divided,
    suits_whole,
    undivided,
)
from ..shared.passes import first_legal, points_of
from .knobs import ChunkwiseBackwardSm90Knobs
from .rules import passes_of

SPACE = ChunkSm90Space(tiles=((2, 1), (1, 2), (1, 1)))
# A depth in parts counts as 512: on an H200, a V of 320 takes as long as by warps, 384 and more are worth it untuned.
MIN_IN_PARTS = 384


def points(problem: Problem, spec: ArchSpec) -> Iterator[ChunkwiseBackwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    checked = points_of(problem, spec, _points(problem), passes_of)
    return divided(checked, problem, _width(problem), spec)


def default(problem: Problem, spec: ArchSpec) -> ChunkwiseBackwardSm90Knobs | None:
    """The first legal point, with super-chunks that employ most SMs; None where there is none, or it does not pay.

    As in the forward direction, sequences stay whole where fewer columns a CTA employ enough SMs.
    """
    knobs = first_legal(problem, spec, _points(problem), passes_of)
    if knobs is None or PART_DEPTH < problem.padded_dim_v < MIN_IN_PARTS:
        return None
    passes, width = ChunkPasses(problem, spec), _width(problem)
    size = passes.default_super_chunk(knobs.columns, width)
    whole = (
        point
        for point in _points(problem)
        if size
        and (point.warpgroups, point.ctas_per_sm) in WHOLE_TILES
        and suits_whole(point, passes.ctas(point.columns, width), problem, spec)
    )
    return first_legal(problem, spec, whole, passes_of) or replace(knobs, super_chunk=size)


def _width(problem: Problem) -> int:
    """Columns that the passes with the fewest CTAs have, each as many as the knobs say."""
    # In parts, CTAs of dq and dk have half of them.
    halves = 2 if problem.padded_dim_v > PART_DEPTH else 1
    return min(halves * problem.padded_dim_qk, problem.padded_dim_v)


def _points(problem: Problem) -> Iterator[ChunkwiseBackwardSm90Knobs]:
    if problem.seqlen_q >= MIN_TOKENS:
        yield from undivided(ChunkwiseBackwardSm90Knobs, problem.widest_dim, SPACE)
