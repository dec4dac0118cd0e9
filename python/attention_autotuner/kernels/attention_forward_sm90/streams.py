"""Plans of attention's forward of family ``sm90`` whose CTAs share the keys of a tile of rows, and in how many splits.

They suit tiles of rows that are fewer than the SMs: a few queries, or a chunk of a prompt of few heads. Their times
were fitted to races on an H200, of 16 to 4096 queries on 512 to 128k keys, those of three and four warpgroups of 64
queries and more; ``benchmarks.default_races`` says what the choice costs over the fastest kernel, docs/kernel_log.md
how it came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, inf, log2
from statistics import fmean

from ...arch.spec import ArchSpec
from ...core.modifications import COMPILED
from ...core.problem import NO_WINDOW, Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared.schedule import makespan, tiles_of
from ..shared.split_kv import (
    HBM_SHARE,
    most_splits,
    packed_heads,
    queries_are_few,
    reads_caches,
    rows_of_group,
    split_rows,
    tiles_of_queries,
)
from .knobs import WARPGROUP_ROWS, AttentionForwardSm90Knobs, Mainloop
from .plans import Costs, of_head_dims, plain
from .resources import ctas_of_head


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """Knobs that are chosen together.

    Attributes:
        warpgroups, mainloop, block_n: as the knobs.
        ping_pong: as the knob.
        key_stages: of K, and of V; None: as many as keep memory busy.
        costs: microseconds of a tile of rows beside its steps, and of a step.
        spills_with: modifications for which its registers do not suffice.
    """

    warpgroups: int
    mainloop: Mainloop
    block_n: int
    ping_pong: bool = False
    key_stages: int | None = None
    costs: Costs
    spills_with: frozenset[str] = frozenset()

    def is_of(self, knobs: AttentionForwardSm90Knobs) -> bool:
        """True for the knobs of this plan, with whatever stages and splits."""
        return (
            self.warpgroups == knobs.warpgroups
            and self.block_n == knobs.block_n
            and self.mainloop == knobs.mainloop
            and self.ping_pong == knobs.ping_pong
        )


def _plans(block_n: int, single: Costs, double: Costs, *tall: StreamPlan) -> tuple[StreamPlan, ...]:
    return (
        StreamPlan(warpgroups=1, mainloop="overlap", block_n=block_n, costs=single),
        StreamPlan(warpgroups=2, mainloop="overlap", block_n=block_n, costs=double),
        *tall,
    )


def _tall(
    warpgroups: int,
    mainloop: Mainloop,
    block_n: int,
    key_stages: int,
    costs: Costs,
    *,
    free: bool = False,
    spills_with: Iterable[str] = (),
) -> StreamPlan:
    return StreamPlan(
        warpgroups=warpgroups,
        mainloop=mainloop,
        block_n=block_n,
        ping_pong=mainloop == "scores_first" and not free,
        key_stages=key_stages,
        costs=costs,
        spills_with=frozenset(spills_with),
    )


LEAST_QUERIES = WARPGROUP_ROWS  # with fewer, most MMAs of a warpgroup are wasted
PLANS: tuple[tuple[tuple[int, int], tuple[StreamPlan, ...]], ...] = (
    (
        (32, 32),
        _plans(128, (0.0, 0.674), (0.33, 1.066), _tall(4, "serial", 64, 6, (3.19, 0.726))),
    ),
    (
        (64, 64),
        _plans(
            128,
            (0.63, 0.747),
            (0.20, 1.331),
            _tall(3, "scores_first", 96, 4, (0.76, 0.966)),
            _tall(4, "scores_first", 64, 4, (0.75, 0.852)),
        ),
    ),
    (
        (80, 80),
        _plans(
            128,
            (0.65, 0.896),
            (1.24, 1.389),
            _tall(3, "scores_first", 96, 3, (2.08, 1.057), spills_with=("attn_mask",)),
        ),
    ),
    (
        (96, 96),
        _plans(
            128,
            (0.70, 0.856),
            (0.56, 1.548),
            _tall(3, "scores_first", 96, 3, (1.57, 1.137), spills_with=("attn_mask",)),
        ),
    ),
    (
        (112, 112),
        _plans(64, (0.0, 0.544), (1.31, 0.702), _tall(3, "scores_first", 64, 3, (1.65, 0.834))),
    ),
    (
        (128, 128),
        _plans(64, (0.0, 0.542), (0.13, 0.805), _tall(3, "scores_first", 64, 3, (0.0, 0.942))),
    ),
    (
        (192, 128),
        _plans(64, (0.0, 0.662), (0.33, 0.916), _tall(3, "scores_first", 64, 2, (0.93, 1.158))),
    ),
    (
        (160, 160),  # one warpgroup: between those of 128 and of 192/128
        _plans(
            64,
            (0.3, 0.645),
            (0.92, 0.843),
            _tall(3, "scores_first", 64, 2, (1.65, 1.181), free=True, spills_with=COMPILED),
        ),
    ),
    ((128, 256), _plans(64, (0.0, 0.619), (0.80, 0.899))),
    ((256, 256), _plans(64, (0.64, 0.760), (1.22, 1.227))),
)
"""By the padded head dims, of q and k and of v, up to which they hold."""
MOST_UNEVEN = 2  # keys over queries, beyond which causal tiles of rows are of about the same length
MARGIN = {"static": 1.05, "dynamic": 1.15}
"""By which they are to be faster than plans that share nothing, which take 0.79 to 0.98 of their times by formula in
lists of so few uneven tiles."""
MOST_PART_BYTES = 64e6  # of the results of all parts of packed sequences
LAUNCH_US = 3.9
MOST_ROUNDS = 4  # of tiles on the SMs, beyond which more splits only cost
EVEN = 0.8  # of the steps of the longest tile, which all tiles have where order is no matter
CLAIM_US = 1.0  # of a tile that a CTA claims
UNITS_PER_US = 1000  # of costs, which are whole numbers
FILL_US = 0.7  # until keys arrive, where their bytes are all the time
SHARPNESS = 3.8  # of the greater of steps and bytes: infinite for steps that never wait
COMBINE_US = 1.1  # of the second kernel, that starts while the first one runs
COMBINE_US_PER_BYTE = 0.51e-6  # of results of splits, written and read
COMBINE_US_PER_SPLIT = 0.028


def may_share(problem: Problem, spec: ArchSpec) -> bool:
    """True where queries are few, or tiles of rows no more than the SMs: CTAs may share keys.

    Not of many queries with documents or a prefix, which may leave too few keys to be shared; of packed sequences where
    the longest has few queries, or most have and many keys.
    """
    if problem.packed:
        return problem.seqlen_q <= LEAST_QUERIES or reads_caches(problem)
    if queries_are_few(problem, LEAST_QUERIES):
        return True
    return not problem.spanned and fit_the_sms(problem, spec)


def fit_the_sms(problem: Problem, spec: ArchSpec) -> bool:
    """True where tiles of rows are no more than the SMs, or do not fill one: the times below were raced there."""
    tiles = tiles_of_queries(problem, 2 * WARPGROUP_ROWS)
    return problem.seqlen_q < LEAST_QUERIES or tiles <= spec.num_sms


def plans_of(problem: Problem) -> tuple[StreamPlan, ...]:
    """The plans for the head dims and the modifications of a problem."""
    modified = set(problem.compiled_modifications)
    plans = (plan for plan in of_head_dims(PLANS, problem, ()) if not plan.spills_with & modified)
    if not problem.packed:
        return tuple(plans)
    # One kernel, whatever the batch is made of.
    warpgroups = 1 if rows_of_group(problem) <= WARPGROUP_ROWS else 2
    return tuple(plan for plan in plans if plan.warpgroups == warpgroups)


def may_claim(problem: Problem) -> bool:
    """True where tiles of rows have unlike numbers of steps, so that CTAs which claim them may end sooner.

    On an H200, causal, 85 us against 97 at 1 x 1 x 16384, d64, 43 against 48 at 1 x 1 x 8192, d128, 26 against 30 at
    1 x 3 x 3000.
    """
    bounded = problem.window_size != NO_WINDOW or problem.spanned
    # Beside claims a mask tensor spills registers.
    if bounded or "attn_mask" in problem.compiled_modifications:
        return False
    return problem.causal and problem.seqlen_k <= MOST_UNEVEN * problem.seqlen_q


def plan_of(knobs: AttentionForwardSm90Knobs, problem: Problem) -> StreamPlan | None:
    """The plan of some knobs, of which :func:`timed` knows a time; None where there is none."""
    return next((plan for plan in plans_of(problem) if plan.is_of(knobs)), None)


def timed(problem: Problem, knobs: AttentionForwardSm90Knobs, spec: ArchSpec) -> tuple[float, int]:
    """The least time of a kernel, microseconds, and the splits that take it; infinite where none are offered.

    Tiles of rows take a single split in a window alone, whose kernel may share keys of wider ones: kernels that do not
    were 1.06 to 1.19 times as fast.

    Args:
        problem: not of packed sequences; documents and a prefix do not count.
        knobs: of any number of splits.
        spec: gives the number of SMs and the bandwidth.
    """
    counted = plain(problem) if problem.spanned else problem
    return min(times_of(counted, knobs, spec), default=(inf, 1))


def times_of(
    problem: Problem, knobs: AttentionForwardSm90Knobs, spec: ArchSpec
) -> Iterator[tuple[float, int]]:
    """The times of a kernel with the splits that it may be offered, microseconds, each with how many these are.

    None without a plan, nor of claims that cannot take the least. Arguments are those of :func:`timed`, but for
    documents and a prefix, which have to be left out.
    """
    plan = plan_of(knobs, problem)
    if plan is None:
        return
    fixed, step = plan.costs
    heads = packed_heads(problem, knobs)
    queries = knobs.block_m // heads
    steps = tiles_of(problem, block=queries, step=knobs.block_n, by_queries=True)
    heads = problem.heads_q // heads * problem.batch
    streamed_us = FILL_US + _streamed_us(problem, max(steps) * knobs.block_n, spec)
    results = FP32_BYTES * problem.batch * problem.heads_q * problem.seqlen_q * problem.padded_dim_v
    whole_tiles = problem.seqlen_q >= LEAST_QUERIES and problem.window_size == NO_WINDOW
    fewest, least_us = (2 if whole_tiles else 1), inf
    for splits in range(fewest, most_splits(problem, knobs) + 1):
        every = len(steps) * heads * splits
        if splits > fewest and every > MOST_ROUNDS * spec.num_sms:
            break
        beside = LAUNCH_US
        if splits > 1:
            beside += COMBINE_US + splits * (COMBINE_US_PER_SPLIT + COMBINE_US_PER_BYTE * results)
        if knobs.schedule == "dynamic":
            if every <= spec.num_sms:  # nothing to claim
                continue
            costs = [fixed + CLAIM_US + step * ceil(count / splits) for count in steps]
            if beside + sum(costs) * heads * splits / spec.num_sms > least_us:
                continue  # were all SMs busy to the end
            stepped_us = _claimed_us(costs, heads, splits, spec.num_sms)
        else:
            tiles, shared = _largest_share(steps, heads, splits, spec.num_sms)
            stepped_us = tiles * fixed + shared * step
        us = beside + (stepped_us**SHARPNESS + streamed_us**SHARPNESS) ** (1 / SHARPNESS)
        least_us = min(least_us, us)
        yield us, splits


def most_parts(problem: Problem, knobs: AttentionForwardSm90Knobs, spec: ArchSpec) -> int:
    """The most parts of a block of packed queries by default: enough for one long sequence to keep all CTAs busy.

    How many there are is decided where the lengths are known, on the device; more cost nothing but their memory.
    """
    results = FP32_BYTES * split_rows(problem) * problem.padded_dim_v
    filling = 1 << ceil(log2(max(1.0, ctas_of_head(problem, knobs, spec))))
    return max(1, min(most_splits(problem, knobs), filling, int(MOST_PART_BYTES / results)))


def packed_split_counts(
    problem: Problem, knobs: AttentionForwardSm90Knobs, spec: ArchSpec
) -> list[int]:
    """The most parts of a block of packed queries worth trying, the default first; none, a few, or as many again."""
    chosen = most_parts(problem, knobs, spec)
    most = most_splits(problem, knobs)
    return list(dict.fromkeys([chosen, 1, min(4, most), min(2 * chosen, most)]))


def _largest_share(steps: tuple[int, ...], heads: int, splits: int, sms: int) -> tuple[int, float]:
    """Tiles and steps of the SM with the most to do, of tiles in the order of the kernel's list, split by split.

    Args:
        steps: of each block of queries, all of whose heads are side by side.
        heads: tiles of a block.
        splits: that share the steps of a tile.
        sms: that take tiles in turn.
    """
    rounds = ceil(len(steps) * heads * splits / sms)
    if rounds > 1 and min(steps) > EVEN * max(steps):
        return rounds, rounds * ceil(fmean(steps) / splits)
    largest = makespan(
        tuple(ceil(count / splits) for count in steps),
        heads=splits,  # as often as the list of blocks repeats
        value_slices=heads,
        longest_first=False,
        persistent=True,
        slots=sms,
    )
    return rounds, largest


def _claimed_us(costs: Iterable[float], heads: int, splits: int, sms: int) -> float:
    """The time of tiles that SMs claim, of the costs of each block: the longest first, split by split."""
    whole = sorted((round(cost * UNITS_PER_US) for cost in costs), reverse=True)
    ends = makespan(
        tuple(whole),
        heads=splits,
        value_slices=heads,
        longest_first=False,
        persistent=False,
        slots=sms,
    )
    return ends / UNITS_PER_US


def _streamed_us(problem: Problem, keys: int, spec: ArchSpec) -> float:
    """The time of reading so many keys of every head, and all queries."""
    of_keys = problem.heads_kv * min(keys, problem.seqlen_k) * (problem.dim_qk + problem.dim_v)
    of_queries = problem.heads_q * problem.seqlen_q * problem.dim_qk
    moved = ELEMENT_BYTES * problem.batch * (of_keys + of_queries)
    return moved / (HBM_SHARE * spec.hbm_bytes_per_second) * 1e6
