"""The candidates of attention's backward of family ``sm90`` that a policy offers, and the one that needs no tuning.

A point says how results are shared out, and the tile of each pass; a pass then takes the first issue order and the most
stages that are legal and fit. Fused passes are tried with the serial order, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, Rejection
from ...core.problem import Problem
from ..shared.knobs import CtaOrder
from ..shared.passes import first_legal, points_of
from .knobs import (
    PASSES,
    AttentionBackwardSm90Knobs,
    BackwardPassSm90,
    Decomposition,
    DqAdd,
    DqBy,
    DqShareSm90,
    IssueOrder,
)
from .resources import BackwardPassSm90Shape, shapes, smem_bytes
from .rules import PRUNING_PREDICATES, pass_of, passes_of

ISSUE_ORDERS: tuple[IssueOrder, ...] = ("both_ahead", "scores_ahead", "serial")
STAGES = ((3, 2), (2, 2), (2, 1), (1, 1))  # of what streams for S and for dP
LEAST_ROWS = 64  # of a warpgroup: with fewer queries or keys, most of its MMAs are wasted


@dataclass(frozen=True, kw_only=True)
class AttentionBackwardSm90Space:
    """The values that knobs may take.

    Attributes:
        shares: (who computes the share of dQ, queries of a step) pairs of fused passes.
        dq_adds: how shares of dQ are added.
        key_blocks: queries of a step of other passes over keys.
        query_tiles: (warpgroups, keys of a step) pairs of passes over queries; those over keys have two warpgroups.
        cta_orders: orders of the list of CTAs.
    """

    shares: tuple[tuple[DqBy, int], ...] = (("own", 64), ("keys", 64), ("keys", 128), ("own", 128))
    dq_adds: tuple[DqAdd, ...] = ("bulk", "reduce", "ordered")
    key_blocks: tuple[int, ...] = (128, 80, 64)
    query_tiles: tuple[tuple[int, int], ...] = ((2, 128), (2, 64), (3, 64))
    cta_orders: tuple[CtaOrder, ...] = ("raster", "longest_first")


SPACES: dict[str, AttentionBackwardSm90Space] = {}  # by the spec's name; the others have the above


def points(problem: Problem, spec: ArchSpec) -> Iterator[AttentionBackwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    space = SPACES.get(spec.name, AttentionBackwardSm90Space())
    return points_of(problem, spec, _points(problem, space, spec), passes_of, PRUNING_PREDICATES)


def default(problem: Problem, spec: ArchSpec) -> AttentionBackwardSm90Knobs | None:
    """The first legal point; None where there is none, or fewer queries or keys than a warpgroup has.

    Where the problem asks for determinism, that has a pass over queries: no CTA waits for another.
    """
    if min(problem.seqlen_q, problem.seqlen_k) < LEAST_ROWS:
        return None
    order: CtaOrder = "longest_first" if problem.causal else "raster"
    space = replace(SPACES.get(spec.name, AttentionBackwardSm90Space()), cta_orders=(order,))
    if problem.deterministic:
        space = replace(space, shares=())
    return first_legal(problem, spec, _points(problem, space, spec), passes_of, PRUNING_PREDICATES)


def _points(
    problem: Problem, space: AttentionBackwardSm90Space, spec: ArchSpec
) -> Iterator[AttentionBackwardSm90Knobs]:
    seen: set[AttentionBackwardSm90Knobs] = set()
    tiles = tuple(product(space.key_blocks, space.query_tiles))
    for cta_order in space.cta_orders:
        for (dq_by, block), orders, dq_add in product(
            space.shares, (ISSUE_ORDERS, ISSUE_ORDERS[-1:]), space.dq_adds
        ):
            share = DqShareSm90(dq_by=dq_by, dq_add=dq_add)
            knobs = _fitted(problem, spec, "fused", block, orders, cta_order, dq_share=share)
            if knobs not in seen and (knobs.deterministic or not problem.deterministic):
                seen.add(knobs)
                yield knobs
        for decomposition, (block, (groups, columns)) in product(PASSES, tiles):
            if decomposition != "fused":
                dq = BackwardPassSm90(
                    warpgroups=groups, block_columns=columns, issue_order=ISSUE_ORDERS[0]
                )
                yield _fitted(problem, spec, decomposition, block, ISSUE_ORDERS, cta_order, dq=dq)


def _fitted(
    problem: Problem,
    spec: ArchSpec,
    decomposition: Decomposition,
    block: int,
    orders: tuple[IssueOrder, ...],
    cta_order: CtaOrder,
    **others: Any,
) -> AttentionBackwardSm90Knobs:
    """A point with what its passes have registers and shared memory for, or as asked where nothing fits."""
    plain = BackwardPassSm90(block_columns=block, issue_order=orders[0])
    passes = dict.fromkeys(PASSES[decomposition], plain) | others
    knobs = AttentionBackwardSm90Knobs(decomposition=decomposition, cta_order=cta_order, **passes)
    fitted = {
        name: value
        for shape in shapes(Candidate.of(problem, knobs))
        for name, value in _most(shape, orders, spec).items()
    }
    return replace(knobs, **fitted)


def _most(
    shape: BackwardPassSm90Shape, orders: tuple[IssueOrder, ...], spec: ArchSpec
) -> dict[str, Any]:
    """The first issue order and the most stages of a pass that are legal and fit, by the names of their knobs."""
    for order, (first, second), ds_stages in product(orders, STAGES, (2, 1)):
        knobs = replace(shape.knobs, issue_order=order, first_stages=first, second_stages=second)
        share = shape.share and replace(shape.share, ds_stages=ds_stages)
        made = replace(shape, knobs=knobs, share=share)
        if pass_of(made).violation is None and smem_bytes(made) <= spec.smem_per_block_bytes:
            return {made.name: knobs} | ({"dq_share": share} if share else {})
    return {}
