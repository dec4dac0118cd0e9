"""The retnet backward candidates of family ``sm90`` that a policy offers, and the one that needs no tuning.

A candidate takes one kind of tile for its three passes. What follows from a tile, each pass has as its own head dims
allow: as many stages as fit, and where not even two do, streamed tiles of the first MMA in slices of their depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, Rejection
from ...core.problem import Problem
from ..shared.knobs import CtaOrder
from ..shared.passes import first_legal, points_of
from ..shared.sm90_tiles import MAX_COLUMNS, SWIZZLE_COLUMNS, whole_columns
from .knobs import BackwardSm90Knobs, Sm90Pass, StoredPass
from .resources import ScoreBands, Sm90PassShape, StoredPassShape, computing_shapes, smem_bytes
from .rules import MAX_SLICE_STAGES, MAX_STAGES, MAX_STORED_STAGES, pass_of, passes_of


@dataclass(frozen=True, kw_only=True)
class BackwardSm90Space:
    """The values each knob may take.

    Attributes:
        tiles: (warpgroups, block_columns) pairs.
        ping_pong: values of that knob, where a pass can.
        cta_orders: orders of the list of CTAs.
        exchanges: (stages of P exchanged, of the mask, slices of a tile, slots of the ring) of dV, where its two slices
            share scores; the first is the default of masks that are not causal, if CTAs employ the SMs.
        kept_depth: values of that knob, where results take as many columns as an MMA has; the default has it beside
            shared scores.
        gathered_stores: values of that knob.
    """

    tiles: tuple[tuple[int, int], ...] = ((2, 128), (3, 64), (2, 64))
    ping_pong: tuple[bool, ...] = (True, False)
    cta_orders: tuple[CtaOrder, ...] = ("raster", "longest_first")
    exchanges: tuple[tuple[int, int, int, int], ...] = ((1, 1, 2, 8), (1, 2, 2, 7), (1, 1, 1, 4))
    kept_depth: tuple[int, ...] = (0, SWIZZLE_COLUMNS)
    gathered_stores: tuple[bool, ...] = (True, False)


DEEP_TILE = (2, 128)
"""Warpgroups and block_columns whose fragments leave registers for 64 columns of the first MMA's left tile."""
WIDE_TILE = (2, 64)
"""Warpgroups and block_columns whose fragments fit beside 256 columns of a result."""
LEAST_BANDS = 4
"""Bands of stored scores, two of which are in the workspace: it holds no more than half of all scores."""
MOST_BAND_BYTES = 2**29
"""Of a band: one head of 16k tokens."""
STORED_DIM, STORED_DIM_ALWAYS, STORED_TOKENS = 192, 512, 1024
"""The wider head dim from which stored scores are the default, at so many tokens or of any number."""
SPACES: dict[str, BackwardSm90Space] = {}  # by the spec's name; the others have the values above


def points(problem: Problem, spec: ArchSpec) -> Iterator[BackwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    space = SPACES.get(spec.name, BackwardSm90Space())
    return points_of(problem, spec, _points(problem, space, spec), passes_of)


def default(problem: Problem, spec: ArchSpec) -> BackwardSm90Knobs | None:
    """The first legal point, in the order of CTAs that suits the mask; None where there is none.

    Wide results do without ping-pong: their warpgroups have little to do beside the MMAs. Long ones take dK from stored
    scores.
    """
    order: CtaOrder = "longest_first" if problem.causal else "raster"
    widest = problem.widest_dim
    space = SPACES.get(spec.name, BackwardSm90Space())
    chosen = replace(space, ping_pong=(widest < MAX_COLUMNS,), cta_orders=(order,))
    first = first_legal(problem, spec, _points(problem, chosen, spec), passes_of)
    if first is None or problem.causal:
        return first
    if widest >= STORED_DIM_ALWAYS or (widest >= STORED_DIM and problem.seqlen_q >= STORED_TOKENS):
        stored = _stored_default(problem, chosen, spec)
        if stored is not None:
            return stored
    if first.dv.slices != 2:
        return first
    ctas = problem.batch * problem.heads_kv * -(-problem.seqlen_k // first.dv.block_rows)
    if ctas * first.dv.slices < spec.num_sms:
        return first
    # On an H200, whole backwards at 256/512: fp16 2245 us against 2316 (8 x 8 x 2k) and 4296 against 4427 (4 x 8 x 4k),
    # bf16 2156 against 2224 and 4197 against 4286.
    others = _narrow_reads(problem, first, space)
    return next((k for k in others if k.dv.exchange_stages and k.dq.kept_depth), first)


def _stored_default(
    problem: Problem, space: BackwardSm90Space, spec: ArchSpec
) -> BackwardSm90Knobs | None:
    """The first legal point with stored scores, if there is one.

    On an H200, microseconds of whole backwards in fp16 without and with: 2039 and 1720 at 256/512 (8 x 8 x 2k), 3931
    and 3313 (4 x 8 x 4k), 605 and 557 (32 x 8 x 512); 1205 and 1100 at 256/256 (8 x 8 x 2k), 662 and 621 (16 x 8 x 1k),
    but 379 and 437 (32 x 8 x 512); 1053 and 922 at 192/192, 996 and 909 at 128/256, 2207 and 2092 at 256/128
    (8 x 16 x 2k). At 256/256 it is 1237 where dQ's pass keeps nothing of its left tile; at 256/512 that is as fast or
    faster (`retnet_backward_stored_scores` in kernel_log.json).
    """
    chosen = replace(space, tiles=(WIDE_TILE,), ping_pong=(False,), gathered_stores=(True,))
    keeps = problem.padded_dim_v <= MAX_COLUMNS == whole_columns(problem.padded_dim_qk)
    suited = (
        knobs
        for knobs in _points(problem, chosen, spec)
        if knobs.stored_dk is not None
        and (knobs.dq.kept_depth > 0) == keeps
        and knobs.dv.kept_depth == 0
        and (knobs.dv.exchange_stages > 0) == (knobs.dv.slices == 2)
    )
    return first_legal(problem, spec, suited, passes_of)


def _points(
    problem: Problem, space: BackwardSm90Space, spec: ArchSpec
) -> Iterator[BackwardSm90Knobs]:
    seen: set[BackwardSm90Knobs] = set()
    for (groups, columns), ping_pong, order in product(
        space.tiles, space.ping_pong, space.cta_orders
    ):
        slices = -(-problem.padded_dim_v // MAX_COLUMNS)
        plain = Sm90Pass(
            warpgroups=groups,
            block_columns=columns,
            num_stages=1,
            slice_stages=2,
            ping_pong=ping_pong,
        )
        whole = BackwardSm90Knobs(
            dq=plain, dk=plain, dv=replace(plain, slices=slices), cta_order=order
        )
        passes = computing_shapes(Candidate.of(problem, whole))
        dq, dk, dv = (fit(shape, spec) or shape.knobs for shape in passes)
        deep = [s.result for s in passes if s.depth == 2 * SWIZZLE_COLUMNS]
        for gathered in space.gathered_stores:
            knobs = replace(whole, dq=dq, dk=dk, dv=dv, gathered_stores=gathered)
            if knobs not in seen:
                seen.add(knobs)
                if (groups, columns) == DEEP_TILE and deep:
                    yield _keeping(knobs, deep)
                yield knobs
                if (groups, columns) == WIDE_TILE and not ping_pong and gathered:
                    yield from _wide_points(problem, knobs, space, spec)


def _keeping(knobs: BackwardSm90Knobs, results: Sequence[str]) -> BackwardSm90Knobs:
    """The same with a block of columns kept in registers by the passes of some results."""
    kept: dict[str, Any] = {
        result: replace(item, kept_depth=SWIZZLE_COLUMNS)
        for result, item in knobs.passes.items()
        if result in results
    }
    return replace(knobs, **kept)


def _wide_points(
    problem: Problem, knobs: BackwardSm90Knobs, space: BackwardSm90Space, spec: ArchSpec
) -> Iterator[BackwardSm90Knobs]:
    """The same with passes that read less of shared memory, as wide results need, and each with stored scores."""
    stored_dk = _stored_pass(problem, knobs, spec)
    for made in _narrow_reads(problem, knobs, space):
        if made != knobs:
            yield made
        if stored_dk is not None:
            yield replace(made, dk=None, stored_dk=stored_dk)


def _stored_pass(problem: Problem, knobs: BackwardSm90Knobs, spec: ArchSpec) -> StoredPass | None:
    """The pass for dK from stored scores, with the rows and stages that fit; None where bands are too few or large."""
    for rows, stages in product((128, 64), range(MAX_STORED_STAGES, 1, -1)):
        stored = StoredPass(warpgroup_rows=rows, num_stages=stages)
        candidate = Candidate.of(problem, replace(knobs, dk=None, stored_dk=stored))
        shape = StoredPassShape(candidate=candidate, knobs=stored)
        if pass_of(shape).violation_on(spec) is None:
            bands = ScoreBands.of(problem, candidate)
            fits = bands.count >= LEAST_BANDS and bands.num_bytes <= MOST_BAND_BYTES
            return stored if fits else None
    return None


def _narrow_reads(
    problem: Problem, knobs: BackwardSm90Knobs, space: BackwardSm90Space
) -> Iterator[BackwardSm90Knobs]:
    """Passes whose results are as wide as an MMA, which shared memory holds up: those that read less of it."""
    every = computing_shapes(Candidate.of(problem, knobs))
    widest = [shape.result for shape in every if shape.columns == MAX_COLUMNS]
    shared = [knobs.dv]
    if knobs.dv.slices == 2:  # as a cluster, in which each computes half of the scores
        shared += [
            replace(
                knobs.dv,
                num_stages=num_stages,
                depth_slices=depth_slices,
                slice_stages=slice_stages,
                exchange_stages=exchange_stages,
            )
            for exchange_stages, num_stages, depth_slices, slice_stages in space.exchanges
        ]
    made = []
    for dv, kept, dv_keeps in product(shared, space.kept_depth, (True, False)):
        passes = {
            result: replace(item, kept_depth=kept)
            for result, item in {**knobs.passes, "dv": dv}.items()
            if result in widest and not item.exchange_stages and (dv_keeps or result != "dv")
        }
        made.append(replace(knobs, **{"dv": dv, **passes}))
    yield from dict.fromkeys(made)


def fit(shape: Sm90PassShape, spec: ArchSpec) -> Sm90Pass | None:
    """A pass with all the stages that fit shared memory; None where not even one does."""
    knobs, blocks = shape.knobs, shape.depth // SWIZZLE_COLUMNS
    by_turns = knobs.ping_pong and blocks == 1
    sliced = replace(knobs, num_stages=1, depth_slices=blocks, ping_pong=by_turns)
    choices = chain(
        (replace(knobs, num_stages=n, slice_stages=n) for n in range(MAX_STAGES, 1, -1)),
        (replace(sliced, slice_stages=n) for n in range(MAX_SLICE_STAGES, 2, -1)),
    )
    return next((fitted for fitted in choices if _fits(shape, fitted, spec)), None)


def _fits(shape: Sm90PassShape, knobs: Sm90Pass, spec: ArchSpec) -> bool:
    made = replace(shape, knobs=knobs)
    return pass_of(made).violation is None and smem_bytes(made) <= spec.smem_per_block_bytes
