"""Retnet's masked forward on the loop of attention's, family ``sm90``: its candidates, and the one without tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ...arch.spec import ArchSpec
from ...core.candidate import Rejection
from ...core.problem import Problem
from ..shared.passes import first_legal, points_of
from ..shared.sm90_tiles import MAX_COLUMNS
from .knobs import AttentionForwardSm90Knobs, Mainloop, Output, Schedule
from .rules import PRUNING_PREDICATES, passes_of

KEPT_DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class MaskedSpace:
    """The values that knobs may take, the first legal ones being the default's.

    Attributes:
        plans: (warpgroups, main loop, by turns) triples.
        block_n: key rows of a step.
        stages: (of K and V, of the mask) pairs.
        ends: (stages of Q, way of O) pairs.
        schedules: those of a causal mask, which are all.
        kept_depths: columns of Q that stay in registers, of depths beyond :data:`SMALL_DIM` up to :data:`MIDDLE_DIM`
            and two warpgroups that overlap, without a causal mask; the others have none.
        exchanges: (stages of P exchanged, of K, of V, of the mask), where two slices share scores.
    """

    plans: tuple[tuple[int, Mainloop, bool], ...] = (
        (2, "overlap", False),
        (2, "overlap", True),
        (2, "overlap_flat", False),
        (2, "serial", True),
        (3, "serial", False),
        (3, "serial", True),
        (4, "strict", False),
    )
    block_n: tuple[int, ...] = (128, 64)
    stages: tuple[tuple[int, int], ...] = ((3, 2), (3, 1), (2, 2), (2, 1))
    ends: tuple[tuple[int, Output], ...] = (
        (2, "through_q"),
        (2, "direct"),
        (1, "through_q"),
        (1, "direct"),
    )
    schedules: tuple[Schedule, ...] = ("dynamic", "static", "grid")
    kept_depths: tuple[int, ...] = (0, KEPT_DEPTH)
    exchanges: tuple[tuple[int, int, int, int], ...] = ((1, 2, 2, 1), (2, 2, 1, 1), (1, 2, 1, 2))


SHARED_ROWS, SHARED_BLOCK = 128, 128  # of a tile, and keys of a step, whose scores two CTAs share
SMALL_DIM, MIDDLE_DIM = 64, 128  # up to which the first suit, and the next; measured on an H200
# Keys up to which the shorter steps suit tiles that are few, by whether head dims, of q and of v, are beyond SMALL_DIM.
SHORT_KEYS = {(False, False): 256, (False, True): 1024, (True, True): 512}
SPACES: dict[str, MaskedSpace] = {}  # by the spec's name; the others have the values above


def points(problem: Problem, spec: ArchSpec) -> Iterator[AttentionForwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    return points_of(problem, spec, _points(problem, spec), passes_of, PRUNING_PREDICATES)


def default(problem: Problem, spec: ArchSpec) -> AttentionForwardSm90Knobs | None:
    """The first legal point, of those that suit the head dims if any do; None where there is none.

    Two slices share scores where these are much of the work, and even, and CTAs employ the SMs; measured on an H200, as
    what stays of Q is: without a causal mask 418 us against 442 at 8 x 16 x 2048, d128, and 371 against 420 by turns
    at d96. Tiles that are no more than the SMs need nobody to count claims, and are the smaller ones; so they are up to
    two for each SM at d64, where tiles of 192 rows fill the GPU worse.
    """
    dim = problem.widest_dim
    tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // SHARED_ROWS)
    offered = tuple(_points(problem, spec))
    much_scored = problem.padded_dim_qk > MIDDLE_DIM and not problem.causal
    shares = much_scored and 2 * tiles >= spec.num_sms
    keeps = tiles >= spec.num_sms and any(knobs.kept_depth for knobs in offered)
    stays = keeps or dim > MIDDLE_DIM
    ping_pong = much_scored or (keeps and dim < MIDDLE_DIM)
    few = tiles * -(-problem.padded_dim_v // MAX_COLUMNS) <= spec.num_sms
    smaller = dim <= MIDDLE_DIM and (few or (dim <= SMALL_DIM and tiles <= 2 * spec.num_sms))
    tile_of_few = _tile_of_few(problem) if smaller else None

    def unsuited(knobs: AttentionForwardSm90Knobs) -> tuple[bool, ...]:
        if knobs.exchange_stages:
            return (not shares,)
        if tile_of_few is not None:
            tile = (knobs.warpgroups, knobs.mainloop, knobs.ping_pong, knobs.block_n)
            scheduled = knobs.schedule == ("static" if few else "grid")
            return (shares, knobs.mask_stages < 2, tile != tile_of_few, not scheduled)
        by_turns = knobs.warpgroups == 3 and knobs.ping_pong
        if dim <= SMALL_DIM:
            return (shares, knobs.mask_stages < 2, not by_turns)
        by_mask = "static" if few or stays else "grid"
        usual = (problem.causal and not few) or knobs.schedule == by_mask
        fed = (bool(knobs.kept_depth), knobs.ping_pong) == (keeps, ping_pong)
        return (shares, knobs.mask_stages < 2, not usual, not fed)

    by_suitability = sorted(offered, key=unsuited)
    return first_legal(problem, spec, by_suitability, passes_of, PRUNING_PREDICATES)


def _tile_of_few(problem: Problem) -> tuple[int, Mainloop, bool, int]:
    """Warpgroups, main loop, turns and keys of a step of tiles that are few.

    On an H200, bf16, d64: 4.3 us in short steps against 4.9 by turns at 1 x 3 x 179, 12.3 by turns against 13.0 at
    4 x 2 x 916; 7.8 and 17.1 as claimed tiles of 192 rows.
    """
    beyond = (problem.padded_dim_qk > SMALL_DIM, problem.padded_dim_v > SMALL_DIM)
    short = problem.seqlen_k <= SHORT_KEYS.get(beyond, SHORT_KEYS[True, True])
    return (2, "overlap", not short, 64 if short else 128)


def _points(problem: Problem, spec: ArchSpec) -> Iterator[AttentionForwardSm90Knobs]:
    space = SPACES.get(spec.name, MaskedSpace())
    schedules = space.schedules if problem.causal else space.schedules[1:]  # claims even out
    slices = -(-problem.padded_dim_v // MAX_COLUMNS)  # more would repeat Q K^T for nothing
    tiles = product(
        space.plans, space.block_n, space.stages, space.ends, schedules, space.kept_depths
    )
    for plan, block_n, stages, (q_stages, output), schedule, kept in tiles:
        warpgroups, mainloop, ping_pong = plan
        if kept and not _may_keep(problem, warpgroups, mainloop):
            continue
        yield AttentionForwardSm90Knobs(
            warpgroups=warpgroups,
            block_n=block_n,
            mainloop=mainloop,
            optimistic=False,
            ping_pong=ping_pong,
            q_stages=q_stages,
            k_stages=stages[0],
            v_stages=stages[0],
            mask_stages=stages[1],
            v_slices=slices,
            kept_depth=kept,
            output=output,
            schedule=schedule,
        )
    if slices == 2:
        yield from _sharing_scores(problem, space)


def _may_keep(problem: Problem, warpgroups: int, mainloop: Mainloop) -> bool:
    middle = SMALL_DIM < problem.padded_dim_qk <= MIDDLE_DIM
    return middle and not problem.causal and (warpgroups, mainloop) == (2, "overlap")


def _sharing_scores(problem: Problem, space: MaskedSpace) -> Iterator[AttentionForwardSm90Knobs]:
    """Two slices as a cluster, in which each computes half of the scores."""
    schedules: tuple[Schedule, ...] = ("grid", "static") if problem.causal else ("static", "grid")
    for exchange, (q_stages, output), schedule in product(space.exchanges, space.ends, schedules):
        stages, k_stages, v_stages, mask_stages = exchange
        yield AttentionForwardSm90Knobs(
            warpgroups=2,
            block_n=SHARED_BLOCK,
            mainloop="overlap",
            optimistic=False,
            q_stages=q_stages,
            k_stages=k_stages,
            v_stages=v_stages,
            mask_stages=mask_stages,
            v_slices=2,
            exchange_stages=stages,
            output=output,
            schedule=schedule,
        )
