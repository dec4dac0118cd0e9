"""Which candidates are worth building: the model's best, not all of one kind, and the policy's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..codegen.candidate import Candidate
from ..codegen.knobs import BackwardKnobs, ForwardKnobs, KeyPass, Knobs, ParallelKnobs, RowPass
from ..codegen.retention_knobs import (
    ChunkPass,
    ChunkwiseKnobs,
    RecurrentKnobs,
    RetentionBackwardKnobs,
    WgmmaChunkwiseKnobs,
)
from ..codegen.wgmma_knobs import WgmmaBackwardKnobs, WgmmaForwardKnobs, WgmmaPass
from .cost_model import Estimate

Ranked = tuple[Candidate, Estimate]


def shape_of(candidate: Candidate) -> tuple[object, ...]:
    """What two candidates share that differ in pipelining, launch bounds or scheduling only.

    Of backward candidates, the plan and its main pass: dQ's pass beside a key pass costs little of what both cost. Of
    retention's, the form or the chunks, and the tiles of every pass.
    """
    return _shape(candidate.knobs)


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """What makes two candidates of one shape worth trying both: how they feed the products and walk the tiles."""
    return (*_shape(candidate.knobs), *_feed(candidate.knobs))


def _shape(knobs: Knobs) -> tuple[object, ...]:
    if isinstance(knobs, ForwardKnobs):
        return (
            knobs.block_m,
            knobs.block_n,
            knobs.warps_m,
            knobs.warps_n,
            knobs.k_slice,
            knobs.v_slices,
        )
    if isinstance(knobs, WgmmaForwardKnobs):
        return ("wgmma", knobs.warpgroups, knobs.block_n, knobs.v_slices)
    if isinstance(knobs, WgmmaBackwardKnobs):
        return ("wgmma", *map(_tile_of, knobs.passes.values()))
    if isinstance(knobs, BackwardKnobs):
        passes = [knobs.keys] if knobs.keys is not None else [*knobs.passes.values()]
        return (knobs.plan, *(_tile_of(each) for each in passes))
    if isinstance(knobs, ParallelKnobs):
        return ("parallel", *_shape(knobs.rows))
    if isinstance(knobs, RecurrentKnobs):
        return ("recurrent", knobs.columns)
    if isinstance(knobs, WgmmaChunkwiseKnobs):
        return ("wgmma chunkwise", knobs.super_chunk, knobs.columns)
    tiles = map(_tile_of, _chunk_passes(knobs))
    return ("chunkwise", knobs.chunk, knobs.super_chunk, *tiles)


def _feed(knobs: Knobs) -> tuple[object, ...]:
    if isinstance(knobs, ForwardKnobs):
        return (knobs.q_in_registers, knobs.qk_ahead, knobs.persistent, knobs.cta_order)
    if isinstance(knobs, WgmmaForwardKnobs):
        return (knobs.num_stages, knobs.cta_order)
    if isinstance(knobs, WgmmaBackwardKnobs):
        return (knobs.cta_order, *(each.turns for each in knobs.passes.values()))
    if isinstance(knobs, BackwardKnobs):
        passes = knobs.passes.values()
        stages = tuple(each.num_stages for each in passes)
        return (knobs.cta_order, stages, *map(_tile_of, passes))
    if isinstance(knobs, ParallelKnobs):
        return _feed(knobs.rows)
    if isinstance(knobs, RecurrentKnobs):
        return (knobs.warps,)
    if isinstance(knobs, WgmmaChunkwiseKnobs):
        return (knobs.num_stages, knobs.ctas_per_sm)
    return tuple((each.scores, each.num_stages) for each in _chunk_passes(knobs))


def _chunk_passes(knobs: ChunkwiseKnobs | RetentionBackwardKnobs) -> list[ChunkPass]:
    return [knobs.output] if isinstance(knobs, ChunkwiseKnobs) else [*knobs.passes.values()]


def _tile_of(one: KeyPass | RowPass | ChunkPass | WgmmaPass) -> tuple[int, ...]:
    """Rows, columns, warps and slices of a pass; of one over chunks, columns and warps."""
    if isinstance(one, ChunkPass):
        return (one.columns, one.column_warps, one.depth_warps)
    if isinstance(one, KeyPass):
        return (one.block_m, one.block_n, one.warp_pairs, one.query_parts)
    if isinstance(one, WgmmaPass):
        return (one.block_rows, one.block_columns, one.parts, one.slices)
    return (one.block_rows, one.block_columns, one.warps, one.column_warps, one.slices)


def shortlist(ranked: Sequence[Ranked], default: Candidate, top_k: int) -> list[Ranked]:
    """The default and ``top_k`` more, best first after it.

    The first half of the ``top_k`` may hold two kinds of one shape, the second half takes one of each shape not chosen
    yet: near-duplicates mostly share their error, and a wrong guess about one shape should not cost the list.
    Where shapes run out, the best of the rest fill up.

    Args:
        ranked: all legal candidates, best first.
        default: the policy's own; taken whatever its rank.
        top_k: how many beside the default.

    Raises:
        ValueError: ``top_k`` is negative.
    """
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}")
    chosen = [pair for pair in ranked if pair[0] == default]
    others = [pair for pair in ranked if pair[0] != default]
    taken: list[Ranked] = []
    shapes: Counter[tuple[object, ...]] = Counter()
    kinds: set[tuple[object, ...]] = set()
    for pair in others:
        shape, kind = shape_of(pair[0]), kind_of(pair[0])
        allowed = 2 if len(taken) < (top_k + 1) // 2 else 1
        if len(taken) < top_k and shapes[shape] < allowed and kind not in kinds:
            taken.append(pair)
            shapes[shape] += 1
            kinds.add(kind)
    names = {pair[0].name for pair in taken}
    rest = [pair for pair in others if pair[0].name not in names]
    return chosen + taken + rest[: top_k - len(taken)]
