"""Plans of attention's forward of family ``sm90`` that need no tuning: the one whose tiles take the least time.

A tile of rows takes a time of its own and one for each step of keys. Both were fitted to races on an H200, of 100 to
7000 tokens without score modifications, by ``benchmarks.default_races``, which also says what the choice costs over the
fastest kernel; docs/kernel_log.md has how it came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, log2, sqrt
from statistics import fmean, pstdev
from typing import TypeVar

from ...arch.spec import ArchSpec
from ...core.problem import NO_WINDOW, Problem
from ..shared.schedule import tiles_of
from .knobs import WARPGROUP_ROWS, Mainloop, Schedule

T = TypeVar("T")

Costs = tuple[float, float]  # microseconds of a tile of rows beside its steps, and of a step


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Knobs that are chosen together.

    Attributes:
        warpgroups, mainloop, block_n, ping_pong: as the knobs.
        costs: without a causal mask, and with one.
    """

    warpgroups: int
    mainloop: Mainloop
    block_n: int
    ping_pong: bool = False
    costs: tuple[Costs, Costs]


def _plan(
    warpgroups: int, mainloop: Mainloop, block_n: int, *costs: Costs, free: bool = False
) -> Plan:
    plain, causal = costs
    return Plan(
        warpgroups=warpgroups,
        mainloop=mainloop,
        block_n=block_n,
        ping_pong=mainloop == "scores_first" and not free,
        costs=(plain, causal),
    )


PLANS: tuple[tuple[tuple[int, int], tuple[Plan, ...]], ...] = (
    (
        (32, 32),
        (
            _plan(1, "overlap", 64, (0.69, 0.265), (0.63, 0.283)),
            _plan(3, "scores_first", 96, (1.49, 0.830), (1.25, 0.871)),
            _plan(3, "serial", 128, (1.78, 1.142), (1.23, 1.058)),
            _plan(4, "serial", 64, (1.33, 0.758), (0.71, 0.701)),
        ),
    ),
    (
        (64, 64),
        (
            _plan(1, "overlap", 64, (0.94, 0.445), (0.96, 0.461)),
            _plan(1, "overlap", 128, (1.09, 0.761), (1.10, 0.778)),
            _plan(2, "overlap", 64, (1.24, 0.623), (0.93, 0.612)),
            _plan(3, "scores_first", 96, (1.78, 0.968), (1.51, 1.042)),
            _plan(3, "serial", 128, (2.17, 1.218), (1.51, 1.216)),
            _plan(4, "scores_first", 64, (1.88, 0.836), (1.13, 0.840)),
            _plan(4, "serial", 64, (1.54, 0.880), (0.87, 0.840)),
        ),
    ),
    (
        (80, 80),
        (
            _plan(1, "overlap", 64, (1.00, 0.514), (1.14, 0.515)),
            _plan(2, "overlap", 64, (1.75, 0.642), (1.20, 0.665)),
            _plan(3, "scores_first", 96, (2.38, 1.072), (2.00, 1.116)),
        ),
    ),
    (
        (112, 112),  # at 96
        (
            _plan(1, "overlap", 64, (1.14, 0.517), (1.24, 0.516)),
            _plan(2, "overlap", 64, (1.89, 0.654), (1.42, 0.662)),
            _plan(3, "scores_first", 64, (2.04, 0.816), (1.50, 0.800)),
            _plan(3, "scores_first", 96, (2.41, 1.147), (2.09, 1.162)),
        ),
    ),
    (
        (128, 128),
        (
            _plan(1, "overlap", 64, (1.17, 0.583), (1.35, 0.610)),
            _plan(2, "overlap", 64, (1.95, 0.735), (1.59, 0.779)),
            _plan(3, "scores_first", 64, (2.32, 0.971), (1.62, 1.004)),
            _plan(3, "scores_first", 80, (2.54, 1.201), (2.15, 1.236)),
        ),
    ),
    (
        (192, 128),
        (
            _plan(1, "overlap", 64, (1.33, 0.686), (1.63, 0.673)),
            _plan(2, "overlap", 64, (2.19, 0.852), (2.06, 0.860)),
            _plan(3, "scores_first", 64, (2.57, 1.193), (2.09, 1.132)),
        ),
    ),
    (
        (144, 144),
        (
            _plan(1, "overlap", 64, (1.05, 0.661), (1.54, 0.601)),
            _plan(2, "overlap", 64, (2.26, 0.807), (2.33, 0.737)),
            _plan(3, "scores_first", 64, (3.41, 1.116), (2.87, 1.011), free=True),
        ),
    ),
    (
        (160, 160),
        (
            _plan(1, "overlap", 64, (1.08, 0.665), (1.64, 0.615)),
            _plan(2, "overlap", 64, (2.33, 0.843), (2.42, 0.788)),
            _plan(3, "scores_first", 64, (3.15, 1.244), (2.56, 1.134), free=True),
        ),
    ),
    (
        (192, 192),
        (
            _plan(1, "overlap", 64, (1.54, 0.654), (2.07, 0.623)),
            _plan(2, "overlap", 64, (2.82, 0.932), (2.77, 0.906)),
        ),
    ),
    (
        (128, 256),
        (
            _plan(1, "overlap", 64, (2.56, 0.779), (2.82, 0.766)),
            _plan(2, "overlap_flat", 64, (5.23, 1.107), (4.50, 1.150)),
        ),
    ),
    (
        (256, 256),
        (
            _plan(1, "overlap", 64, (2.29, 0.820), (2.68, 0.880)),
            _plan(2, "overlap", 64, (4.79, 1.260), (3.78, 1.356)),
        ),
    ),
)
"""By the padded head dims, of q and k and of v, up to which they hold."""
LAUNCH_US = (3.2, 2.9)
"""Of every launch, so that choices among these plans do not go by it; without a causal mask, and with one."""
CLAIMS_US = 1.5  # of a launch whose CTAs claim tiles: what counts claims is cleared before it
CLAIMED_TAIL = (0.5, 1.0)
"""Tiles of the least steps that the end of claimed ones adds; without a causal mask, and with one."""

FOLLOWED_ROUNDS = 8  # tiles an SM, up to which fixed shares of uneven ones are added up
WORST_SHARE = 2.5
"""Beyond, standard deviations by which the largest share is above the mean one."""
SECTION_BYTES = 32e6  # of K and V, of heads whose uneven tiles are computed together: as the kernel's list has them


def of_head_dims(table: Iterable[tuple[tuple[int, int], T]], problem: Problem, otherwise: T) -> T:
    """The first entry of a table that holds for the head dims of a problem, or another where none does."""
    dims = (problem.padded_dim_qk, problem.padded_dim_v)
    held = (entry for up_to, entry in table if dims[0] <= up_to[0] and dims[1] <= up_to[1])
    return next(held, otherwise)


def plans_of(problem: Problem) -> tuple[Plan, ...]:
    """The plans for the head dims of a problem; none where V is wider than any."""
    return of_head_dims(PLANS, problem, ())


def by_time(
    problem: Problem, plans: Iterable[Plan], spec: ArchSpec
) -> Iterator[tuple[Plan, Schedule]]:
    """Plans and the schedules that suit them, the least time first.

    Args:
        problem: not of packed sequences.
        plans: to choose from.
        spec: gives the number of SMs.
    """
    timed = [
        (time, place, plan, schedule)
        for place, plan in enumerate(plans)
        for schedule, time in times_of(problem, plan, spec.num_sms).items()
    ]
    for _, _, plan, schedule in sorted(timed, key=lambda entry: entry[:2]):
        yield plan, schedule


def times_of(problem: Problem, plan: Plan, sms: int) -> dict[Schedule, float]:
    """The times of a plan by the schedules that suit it, microseconds, but for what every launch takes.

    Args:
        problem: not of packed sequences.
        plan: knobs and costs.
        sms: of the GPU.
    """
    fixed, step = plan.costs[problem.causal]
    rows = WARPGROUP_ROWS * plan.warpgroups
    seen = tiles_of(plain(problem), block=rows, step=plan.block_n, by_queries=True)
    heads = problem.heads_q * problem.batch
    times = [fixed + step * count for count in seen]
    claimed = max(max(times), sum(times) * heads / sms)
    claimed += CLAIMS_US + CLAIMED_TAIL[problem.causal] * min(times)
    if problem.spanned:
        return {"dynamic": claimed}  # as lengths differ
    shared = _largest_share(problem, times, sms)
    few = len(seen) * heads <= sms
    return {"static": shared} if few else {"static": shared, "dynamic": claimed}


def plain(problem: Problem) -> Problem:
    """The problem without windows and documents, of whatever size and number: one kernel serves them all."""
    return replace(problem, modifications=(), window_size=NO_WINDOW, documents=0)


def _largest_share(problem: Problem, times: list[float], sms: int) -> float:
    """The time of the SM with the most to do, of tiles in the order of the list, every one of whose turn it is."""
    heads = problem.heads_q * problem.batch
    tiles = heads * len(times)
    rounds = ceil(tiles / sms)
    if not problem.causal:
        return rounds * max(times)
    if rounds > FOLLOWED_ROUNDS:
        return rounds * fmean(times) + WORST_SHARE * sqrt(rounds) * pstdev(times)
    head_bytes = 2 * problem.seqlen_k * (problem.dim_qk + problem.dim_v)
    together = 2 ** round(log2(max(1.0, SECTION_BYTES / head_bytes)))
    group = problem.heads_q // problem.heads_kv
    section = min(together, problem.batch * problem.heads_kv) * group
    shares = [0.0] * sms
    for tile in range(tiles):
        begun, within = divmod(tile, section * len(times))
        shares[tile % sms] += times[within // min(section, heads - begun * section)]
    return max(shares)
