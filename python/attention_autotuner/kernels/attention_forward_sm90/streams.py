"""Plans of attention's forward of family ``sm90`` whose CTAs share the keys of a tile of rows, and in how many splits.

They suit tiles of rows that are fewer than the SMs: a few queries, or a chunk of a prompt of few heads. Their times
were fitted to races on an H200, of 16 to 4096 queries on 512 to 128k keys; ``benchmarks.default_races`` says what the
choice costs over the fastest kernel, docs/kernel_log.md how it came about.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf
from statistics import fmean

from ...arch.spec import ArchSpec
from ...core.problem import NO_WINDOW, Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared.schedule import makespan, tiles_of
from ..shared.split_kv import HBM_SHARE, most_splits, packed_heads, queries_are_few
from .knobs import WARPGROUP_ROWS, AttentionForwardSm90Knobs
from .plans import Costs, of_head_dims, plain

LEAST_QUERIES = WARPGROUP_ROWS  # with fewer, most MMAs of a warpgroup are wasted
WIDE_DIM = 96  # above, a step of fewer keys leaves more stages
BLOCKS = {False: 128, True: 64}  # keys of a step, by whether head dims are wide
COSTS: tuple[tuple[tuple[int, int], dict[int, Costs]], ...] = (
    ((32, 32), {1: (0.0, 0.674), 2: (0.33, 1.066)}),
    ((64, 64), {1: (0.63, 0.747), 2: (0.20, 1.331)}),
    ((80, 80), {1: (0.65, 0.896), 2: (1.24, 1.389)}),
    ((96, 96), {1: (0.70, 0.856), 2: (0.56, 1.548)}),
    ((112, 112), {1: (0.0, 0.544), 2: (1.31, 0.702)}),
    ((128, 128), {1: (0.0, 0.542), 2: (0.13, 0.805)}),
    ((192, 128), {1: (0.0, 0.662), 2: (0.33, 0.916)}),
    ((128, 256), {1: (0.0, 0.619), 2: (0.80, 0.899)}),
    ((256, 256), {1: (0.64, 0.760), 2: (1.22, 1.227)}),
)
"""By the padded head dims, of q and k and of v, up to which they hold, and by warpgroups."""
MARGIN = 1.05  # by which they are to be faster than plans that share nothing
LAUNCH_US = 3.9
MOST_ROUNDS = 4  # of tiles on the SMs, beyond which more splits only cost
EVEN = 0.8  # of the steps of the longest tile, which all tiles have where order is no matter
FILL_US = 0.7  # until keys arrive, where their bytes are all the time
SHARPNESS = 3.8  # of the greater of steps and bytes: infinite for steps that never wait
COMBINE_US = 1.1  # of the second kernel, that starts while the first one runs
COMBINE_US_PER_BYTE = 0.51e-6  # of results of splits, written and read
COMBINE_US_PER_SPLIT = 0.028


def may_share(problem: Problem, spec: ArchSpec) -> bool:
    """True where queries are few, or tiles of rows no more than the SMs: CTAs may share keys.

    Not of packed sequences; nor of many queries with documents or a prefix, which may leave too few keys to be shared.
    """
    if problem.packed:
        return False
    if queries_are_few(problem, LEAST_QUERIES):
        return True
    return not problem.spanned and fit_the_sms(problem, spec)


def fit_the_sms(problem: Problem, spec: ArchSpec) -> bool:
    """True where tiles of rows are no more than the SMs, or do not fill one: the times below were raced there."""
    tiles = -(-problem.seqlen_q // (2 * WARPGROUP_ROWS)) * problem.heads_q * problem.batch
    return problem.seqlen_q < LEAST_QUERIES or tiles <= spec.num_sms


def suits(knobs: AttentionForwardSm90Knobs, problem: Problem) -> bool:
    """True for the knobs of which :func:`timed` knows a time."""
    block = BLOCKS[problem.widest_dim > WIDE_DIM]
    return knobs.block_n == block and knobs.mainloop == "overlap"


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

    Arguments are those of :func:`timed`, but for documents and a prefix, which have to be left out.
    """
    fixed, step = of_head_dims(COSTS, problem, COSTS[-1][1])[knobs.warpgroups]
    heads = packed_heads(problem, knobs)
    queries = knobs.block_m // heads
    steps = tiles_of(problem, block=queries, step=knobs.block_n, by_queries=True)
    heads = problem.heads_q // heads * problem.batch
    streamed_us = FILL_US + _streamed_us(problem, max(steps) * knobs.block_n, spec)
    results = FP32_BYTES * problem.batch * problem.heads_q * problem.seqlen_q * problem.padded_dim_v
    whole_tiles = problem.seqlen_q >= LEAST_QUERIES and problem.window_size == NO_WINDOW
    fewest = 2 if whole_tiles else 1
    for splits in range(fewest, most_splits(problem, knobs) + 1):
        if splits > fewest and len(steps) * heads * splits > MOST_ROUNDS * spec.num_sms:
            break
        tiles, shared = _largest_share(steps, heads, splits, spec.num_sms)
        stepped_us = tiles * fixed + shared * step
        us = LAUNCH_US + (stepped_us**SHARPNESS + streamed_us**SHARPNESS) ** (1 / SHARPNESS)
        if splits > 1:
            us += COMBINE_US + splits * (COMBINE_US_PER_SPLIT + COMBINE_US_PER_BYTE * results)
        yield us, splits


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


def _streamed_us(problem: Problem, keys: int, spec: ArchSpec) -> float:
    """The time of reading so many keys of every head, and all queries."""
    of_keys = problem.heads_kv * min(keys, problem.seqlen_k) * (problem.dim_qk + problem.dim_v)
    of_queries = problem.heads_q * problem.seqlen_q * problem.dim_qk
    moved = ELEMENT_BYTES * problem.batch * (of_keys + of_queries)
    return moved / (HBM_SHARE * spec.hbm_bytes_per_second) * 1e6
