"""The candidates of attention's forward of family ``sm90`` that a policy offers, and the ones that need no tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from ...arch.spec import ArchSpec
from ...core.candidate import Rejection
from ...core.problem import Problem
from ..shared.passes import first_legal, points_of
from ..shared.split_kv import keys_should_split, queries_are_few, rows_of_group, split_counts
from . import masked_space
from .knobs import AttentionForwardSm90Knobs, Mainloop, Output, Schedule
from .rules import DEEP_STAGES, DEEPEST_STAGES, PRUNING_PREDICATES, SHALLOW_STAGES, passes_of

Variation = tuple[bool, bool, Schedule]  # optimistic, ping_pong, schedule

FREE: tuple[Variation, ...] = ((True, False, "dynamic"), (True, False, "static"))
BY_TURNS: tuple[Variation, ...] = ((True, True, "dynamic"), (True, True, "static"))


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
        (1, "overlap", FREE),
        (2, "overlap", (*FREE, (False, False, "dynamic"), (True, False, "grid"))),
        (2, "overlap_flat", FREE),
        (3, "serial", (*FREE, *BY_TURNS[:1])),
        (3, "scores_first", (*FREE[:1], *BY_TURNS)),
        (4, "serial", BY_TURNS),
        (4, "scores_first", (*FREE, *BY_TURNS)),
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
        up_to: the padded head dims, of q and k and of v, up to which it holds.
        plan: warpgroups and main loop.
        block_n: key rows of a step, the first legal one.
        ping_pong: as the knob.
        least_keys: tokens of K from which it holds, without and with a causal mask; None: never.
        modifications: it holds for problems with these, or some of them, and no others; where empty, for those
            without; None: for all.
        claims: CTAs claim tiles without a causal mask, too, where there are more tiles than SMs.
    """

    up_to: tuple[int, int]
    plan: tuple[int, Mainloop]
    block_n: tuple[int, ...]
    ping_pong: bool = False
    least_keys: tuple[int | None, int | None] = (0, 0)
    modifications: frozenset[str] | None = None
    claims: bool = False

    def holds(self, problem: Problem) -> bool:
        """True for the problems that the row is about."""
        dim_qk, dim_v = self.up_to
        if problem.padded_dim_qk > dim_qk or problem.padded_dim_v > dim_v:
            return False
        least = self.least_keys[problem.causal]
        if least is None or problem.seqlen_k < least:
            return False
        modified = frozenset(problem.compiled_modifications)
        if self.modifications is None or not modified:
            return not self.modifications
        return modified <= self.modifications


STREAM_MAINLOOPS: tuple[Mainloop, ...] = ("overlap", "serial")
SPACES: dict[str, AttentionForwardSm90Space] = {}  # by the spec's name; the others have the above
PREFERENCES: tuple[Preference, ...] = (
    Preference(
        up_to=(64, 64),
        plan=(4, "serial"),
        block_n=(64,),
        ping_pong=True,
        modifications=frozenset(("softcap",)),
    ),
    Preference(
        up_to=(64, 64),
        plan=(3, "serial"),
        block_n=(128,),
        least_keys=(8192, 16384),
        modifications=frozenset(),
    ),
    Preference(up_to=(64, 64), plan=(4, "scores_first"), block_n=(64,), ping_pong=True),
    Preference(up_to=(80, 80), plan=(3, "serial"), block_n=(96,), ping_pong=True, claims=True),
    Preference(up_to=(112, 112), plan=(3, "scores_first"), block_n=(96,), ping_pong=True),
    *(
        Preference(
            up_to=(128, 128),
            plan=(3, "scores_first"),
            block_n=(80,),
            ping_pong=True,
            least_keys=(None, least),
            modifications=frozenset(modifications),
        )
        for least, modifications in ((8192, ("softcap", "bias_table")), (0, ("alibi_slopes",)))
    ),
    Preference(
        up_to=(128, 128), plan=(3, "scores_first"), block_n=(64,), ping_pong=True, claims=True
    ),
    Preference(up_to=(192, 128), plan=(3, "scores_first"), block_n=(64, 96), ping_pong=True),
    Preference(up_to=(128, 256), plan=(2, "overlap_flat"), block_n=(64, 80)),
    Preference(up_to=(256, 256), plan=(2, "overlap"), block_n=(64, 96, 128)),
)
"""The default table, measured on an H200; see docs/kernel_log.md."""
TILE_TIMES: tuple[tuple[tuple[int, int], dict[int, float]], ...] = (
    ((64, 64), {1: 0.62, 2: 0.79, 3: 0.81, 4: 1.0}),
    ((128, 128), {1: 0.58, 2: 0.745, 3: 1.0}),
    ((192, 128), {1: 0.52, 2: 0.70, 3: 1.0}),
    ((256, 256), {1: 0.53, 2: 1.0}),
)
"""Up to padded head dims, the time of a tile of rows by its warpgroups, over that of the most; raced on an H200."""
SMALLER_PLANS: dict[int, tuple[Mainloop, bool]] = {
    1: ("overlap", False),
    2: ("overlap", False),
    3: ("scores_first", True),
}
"""Main loops, and whether by turns, of fewer warpgroups than a row's."""
CLAIMED_TAIL = {False: 0.04, True: 0.25}
"""Of the rounds of tiles that are claimed, what the end of the list adds; without and with a causal mask."""
LEAST_CLAIMED_KEYS = {False: 2048, True: 513}
"""From which claims pay, without and with a causal mask."""
LONG_BLOCK_KEYS = 384  # from which steps of 128 keys pay where all keys are seen
LEAST_QUERIES = 64  # rows of a warpgroup: with fewer, most of its MMAs are wasted
STREAM_BLOCKS = (128, 96, 64)  # keys of a step where they stream past few queries
WIDE_DIM = 96  # above, a step of fewer keys leaves more stages


def points(problem: Problem, spec: ArchSpec) -> Iterator[AttentionForwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    if problem.score == "masked":
        yield from masked_space.points(problem, spec)
        return
    space = SPACES.get(spec.name, AttentionForwardSm90Space())
    if problem.seqlen_q >= LEAST_QUERIES or problem.packed:
        for warpgroups, mainloop, variations in space.plans:
            for block_n in space.block_n:
                points = _of_tile(space, (warpgroups, mainloop, block_n), variations)
                yield from points_of(problem, spec, points, passes_of, PRUNING_PREDICATES)
    if queries_are_few(problem, LEAST_QUERIES):
        yield from _streaming(problem, spec)


def default(problem: Problem, spec: ArchSpec) -> AttentionForwardSm90Knobs | None:
    """The first row of the table that is legal, or fewer warpgroups where their tiles of rows suit the SMs better.

    For queries too few to fill the GPU it is a stream of split keys.
    """
    if problem.score == "masked":
        return masked_space.default(problem, spec)
    space = SPACES.get(spec.name, AttentionForwardSm90Space())
    few = problem.seqlen_q < LEAST_QUERIES
    idle = keys_should_split(problem, 2 * LEAST_QUERIES, spec)
    if queries_are_few(problem, LEAST_QUERIES) and (few or idle):
        return _default_stream(problem, spec)
    rows = [row for row in PREFERENCES if row.holds(problem)]
    smaller = _smaller(problem, rows[0], spec) if rows and not problem.packed else []
    for row in [*smaller, *rows]:
        schedule = _schedule(problem, row.plan[0], spec, claims=row.claims)
        variation = (True, row.ping_pong, schedule)
        for block_n in row.block_n:
            points = _of_tile(space, (*row.plan, block_n), (variation,))
            knobs = first_legal(problem, spec, points, passes_of, PRUNING_PREDICATES)
            if knobs is not None:
                return knobs
    return None


def _smaller(problem: Problem, row: Preference, spec: ArchSpec) -> list[Preference]:
    """Rows of fewer warpgroups that take less time than one, the least first; not known of packed sequences."""
    times = _tile_times(problem)

    def time(groups: int, *, claims: bool = False) -> float:
        return _rounds(problem, groups, spec, claims=claims) * times[groups]

    usual = time(row.plan[0], claims=row.claims)
    by_time = sorted((time(groups), groups) for groups in times if groups < row.plan[0])
    return [_of_fewer(problem, row, groups, spec) for taken, groups in by_time if taken < usual]


def _of_fewer(problem: Problem, row: Preference, groups: int, spec: ArchSpec) -> Preference:
    """A row with fewer warpgroups, and with the steps of keys that suit these."""
    mainloop, ping_pong = SMALLER_PLANS[groups]
    waits = problem.widest_dim > 64 and _tiles(problem, groups) <= spec.num_sms
    long = not problem.causal and problem.seqlen_k >= LONG_BLOCK_KEYS and not waits
    return replace(
        row,
        plan=(groups, mainloop),
        block_n=(128, 64) if long and problem.widest_dim <= 128 else (64, 96),
        ping_pong=ping_pong,
        claims=False,
    )


def _tile_times(problem: Problem) -> dict[int, float]:
    """The times of :data:`TILE_TIMES` for the head dims of a problem."""
    dims = (problem.padded_dim_qk, problem.padded_dim_v)
    return next(times for up_to, times in TILE_TIMES if dims[0] <= up_to[0] and dims[1] <= up_to[1])


def _rounds(problem: Problem, warpgroups: int, spec: ArchSpec, *, claims: bool) -> float:
    """The tiles of rows that an SM takes one after the other: whole ones, or on average where they are claimed."""
    rounds = _tiles(problem, warpgroups) / spec.num_sms
    if _schedule(problem, warpgroups, spec, claims=claims) == "static":
        return ceil(rounds)
    if problem.causal:
        rounds *= (1 + 1 / _row_blocks(problem, warpgroups)) / 2  # of the keys are seen
    return max(1.0, rounds) + CLAIMED_TAIL[problem.causal] * rounds


def _streaming(problem: Problem, spec: ArchSpec) -> Iterator[AttentionForwardSm90Knobs | Rejection]:
    """Few queries, whose time is that of reading K and V: one or two warpgroups, keys split among CTAs."""
    group = problem.heads_q // problem.heads_kv
    tiles = product(
        (1, 2) if rows_of_group(problem) > LEAST_QUERIES else (1,),
        STREAM_BLOCKS,
        STREAM_MAINLOOPS,
    )
    for warpgroups, block_n, mainloop in tiles:
        for stages in range(DEEPEST_STAGES, SHALLOW_STAGES - 1, -1):
            knobs = AttentionForwardSm90Knobs(
                warpgroups=warpgroups,
                block_n=block_n,
                mainloop=mainloop,
                q_stages=1,
                k_stages=stages,
                v_stages=stages,
                output="direct",
                schedule="static",
                pack_gqa=group > 1,
                split_kv=True,
            )
            for point in points_of(problem, spec, [knobs], passes_of, PRUNING_PREDICATES):
                if isinstance(point, Rejection):
                    yield point
                else:
                    for splits in split_counts(problem, point, spec.num_sms):
                        yield replace(point, splits=splits)


def _default_stream(problem: Problem, spec: ArchSpec) -> AttentionForwardSm90Knobs | None:
    """The first streaming point with the step that suits the head dims, and with the warpgroups of the rows."""
    legal = [p for p in _streaming(problem, spec) if not isinstance(p, Rejection)]
    dim = problem.widest_dim
    block_n = 64 if dim > WIDE_DIM else 128
    warpgroups = 1 if rows_of_group(problem) <= LEAST_QUERIES else 2
    suited = [p for p in legal if (p.block_n, p.warpgroups) == (block_n, warpgroups)]
    return next(iter([*suited, *legal]), None)


def _schedule(problem: Problem, warpgroups: int, spec: ArchSpec, *, claims: bool) -> Schedule:
    """The schedule that needs no tuning: claims even out causal tiles, where there are more than SMs."""
    if problem.packed or problem.spanned:
        return "dynamic"  # as lengths differ
    pays = problem.seqlen_k >= LEAST_CLAIMED_KEYS[problem.causal]
    return (
        "dynamic"
        if pays and (problem.causal or claims) and _tiles(problem, warpgroups) > spec.num_sms
        else "static"
    )


def _row_blocks(problem: Problem, warpgroups: int) -> int:
    """Tiles of rows of a head."""
    return -(-problem.seqlen_q // (LEAST_QUERIES * warpgroups))


def _tiles(problem: Problem, warpgroups: int) -> int:
    """Tiles of rows of a launch."""
    return _row_blocks(problem, warpgroups) * problem.heads_q * problem.batch


def _of_tile(
    space: AttentionForwardSm90Space,
    tile: tuple[int, Mainloop, int],
    variations: Iterable[Variation],
) -> Iterator[AttentionForwardSm90Knobs]:
    warpgroups, mainloop, block_n = tile
    for (q_stages, output), stages, (optimistic, ping_pong, schedule) in product(
        space.ends, space.key_stages, variations
    ):
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
