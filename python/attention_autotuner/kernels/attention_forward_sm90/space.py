"""The candidates of attention's forward of family ``sm90`` that a policy offers, and the ones that need no tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, Rejection
from ...core.problem import Problem
from ..shared.passes import check_passes
from .knobs import AttentionForwardSm90Knobs, Mainloop, Output, Schedule
from .rules import DEEP_STAGES, PRUNING_PREDICATES, SHALLOW_STAGES, passes_of

Variation = tuple[bool, bool, Schedule]  # optimistic, ping_pong, schedule

BY_TURNS: tuple[Variation, ...] = (
    (True, False, "dynamic"),
    (True, False, "static"),
    (True, True, "dynamic"),
    (True, True, "static"),
)
FLAT: tuple[Variation, ...] = (
    (True, False, "dynamic"),
    (True, False, "static"),
    (False, False, "dynamic"),
)


@dataclass(frozen=True, kw_only=True)
class AttentionForwardSm90Space:
    """The values that knobs may take.

    Attributes:
        plans: warpgroups, main loop, and what may vary with these; all combinations would find little more.
        block_n: key rows of a step.
        ends: (stages of Q, way of O) pairs.
        key_stages: stages of K, and of V.
    """

    plans: tuple[tuple[int, Mainloop, tuple[Variation, ...]], ...] = (
        (2, "overlap", (*FLAT, (True, False, "grid"))),
        (2, "overlap_flat", FLAT),
        (3, "serial", BY_TURNS),
        (3, "overlap", BY_TURNS[:2]),
        (4, "serial", BY_TURNS),
        (4, "strict", BY_TURNS),
    )
    block_n: tuple[int, ...] = (128, 96, 80, 64)
    ends: tuple[tuple[int, Output], ...] = (
        (2, "through_q"),
        (2, "direct"),
        (1, "direct"),
        (1, "through_q"),
    )
    key_stages: tuple[int, ...] = (DEEP_STAGES, SHALLOW_STAGES)


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A row of the default table.

    Attributes:
        dim_qk, dim_v: padded head dims up to which it holds.
        plan: warpgroups and main loop.
        block_n: key rows of a step, the first legal one.
        ping_pong: as the knob.
    """

    dim_qk: int
    dim_v: int
    plan: tuple[int, Mainloop]
    block_n: tuple[int, ...]
    ping_pong: bool = False


SPACES: dict[str, AttentionForwardSm90Space] = {}  # by the spec's name; the others have the above
PREFERENCES: tuple[Preference, ...] = (
    Preference(dim_qk=64, dim_v=64, plan=(4, "serial"), block_n=(64,), ping_pong=True),
    Preference(dim_qk=80, dim_v=80, plan=(3, "serial"), block_n=(96,)),
    Preference(dim_qk=96, dim_v=96, plan=(3, "serial"), block_n=(80,)),
    Preference(dim_qk=112, dim_v=112, plan=(3, "serial"), block_n=(64,)),
    Preference(dim_qk=192, dim_v=256, plan=(2, "overlap"), block_n=(128, 96, 80)),
    Preference(dim_qk=256, dim_v=256, plan=(2, "overlap"), block_n=(128, 96, 64)),
)
"""The default table, measured on an H200; see docs/kernel_log.md."""
LEAST_QUERIES = 64  # rows of a warpgroup: with fewer, most of its MMAs are wasted


def points(problem: Problem, spec: ArchSpec) -> Iterator[AttentionForwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    space = SPACES.get(spec.name, AttentionForwardSm90Space())
    for warpgroups, mainloop, variations in space.plans:
        for block_n in space.block_n:
            tile = (warpgroups, mainloop, block_n)
            yield from _checked(problem, spec, _of_tile(space, tile, variations))


def default(problem: Problem, spec: ArchSpec) -> AttentionForwardSm90Knobs | None:
    """The first row of the table that is legal; None where there is none, or too few queries for a warpgroup."""
    if problem.seqlen_q < LEAST_QUERIES:
        return None
    space = SPACES.get(spec.name, AttentionForwardSm90Space())
    for row in PREFERENCES:
        if problem.padded_dim_qk > row.dim_qk or problem.padded_dim_v > row.dim_v:
            continue
        variation = (True, row.ping_pong, _schedule(problem, row.plan[0], spec))
        for block_n in row.block_n:
            points = _of_tile(space, (*row.plan, block_n), (variation,))
            for point in _checked(problem, spec, points):
                if not isinstance(point, Rejection):
                    return point
    return None


def _schedule(problem: Problem, warpgroups: int, spec: ArchSpec) -> Schedule:
    """The schedule that needs no tuning: claims even out causal tiles, where there are more than SMs."""
    row_blocks = -(-problem.seqlen_q // (LEAST_QUERIES * warpgroups))
    tiles = row_blocks * problem.heads_q * problem.batch
    return "dynamic" if problem.causal and tiles > spec.num_sms else "static"


def _checked(
    problem: Problem, spec: ArchSpec, points: Iterable[AttentionForwardSm90Knobs]
) -> Iterator[AttentionForwardSm90Knobs | Rejection]:
    for knobs in points:
        candidate = Candidate.of(problem, knobs)
        yield check_passes(candidate, passes_of, spec, PRUNING_PREDICATES) or knobs


def _of_tile(
    space: AttentionForwardSm90Space,
    tile: tuple[int, Mainloop, int],
    variations: Iterable[Variation],
) -> Iterator[AttentionForwardSm90Knobs]:
    warpgroups, mainloop, block_n = tile
    for (q_stages, output), stages, variation in product(space.ends, space.key_stages, variations):
        optimistic, ping_pong, schedule = variation
        yield AttentionForwardSm90Knobs(
            warpgroups=warpgroups,
            block_n=block_n,
            mainloop=mainloop,
            optimistic=optimistic,
            ping_pong=ping_pong,
            q_stages=q_stages,
            k_stages=stages,
            v_stages=stages,
            output=output,
            schedule=schedule,
        )
