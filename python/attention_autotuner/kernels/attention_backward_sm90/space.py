"""The candidates of attention's backward of family ``sm90`` that a policy offers.

A point says how results are shared out, and the tile of each pass; a pass then takes the first issue order and stages
that are legal and fit. Passes that share dQ, and those of wide head dims, are tried with other orders, too. CTAs are
persistent where their work is equal. Uneven blocks, of causal masks, packed sequences and documents, take the longest
first in the hardware's order, or are claimed by CTAs that stay, a head's in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, Rejection
from ...core.problem import Problem
from ..shared.knobs import CtaOrder
from ..shared.passes import points_of
from . import claims, suitability
from .knobs import (
    PASSES,
    STORED,
    AttentionBackwardSm90Knobs,
    BackwardPassSm90,
    Decomposition,
    DqAdd,
    DqBy,
    DqShareSm90,
    IssueOrder,
)
from .resources import SWAPPED_BLOCK, BackwardPassSm90Shape, shapes, smem_bytes
from .rules import PRUNING_PREDICATES, pass_of, passes_of
from .suitability import BELOW_WIDE, WIDE

# With the stages of what streams for S and for dP, and True where the rows' own operands stay in registers.
Feed = tuple[IssueOrder, tuple[int, int], bool]
# A tile's stage is free when the results of its step are there. What is asked for at the beginning of the next step
# takes three stages, or each step waits for memory; what is asked for at its end takes two.
FEEDS: tuple[Feed, ...] = (
    ("interleaved", (3, 2), True),
    ("interleaved", (3, 2), False),
    ("both_ahead", (4, 4), False),
    ("both_ahead", (3, 3), False),
    ("by_turns", (3, 2), False),
    ("scores_ahead", (3, 2), False),
    ("serial", (2, 2), False),
    ("scores_ahead", (2, 2), False),
    ("scores_ahead", (2, 1), False),
    ("serial", (2, 1), False),
    ("serial", (1, 1), False),
)
TURNS = tuple(feed for feed in FEEDS if feed[0] == "by_turns")
WITHOUT_TURNS = tuple(feed for feed in FEEDS if feed[0] != "by_turns")
AHEAD = tuple(feed for feed in WITHOUT_TURNS if feed[0] != "interleaved")
DP_AHEAD: Feed = ("both_ahead", (2, 2), False)  # of passes of retnet that take dP alone
SERIAL = tuple(feed for feed in FEEDS if feed[0] == "serial")
MASK_STAGES = (2, 1)  # of a mask that passes have
WIDEST = 192  # head dim beyond which, and beyond WIDE, tiles leave few stages
SHARED_KEYS_DIM = 176  # of both head dims, from which warpgroups that share keys come first


@dataclass(frozen=True, kw_only=True)
class AttentionBackwardSm90Space:
    """The values that knobs may take.

    Attributes:
        shares: (who computes the share of dQ, queries of a step) pairs of fused passes.
        dq_adds: how shares of dQ are added; ``queued`` ones are offered to deterministic problems, of head dims up to
            :data:`WIDE`, and where blocks are claimed to those for which they are as fast.
        stored_blocks: queries of a step of ``stored`` shares; with early launches and in raster order alone, where
            neighbours in time add to what L2 still holds.
        early: True where launches are early and stores gathered, which gained together wherever they were raced; of
            the shares that are defaults somewhere alone.
        claimed_adds: how shares are added where blocks of keys are claimed, in steps of 64 queries or, by turns, 80;
            ``queued`` as in ``dq_adds``.
        key_blocks: queries of a step of other passes over keys.
        query_tiles: (warpgroups, keys of a step) pairs of passes over queries; those over keys have two warpgroups.
        shared_keys: (queries of a step, issue order) pairs of passes whose warpgroups share keys, beside one over
            queries; for head dims beyond :data:`WIDE`, and before all others where both are at least
            :data:`SHARED_KEYS_DIM`, as they were raced. Launches are early first: they gain most with several passes.
        wide_blocks, widest_blocks: both instead for head dims beyond :data:`WIDE` and :data:`WIDEST`, where smaller
            steps leave room for the stages that hide loads.
        cta_orders: orders of the list of CTAs.
    """

    shares: tuple[tuple[DqBy, int], ...] = (
        ("own", 64),
        ("keys", SWAPPED_BLOCK),
        ("keys", 64),
        ("keys", 128),
        ("own", 128),
    )
    dq_adds: tuple[DqAdd, ...] = ("bulk", "reduce", "queued", "ordered", "stored")
    stored_blocks: tuple[int, ...] = (64,)
    early: tuple[bool, ...] = (False, True)
    claimed_adds: tuple[DqAdd, ...] = ("stored", "bulk", "queued")
    key_blocks: tuple[int, ...] = (128, 80, 64)
    query_tiles: tuple[tuple[int, int], ...] = ((2, 128), (2, 64), (3, 64))
    shared_keys: tuple[tuple[int, IssueOrder], ...] = ((64, "serial"), (48, "both_ahead"))
    wide_blocks: tuple[int, ...] = (64, 48, 32)
    widest_blocks: tuple[int, ...] = (48, 64, 32)
    cta_orders: tuple[CtaOrder, ...] = ("raster", "longest_first")


SPACES: dict[str, AttentionBackwardSm90Space] = {}  # by the spec's name; the others have the above


def points(problem: Problem, spec: ArchSpec) -> Iterator[AttentionBackwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    space = SPACES.get(spec.name, AttentionBackwardSm90Space())
    return points_of(problem, spec, points_in(problem, space, spec), passes_of, PRUNING_PREDICATES)


def points_in(
    problem: Problem,
    space: AttentionBackwardSm90Space,
    spec: ArchSpec,
    fused: tuple[Feed, ...] = FEEDS,
) -> Iterator[AttentionBackwardSm90Knobs]:
    """The points of a space, legal or not, made one by one.

    Args:
        problem: to be computed.
        space: the values that knobs may take.
        spec: the GPU.
        fused: what fused passes take the first legal one of.
    """
    seen: set[AttentionBackwardSm90Knobs] = set()
    widest = problem.widest_dim
    masks = MASK_STAGES if problem.mask == "explicit" else (0,)
    feeds: tuple[tuple[Feed, ...], ...] = (FEEDS,)
    tiles = tuple(product(space.key_blocks, space.query_tiles))
    blocks = space.widest_blocks if widest > WIDEST else space.wide_blocks
    raced = min(problem.padded_dim_qk, problem.padded_dim_v) >= SHARED_KEYS_DIM
    other = {WIDE: AHEAD, BELOW_WIDE: TURNS}.get(widest)
    if suitability.takes_both(problem):
        other = AHEAD
    if widest > WIDE:
        tiles = tuple(product(blocks, product((2,), blocks)))
        feeds += (AHEAD, SERIAL)
    separate = problem.deterministic or widest > WIDE or suitability.has_few_blocks(problem, spec)
    for cta_order in space.cta_orders:
        for mask_stages, (dq_by, block), of_pass, dq_add, early in product(
            masks,
            suitability.in_order(problem, space.shares),
            (fused, TURNS, AHEAD, SERIAL),
            space.dq_adds,
            space.early,
        ):
            long = suitability.is_long(problem, (dq_by, block))
            if long and of_pass is not SERIAL:
                continue
            short = block <= SWAPPED_BLOCK or long
            feeding = long or of_pass is fused or of_pass is other
            usual = cta_order == suitability.usual_order(problem, spec) and feeding
            if dq_add in STORED:
                queues = problem.deterministic and suitability.may_queue(problem, spec) and short
                offered = queues if dq_add == "queued" else long or block in space.stored_blocks
                offered = offered and early and feeding and cta_order == "raster"
            elif dq_add == "bulk":
                offered = not early or (usual and short)
            else:
                offered = not early and of_pass is not TURNS and block != SWAPPED_BLOCK
            if not offered:
                continue
            share = DqShareSm90(dq_by=dq_by, dq_add=dq_add)
            plain = BackwardPassSm90(
                block_columns=block, issue_order=of_pass[0][0], mask_stages=mask_stages
            )
            knobs = _fitted(problem, spec, "fused", plain, of_pass, cta_order, dq_share=share)
            launched = with_launches(knobs, early)
            staged = _with_other_stages(problem, launched, spec) if early else (launched,)
            for point in staged:
                if point not in seen and (point.deterministic or not problem.deterministic):
                    seen.add(point)
                    yield point
        if cta_order == "raster" and claims.may_claim(problem, spec):
            yield from claimed_points(problem, space, spec)
        shared = _shared(problem, space, spec, cta_order, blocks[0]) if widest > WIDE else ()
        if raced:
            yield from shared
        for mask_stages, decomposition, (block, (groups, columns)), of_pass in product(
            masks, PASSES, tiles, feeds
        ):
            if decomposition != "fused":
                plain = BackwardPassSm90(
                    block_columns=block, issue_order=of_pass[0][0], mask_stages=mask_stages
                )
                dq = replace(plain, warpgroups=groups, block_columns=columns)
                knobs = _fitted(problem, spec, decomposition, plain, of_pass, cta_order, dq=dq)
                usual = cta_order == suitability.usual_order(problem, spec) and of_pass is FEEDS
                for early in space.early:
                    if early and not (usual and separate):
                        continue
                    launched = with_launches(knobs, early)
                    if launched not in seen:
                        seen.add(launched)
                        yield launched
        if not raced:
            yield from shared


def usual_feeds(problem: Problem) -> tuple[Feed, ...]:
    """All feeds, the fastest first: turns at 112 columns (H200, 4 x 16 x 4096, causal, bf16: 1219 us against 1317)."""
    return TURNS + WITHOUT_TURNS if problem.widest_dim == BELOW_WIDE else FEEDS


def claimed_points(
    problem: Problem, space: AttentionBackwardSm90Space, spec: ArchSpec
) -> Iterator[AttentionBackwardSm90Knobs]:
    """Points whose blocks of keys are claimed, the usual one first: by turns where registers allow it."""
    feeds = usual_feeds(problem)
    masks: tuple[int, ...] = (0,)
    if suitability.takes_both(problem):
        feeds = AHEAD
        masks = MASK_STAGES if problem.mask == "explicit" else masks
    swapped = (SWAPPED_BLOCK,) if claims.claims_longer_steps(problem) else ()
    shares = [
        share
        for share in suitability.in_order(problem, space.shares)
        if share[1] in (64, *swapped) or suitability.is_long(problem, share)
    ]
    queues, free = suitability.may_queue(problem, spec), not problem.deterministic
    adds = tuple(add for add in space.claimed_adds if (queues if add == "queued" else free))
    for dq_add, mask_stages, (dq_by, block) in product(adds, masks, shares):
        share = DqShareSm90(dq_by=dq_by, dq_add=dq_add)
        fed = SERIAL if suitability.is_long(problem, (dq_by, block)) else feeds
        plain = BackwardPassSm90(
            block_columns=block, issue_order=fed[0][0], mask_stages=mask_stages
        )
        knobs = _fitted(problem, spec, "fused", plain, fed, "raster", dynamic=True, dq_share=share)
        yield from _with_other_stages(problem, knobs, spec)


def _shared(
    problem: Problem,
    space: AttentionBackwardSm90Space,
    spec: ArchSpec,
    cta_order: CtaOrder,
    columns: int,
) -> Iterator[AttentionBackwardSm90Knobs]:
    """Points of keys that warpgroups share, beside a pass over queries of so many keys a step."""
    dq = BackwardPassSm90(block_columns=columns, issue_order=FEEDS[0][0])
    for (block, order), early in product(space.shared_keys, reversed(space.early)):
        if not early or cta_order == suitability.usual_order(problem, spec):
            keys = BackwardPassSm90(block_columns=block, issue_order=order, shared_rows=True)
            knobs = _fitted(problem, spec, "two_pass", keys, FEEDS, cta_order, dq=dq)
            yield with_launches(knobs, early)


def with_launches(knobs: AttentionBackwardSm90Knobs, early: bool) -> AttentionBackwardSm90Knobs:
    """A point whose launches are early and whose stores are gathered, or neither."""
    return replace(knobs, early_launches=early, gathered_stores=early)


def _fitted(
    problem: Problem,
    spec: ArchSpec,
    decomposition: Decomposition,
    plain: BackwardPassSm90,
    feeds: tuple[Feed, ...],
    cta_order: CtaOrder,
    dynamic: bool = False,
    **others: Any,
) -> AttentionBackwardSm90Knobs:
    """A point with what its passes have registers and shared memory for, or as asked where nothing fits."""
    passes = dict.fromkeys(PASSES[decomposition], plain) | others
    knobs = AttentionBackwardSm90Knobs(
        decomposition=decomposition,
        cta_order=cta_order,
        persistent=dynamic or not suitability.is_uneven(problem, spec),
        early_launches=dynamic,
        gathered_stores=dynamic,
        dynamic=dynamic,
        **passes,
    )
    fitted = {
        name: value
        for shape in shapes(Candidate.of(problem, knobs))
        for name, value in _first(shape, feeds, spec).items()
    }
    return replace(knobs, **fitted)


@lru_cache(maxsize=4096)  # problems of a class have the same passes
def _first(
    shape: BackwardPassSm90Shape, feeds: tuple[Feed, ...], spec: ArchSpec
) -> Mapping[str, Any]:
    """The first issue order and stages of a pass that are legal and fit, by the names of their knobs."""
    if shape.knobs.shared_rows:
        feeds = tuple((shape.knobs.issue_order, stages, False) for stages in ((3, 3), (2, 2)))
    elif not shape.takes_scores and feeds != SERIAL:
        feeds = (*(feed for feed in feeds if feed[0] == "both_ahead"), DP_AHEAD, *SERIAL)
    for order, stages, held in feeds:
        fed = replace(shape, knobs=replace(shape.knobs, issue_order=order, held_rows=held))
        for first, ds_stages in suitability.stages(fed, stages[0]):
            made = _staged(fed, first, stages[1], ds_stages)
            if _fits(made, spec):
                return {made.name: made.knobs} | ({"dq_share": made.share} if made.share else {})
    return {}


def _staged(
    shape: BackwardPassSm90Shape, first: int, second: int, ds_stages: int
) -> BackwardPassSm90Shape:
    """A pass with so many stages of what streams for S and for dP, and of dS."""
    knobs = replace(shape.knobs, first_stages=first, second_stages=second)
    share = shape.share and replace(shape.share, ds_stages=ds_stages)
    return replace(shape, knobs=knobs, share=share)


def _fits(shape: BackwardPassSm90Shape, spec: ArchSpec) -> bool:
    fits = smem_bytes(shape) <= spec.smem_per_block_bytes
    return fits and pass_of(shape).violation is None


def _with_other_stages(
    problem: Problem, knobs: AttentionBackwardSm90Knobs, spec: ArchSpec
) -> Iterator[AttentionBackwardSm90Knobs]:
    """A point of a fused pass, and the same with the other stages that its issue order may have.

    None is ahead everywhere: on an H200 they are within 5 % of each other, in either order.
    """
    yield knobs
    (shape,) = shapes(Candidate.of(problem, knobs))
    # Where the first choice has fewer than the order asks for, this one brings them back.
    asked = TURNS[0][1][0] if shape.knobs.issue_order == "by_turns" else shape.knobs.first_stages
    for first, ds_stages in suitability.stages(shape, asked):
        made = _staged(shape, first, shape.knobs.second_stages, ds_stages)
        if made != shape and _fits(made, spec):
            yield replace(knobs, keys=made.knobs, dq_share=made.share)
