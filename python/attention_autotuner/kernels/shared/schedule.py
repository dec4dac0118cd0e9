"""The time of the grid: the scheduler's list of tiles, simulated over the slots of the GPU.

Costs are in arbitrary units (the cost model uses sixteenths of one K/V tile). The order of the list is that of
``templates/include/attention_autotuner/common/scheduler.cuh``: value slices of a row block are neighbours, causal row
blocks go longest first, ``longest_first`` takes all heads for one row block and ``raster`` all row blocks of one
head. Where heads of a batch share a mask, the batches of a block follow its value slices: to this list they are slices
as well.

Ordinary grids are dispatched greedily (a free slot takes the next tile); persistent ones statically (slot i takes tiles
i, i + slots, ...). Both are exact, except that a greedy ``raster`` list longer than :data:`EXACT_TILES` has whole
heads taken off its front at the average rate: by then the slots are evenly loaded.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

from ...core import spans
from ...core.problem import NO_WINDOW, Problem

EXACT_TILES = 2048  # tiles that a greedy raster list simulates one by one
EXACT_WAVES = 4  # and at least this many per slot


@lru_cache(maxsize=1024)
def tiles_of(problem: Problem, *, block: int, step: int, by_queries: bool) -> tuple[int, ...]:
    """Tiles of the other side that each block of a problem's queries, or of its keys, visits, in the list's order.

    Args:
        problem: gives the lengths, the causal mask and the window; those of documents and of a prefix are typical ones.
        block: queries of a block, or keys.
        step: keys of a tile, or queries of one head.
        by_queries: which of the two.

    Returns:
        One count per block, of packed sequences one after the other; the longest first when causal. A block of queries
        that see no key, or of keys that no query sees, counts 0.
    """
    if problem.spanned:
        return _tiles_in_spans(problem, block, step, by_queries)
    counts: tuple[int, ...] = ()
    for rows, keys in problem.lengths:
        counts += _tiles_of_sequence(problem, rows, keys, block, step, by_queries)
    return counts


def _tiles_of_sequence(
    problem: Problem, rows: int, keys: int, block: int, step: int, by_queries: bool
) -> tuple[int, ...]:
    offset = problem.offset_of(rows, keys)
    length, other = (rows, keys) if by_queries else (keys, rows)
    tiles, starts = -(-other // step), range(0, length, block)
    if problem.window_size != NO_WINDOW:
        return _tiles_in_window(problem, rows, keys, block, step, by_queries)
    if not problem.causal:
        return (tiles,) * len(starts)
    if not by_queries:
        return tuple(max(0, tiles - max(0, key - offset) // step) for key in starts)
    seen = (min(start + block, rows) + offset for start in reversed(starts))
    return tuple(-(-max(0, min(keys, count)) // step) for count in seen)


def _tiles_in_window(
    problem: Problem, rows: int, keys: int, block: int, step: int, by_queries: bool
) -> tuple[int, ...]:
    left, right = problem.window
    offset, length, other = problem.offset_of(rows, keys), rows, keys
    if not by_queries:  # seen from the keys, the window is the other way round
        left, right, offset, length, other = right, left, -offset, other, length
    counts = []
    for start in range(0, length, block):
        last = min(start + block, length) - 1
        begin = max(start + offset - left, 0)
        end = min(last + offset + right + 1, other)
        counts.append(-(-end // step) - begin // step if begin < end else 0)
    return tuple(reversed(counts)) if by_queries and problem.causal else tuple(counts)


def _tiles_in_spans(problem: Problem, block: int, step: int, by_queries: bool) -> tuple[int, ...]:
    ends = spans.document_ends(problem)
    length = problem.seqlen_q if by_queries else problem.seqlen_k
    span_of = spans.span_of_query if by_queries else spans.span_of_key
    counts = []
    for start in range(0, length, block):
        last = min(start + block, length) - 1
        begin, end = span_of(problem, start, ends)[0], span_of(problem, last, ends)[1]
        counts.append(-(-end // step) - begin // step if begin < end else 0)
    return tuple(reversed(counts)) if by_queries and problem.causal else tuple(counts)


@lru_cache(maxsize=8192)
def makespan(
    row_costs: tuple[int, ...],
    *,
    heads: int,
    value_slices: int,
    longest_first: bool,
    persistent: bool,
    slots: int,
    tail_heads: int = 0,
) -> int | float:
    """Time until the last slot is done.

    Args:
        row_costs: cost of one tile of each row block, in list order.
        heads: heads times batch: how many times the row blocks repeat.
        value_slices: neighbours in the list that share one row block.
        longest_first: the order of the list.
        persistent: static striding instead of greedy dispatch.
        slots: resident CTAs of the whole GPU.
        tail_heads: heads at the end of a greedy raster list whose row blocks are side by side.

    Returns:
        The makespan in units of ``row_costs``.
    """
    tiles = len(row_costs) * heads * value_slices
    if min(row_costs) == max(row_costs):
        return row_costs[0] * -(-tiles // slots)
    if persistent and longest_first:
        return _static(row_costs, heads * value_slices, 1, slots)
    if persistent:
        return _static(row_costs, value_slices, heads, slots)
    if longest_first:
        return _greedy_groups(row_costs, heads * value_slices, slots)
    return _greedy_rows(row_costs, heads, value_slices, slots, tail_heads)


def _greedy_groups(row_costs: tuple[int, ...], repeats: int, slots: int) -> int:
    """Greedy dispatch of groups of equal tiles; slots that are free at the same time move together."""
    free = [(0, slots)]  # (time, how many slots)
    latest = 0
    for cost in row_costs:
        left = repeats
        while left:
            time, count = heapq.heappop(free)
            while free and free[0][0] == time:
                count += heapq.heappop(free)[1]
            taken = min(count, left)
            left -= taken
            heapq.heappush(free, (time + cost, taken))
            latest = max(latest, time + cost)
            if count > taken:
                heapq.heappush(free, (time, count - taken))
    return latest


def _greedy_rows(
    row_costs: tuple[int, ...], heads: int, value_slices: int, slots: int, tail_heads: int
) -> int | float:
    """Greedy dispatch, head after head; long lists lose whole heads at the average rate."""
    per_head = len(row_costs) * value_slices
    kept = -(-max(EXACT_TILES, EXACT_WAVES * slots) // per_head)
    skipped = max(0, heads - kept)
    tail_heads = min(tail_heads, kept, heads)
    sections = [1] * (heads - skipped - tail_heads) + [tail_heads] * (tail_heads > 0)
    free = [0] * slots
    latest = 0
    for together in sections:
        for cost in row_costs:
            for _ in range(value_slices * together):
                done = free[0] + cost
                heapq.heapreplace(free, done)
                if done > latest:
                    latest = done
    if not skipped:
        return latest
    return latest + skipped * value_slices * sum(row_costs) / slots


def _static(row_costs: tuple[int, ...], neighbours: int, repeats: int, slots: int) -> int:
    """Static striding over a list in which each cost stands for some neighbours, and which repeats."""
    import numpy as np  # most commands rank nothing

    costs = np.tile(np.repeat(row_costs, neighbours), repeats)
    rounds = np.pad(costs, (0, -len(costs) % slots)).reshape(-1, slots)
    return int(rounds.sum(axis=0).max())
