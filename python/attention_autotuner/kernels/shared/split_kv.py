"""Few queries on long keys, whose time is that of reading them: heads of a group as rows of a tile, keys split.

Kernels of both families have the knobs ``pack_gqa``, ``split_kv`` and ``splits``, the last a launch knob; their headers
share ``common/split_combine.cuh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Protocol

from ...arch.spec import ArchSpec
from ...core.problem import Problem
from ...core.sizes import FP32_BYTES

HBM_SHARE = 0.9  # of the peak, that a copy reaches and keys that stream do
MOST_SPLIT_ROWS = 2**31  # of all heads; more are never split
MOST_PACKED_ROWS = 256  # of a group: with more, keys are read too often for their bytes to count
LEAST_SPLIT = 2  # tiles of keys of a split
MOST_SPLITS = 128
PART_KEYS = 128  # that the begin and the end of a part take the time of
PART_ROUNDS = 8  # of the CTAs that take parts, at most
CACHED_KEYS = 4  # over queries, of packed sequences that read caches
MEAN_QUERIES = 64  # of these, at most
LONG_KEYS = 8  # over queries, from where on splitting keys pays for a second kernel
FULL_WAVES = 0.95  # of the best share of busy slots, which a split count may miss


class SplitKnobs(Protocol):
    """The knobs of a kernel that packs heads and splits keys."""

    @property
    def block_m(self) -> int:
        """Rows of a tile."""

    @property
    def block_n(self) -> int:
        """Keys of a step."""

    @property
    def pack_gqa(self) -> bool:
        """True where rows are pairs of a query and a head, of the heads that share one of K and V."""

    @property
    def split_kv(self) -> bool:
        """True where CTAs may share the keys of a tile of rows, whose results a second kernel combines."""

    @property
    def splits(self) -> int:
        """CTAs that do, at most one for each tile of keys."""


def check_splits(knobs: SplitKnobs) -> None:
    """Raise a ValueError where knobs have no split, or more than one without ``split_kv``."""
    if knobs.splits < 1 or (knobs.splits > 1 and not knobs.split_kv):
        raise ValueError(f"splits must be 1, or more with split_kv, got {knobs.splits}")


def split_words(knobs: SplitKnobs) -> list[str]:
    """The parts of a candidate's name that say so."""
    return [
        *(["packed"] if knobs.pack_gqa else []),
        *([f"split{knobs.splits}"] if knobs.split_kv else []),
    ]


def packed_heads(problem: Problem, knobs: SplitKnobs) -> int:
    """Heads of a group that a tile packs: as many as divide the group, and its rows hold."""
    group = problem.heads_q // problem.heads_kv
    fitting = (n for n in range(min(group, knobs.block_m), 0, -1) if group % n == 0)
    return next(fitting) if knobs.pack_gqa else 1


def row_tiles(problem: Problem, knobs: SplitKnobs) -> int:
    """Tiles of rows of a launch, each of which splits share."""
    heads = packed_heads(problem, knobs)
    return tiles_of_queries(problem, knobs.block_m // heads, heads)


def tiles_of_queries(problem: Problem, block: int, heads: int = 1) -> int:
    """Tiles of ``block`` queries of so many heads each, of sequences of typical lengths where they are packed."""
    blocks = sum(-(-rows // block) for rows, _ in problem.lengths)
    return blocks * problem.heads_q // heads * problem.extents[0]


def split_rows(problem: Problem) -> int:
    """Rows of all heads, each of which has results of every split."""
    batch, rows, _ = problem.extents
    return batch * problem.heads_q * rows


def counted_splits(problem: Problem, knobs: SplitKnobs) -> int:
    """The splits that a launch has results of: no more than there are tiles of keys."""
    splits = min(knobs.splits, -(-problem.seqlen_k // knobs.block_n))
    return 1 if split_rows(problem) >= MOST_SPLIT_ROWS else splits


def tiles_of_parts(counts: Sequence[int], knobs: SplitKnobs, ctas: float) -> list[int]:
    """Tiles of keys of every part of some blocks of packed queries, about as ``PartList`` has them.

    Of parts that make one to eight rounds of the CTAs those whose rounds end first, if all parts were alike.

    Args:
        counts: tiles that each block visits.
        knobs: give the most parts of a block, and the keys of a tile.
        ctas: that run at a time, for each head.
    """
    longest, total = max(1, *counts), sum(counts)
    beside = PART_KEYS / knobs.block_n

    def parts_of(rounds: int) -> list[int]:
        even = max(total / (ctas * rounds), longest / knobs.splits)
        share = ceil(max(1.0, min(longest, even)))
        numbers = (min(knobs.splits, max(1, int(count / share + 0.5))) for count in counts)
        return [
            -(-count // splits)
            for count, splits in zip(counts, numbers, strict=True)
            for _ in range(splits)
        ]

    def ends(tiles: Sequence[int]) -> float:
        rounds = ceil(len(tiles) / ctas)
        return max(max(tiles), rounds * total / len(tiles)) + beside * rounds

    return min(map(parts_of, range(1, PART_ROUNDS + 1)), key=ends)


def split_bytes(problem: Problem, padded_dim_v: int, knobs: SplitKnobs) -> list[int]:
    """Bytes of the results of all splits, O in fp32 and LSE; none without splits."""
    splits = counted_splits(problem, knobs)
    if splits == 1:
        return []
    rows = split_rows(problem)
    return [splits * rows * columns * FP32_BYTES for columns in (padded_dim_v, 1)]


def rows_of_group(problem: Problem) -> int:
    """Queries of all heads that share one of K and V."""
    return problem.seqlen_q * (problem.heads_q // problem.heads_kv)


def visible_keys(problem: Problem) -> int:
    """Keys that the queries see together: all, or those of their windows."""
    return min(problem.seqlen_k, sum(problem.window) + problem.seqlen_q)


def queries_are_few(problem: Problem, least: int) -> bool:
    """True where queries are fewer than ``least``, or those of a group are: of the longest of packed sequences."""
    return problem.seqlen_q < least or rows_of_group(problem) <= MOST_PACKED_ROWS


def reads_caches(problem: Problem) -> bool:
    """True for packed sequences of few queries in the mean and more keys: of tokens with caches, beside prompts or not.

    Sequences that are short themselves take no kernel of their own by default, as a batch of others may follow.
    """
    rows_q, rows_k = problem.packed_rows
    few = rows_q <= MEAN_QUERIES * problem.batch
    return problem.packed and few and CACHED_KEYS * rows_q <= rows_k


def keys_should_split(problem: Problem, block: int, spec: ArchSpec) -> bool:
    """True where tiles of ``block`` queries leave half of the SMs idle, and keys are long.

    A window does not count, though it may leave too few of them to split: another one would be another kernel's.
    """
    tiles = tiles_of_queries(problem, block)
    return 2 * tiles <= spec.num_sms and problem.seqlen_k >= LONG_KEYS * problem.seqlen_q


def most_splits(problem: Problem, knobs: SplitKnobs) -> int:
    """The most splits worth trying: a few tiles of keys are left for each."""
    key_tiles = -(-visible_keys(problem) // knobs.block_n)
    return max(1, min(MOST_SPLITS, key_tiles // LEAST_SPLIT))


def split_counts(problem: Problem, knobs: SplitKnobs, slots: int) -> list[int]:
    """Split counts worth trying, the first one by rule: the least that keeps nearly all slots busy in all waves.

    The others fill the slots once or twice: exactly, or as a power of two.

    Args:
        problem: gives rows and keys.
        knobs: whose tiles they have.
        slots: CTAs that the GPU holds.
    """
    tiles, most = row_tiles(problem, knobs), most_splits(problem, knobs)

    def busy(splits: int) -> float:
        waves = tiles * splits / slots
        return waves / ceil(waves)

    best = max(busy(splits) for splits in range(1, most + 1))
    chosen = next(n for n in range(1, most + 1) if busy(n) >= FULL_WAVES * best)
    powers = (1 << n for n in range(MOST_SPLITS.bit_length()))
    others = [n for n in powers if slots <= 2 * tiles * n <= 4 * slots]
    others += [slots // tiles, 2 * slots // tiles]
    return list(dict.fromkeys([chosen, *(min(most, n) for n in others if n)]))
