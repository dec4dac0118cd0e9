"""The candidates of attention's forward of family ``sm90`` that a policy offers, and the ones that need no tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from ...arch.spec import ArchSpec
from ...core.candidate import Rejection
from ...core.problem import NO_WINDOW, Problem
from ..shared.passes import first_legal, points_of
from ..shared.split_kv import reads_caches, rows_of_group, split_counts
from . import masked_space, streams
from .knobs import WARPGROUP_ROWS, AttentionForwardSm90Knobs, Mainloop, Output, Schedule
from .plans import LAUNCH_US, Plan, by_time, plain, plans_of, times_of
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
        (4, "serial", (*FREE, *BY_TURNS)),
        (4, "scores_first", BY_TURNS),
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
    """A row of the default table for problems with score modifications, or of packed sequences.

    Attributes:
        up_to: the padded head dims, of q and k and of v, up to which it holds.
        plan: warpgroups and main loop.
        block_n: key rows of a step, the first legal one.
        ping_pong: as the knob.
        least_keys: tokens of K from which it holds, without and with a causal mask; None: never.
        modifications: it holds for problems with these, or some of them, and no others; None: for all.
        of_masks: it holds for problems with a tensor of masks alone, whose words take registers.
    """

    up_to: tuple[int, int]
    plan: tuple[int, Mainloop]
    block_n: tuple[int, ...]
    ping_pong: bool = False
    least_keys: tuple[int | None, int | None] = (0, 0)
    modifications: frozenset[str] | None = None
    of_masks: bool = False

    def plans(self, raced: Sequence[Plan]) -> Iterator[Plan]:
        """Its plans, one for each step of keys, with the costs of the raced one whose tile is nearest in size."""
        warpgroups, mainloop = self.plan
        nearest = min(raced, key=lambda plan: abs(plan.warpgroups - warpgroups))
        for block_n in self.block_n:
            yield Plan(
                warpgroups=warpgroups,
                mainloop=mainloop,
                block_n=block_n,
                ping_pong=self.ping_pong,
                costs=nearest.costs,
            )

    def holds(self, problem: Problem) -> bool:
        """True for the problems that the row is about."""
        dim_qk, dim_v = self.up_to
        if problem.padded_dim_qk > dim_qk or problem.padded_dim_v > dim_v:
            return False
        if self.of_masks and "attn_mask" not in problem.modifications:
            return False
        least = self.least_keys[problem.causal]
        if least is None or problem.seqlen_k < least:
            return False
        return self.modifications is None or self.modifications >= set(
            problem.compiled_modifications
        )


STREAM_MAINLOOPS: tuple[Mainloop, ...] = ("overlap", "serial")
SPACES: dict[str, AttentionForwardSm90Space] = {}  # by the spec's name; the others have the above
PREFERENCES: tuple[Preference, ...] = (
    Preference(
        up_to=(64, 64), plan=(2, "scores_first"), block_n=(128,), ping_pong=True, of_masks=True
    ),
    Preference(
        up_to=(128, 128), plan=(3, "scores_first"), block_n=(64,), ping_pong=True, of_masks=True
    ),
    Preference(
        up_to=(256, 256), plan=(2, "scores_first"), block_n=(64,), ping_pong=True, of_masks=True
    ),
    Preference(
        up_to=(64, 64),
        plan=(4, "serial"),
        block_n=(64,),
        ping_pong=True,
        modifications=frozenset(("softcap",)),
    ),
    Preference(up_to=(64, 64), plan=(4, "scores_first"), block_n=(64,), ping_pong=True),
    Preference(up_to=(80, 80), plan=(3, "scores_first"), block_n=(96,), ping_pong=True),
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
    Preference(up_to=(128, 128), plan=(3, "scores_first"), block_n=(64,), ping_pong=True),
    Preference(up_to=(192, 128), plan=(3, "scores_first"), block_n=(64, 96), ping_pong=True),
    Preference(up_to=(128, 256), plan=(2, "overlap_flat"), block_n=(64, 80)),
    Preference(up_to=(256, 256), plan=(2, "overlap"), block_n=(64, 96, 128)),
)
"""The default table, measured on an H200; see docs/kernel_log.md."""
CLAIMED_STAGES = 3  # of tiles of two warpgroups that share keys and are claimed
STREAM_BLOCKS = (128, 96, 64)  # keys of a step where they stream past few queries


def points(problem: Problem, spec: ArchSpec) -> Iterator[AttentionForwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    if problem.score == "masked":
        yield from masked_space.points(problem, spec)
        return
    space = SPACES.get(spec.name, AttentionForwardSm90Space())
    if problem.seqlen_q >= streams.LEAST_QUERIES or problem.packed:
        for warpgroups, mainloop, variations in space.plans:
            for block_n in space.block_n:
                points = _of_tile(space, (warpgroups, mainloop, block_n), variations)
                yield from points_of(problem, spec, points, passes_of, PRUNING_PREDICATES)
    if streams.may_share(problem, spec):
        yield from _streaming(problem, spec)


def default(problem: Problem, spec: ArchSpec) -> AttentionForwardSm90Knobs | None:
    """The plan whose tiles take the least time, of those that are legal.

    Where tiles are few that may be one whose CTAs share their keys; with fewer queries than a warpgroup has rows it is.
    """
    if problem.score == "masked":
        return masked_space.default(problem, spec)
    space = SPACES.get(spec.name, AttentionForwardSm90Space())
    if (of_caches := _of_caches(problem, spec)) is not None:
        return of_caches
    shared_us, shared = _fastest_stream(problem, spec)
    if shared is not None and problem.seqlen_q < streams.LEAST_QUERIES:
        return shared
    modified = problem.compiled_modifications
    plans = _modified(problem, spec) if modified else by_time(problem, plans_of(problem), spec)
    for plan, schedule in plans:
        tile = (plan.warpgroups, plan.mainloop, plan.block_n)
        points = _of_tile(space, tile, ((True, plan.ping_pong, schedule),))
        knobs = first_legal(problem, spec, points, passes_of, PRUNING_PREDICATES)
        if knobs is None:
            continue
        if shared is None:
            return knobs
        us = times_of(problem, plan, spec.num_sms)[schedule] + LAUNCH_US[problem.causal]
        return shared if streams.MARGIN[shared.schedule] * shared_us < us else knobs
    return shared


def _modified(problem: Problem, spec: ArchSpec) -> Iterator[tuple[Plan, Schedule]]:
    """Plans with score modifications: the first row's, or ones of fewer warpgroups that take less time, then the rest.

    Steps take longer with modifications, and as much for all plans. Of packed sequences lengths are not known.
    """
    plans = [
        plan for row in PREFERENCES if row.holds(problem) for plan in row.plans(plans_of(problem))
    ]
    if problem.packed:
        yield from ((plan, "dynamic") for plan in plans)
        return
    if not plans:  # V is wider than any row takes
        return
    first, *rest = plans
    fewer: dict[int, Plan] = {}
    for plan in plans_of(problem):
        if plan.warpgroups < first.warpgroups and plan.mainloop != "serial":
            fewer.setdefault(plan.warpgroups, plan)
    for plan, schedule in by_time(problem, [first, *fewer.values()], spec):
        yield plan, schedule
        if plan is first:
            break
    yield from by_time(problem, rest, spec)


def _streaming(problem: Problem, spec: ArchSpec) -> Iterator[AttentionForwardSm90Knobs | Rejection]:
    """Few queries, whose time is that of reading K and V, or few tiles: keys split among CTAs."""
    for point in points_of(problem, spec, _unsplit(problem), passes_of, PRUNING_PREDICATES):
        if isinstance(point, Rejection):
            yield point
            continue
        if problem.packed:
            counts = streams.packed_split_counts(problem, point, spec)
        else:
            counts = split_counts(problem, point, spec.num_sms)
        if not problem.packed and streams.plan_of(point, problem) is not None:
            counts.insert(0, streams.timed(problem, point, spec)[1])
        for splits in dict.fromkeys(counts):
            yield replace(point, splits=splits)


def _unsplit(problem: Problem) -> Iterator[AttentionForwardSm90Knobs]:
    """Points whose keys may be split: of one or two warpgroups, the most stages first, and tall tiles for many rows."""
    rows = rows_of_group(problem)
    stages = range(DEEPEST_STAGES, SHALLOW_STAGES - 1, -1)
    few = (1, 2) if rows > WARPGROUP_ROWS else (1,)
    schedules: tuple[Schedule, ...] = ("static",)
    if problem.packed:
        schedules = ("dynamic", "grid")
    points: list[tuple[int, int, Mainloop, int, bool, Schedule]] = [
        (*point, False, schedule)
        for schedule in schedules
        for point in product(few, STREAM_BLOCKS, STREAM_MAINLOOPS, stages)
    ]
    if not problem.packed and streams.may_claim(problem):
        schedules = ("static", "dynamic")
        points += [
            (plan.warpgroups, plan.block_n, plan.mainloop, CLAIMED_STAGES, False, "dynamic")
            for plan in streams.plans_of(problem)
            if plan.key_stages is None and plan.warpgroups > 1 and rows > WARPGROUP_ROWS
        ]
    points += [
        (plan.warpgroups, plan.block_n, plan.mainloop, plan.key_stages, plan.ping_pong, schedule)
        for plan, schedule in product(streams.plans_of(problem), schedules)
        if plan.key_stages is not None and rows > (plan.warpgroups - 1) * WARPGROUP_ROWS
    ]
    for warpgroups, block_n, mainloop, key_stages, ping_pong, schedule in points:
        yield AttentionForwardSm90Knobs(
            warpgroups=warpgroups,
            block_n=block_n,
            mainloop=mainloop,
            ping_pong=ping_pong,
            q_stages=1,
            k_stages=key_stages,
            v_stages=key_stages,
            output="direct",
            schedule=schedule,
            pack_gqa=problem.heads_q > problem.heads_kv,
            split_kv=True,
        )


def _of_caches(problem: Problem, spec: ArchSpec) -> AttentionForwardSm90Knobs | None:
    """The kernel of tokens with caches, whatever their lengths; None where queries are more, or keys few."""
    if not reads_caches(problem):
        return None
    plans = streams.plans_of(problem)
    offered = (x for plan in plans for x in _unsplit(problem) if plan.is_of(x))
    knobs = first_legal(problem, spec, offered, passes_of, PRUNING_PREDICATES)
    return knobs and replace(knobs, splits=streams.most_parts(problem, knobs, spec))


def _fastest_stream(
    problem: Problem, spec: ArchSpec
) -> tuple[float, AttentionForwardSm90Knobs | None]:
    """The time and knobs of the plan of shared keys that takes the least; none where there is none to choose.

    By all keys: a window or a prefix builds no other kernel, but has splits of its own.
    """
    may_share = streams.may_share(problem, spec) and not problem.packed
    if not (may_share and streams.fit_the_sms(problem, spec)):
        return inf, None

    def first_of(points: Iterable[AttentionForwardSm90Knobs]) -> AttentionForwardSm90Knobs | None:
        return first_legal(problem, spec, points, passes_of, PRUNING_PREDICATES)

    timed: dict[AttentionForwardSm90Knobs, tuple[float, int]] = {}
    offered = [*_unsplit(problem)]
    for plan, schedule in product(streams.plans_of(problem), ("static", "dynamic")):
        first = first_of(p for p in offered if plan.is_of(p) and p.schedule == schedule)
        if first is not None:
            timed[first] = streams.timed(plain(problem), first, spec)
    if not timed:
        return inf, first_of(offered)
    knobs = min(timed, key=lambda point: timed[point][0])
    us, splits = timed[knobs]
    if problem.window_size != NO_WINDOW:
        splits = streams.timed(problem, knobs, spec)[1]
    return us, replace(knobs, splits=splits)


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
