"""Bytes of a launch's workspace, as the host sides of the artifacts lay it out: twins of ``Workspace`` in the entries.

A test compares them with what built artifacts and the headers compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...core.modifications import TYPICAL_BIAS_DISTANCE
from ...core.problem import Problem
from ...core.sizes import FP32_BYTES
from .super_chunks import WHOLE_SEQUENCE, SuperChunks

WORKSPACE_ALIGNMENT = 256  # of WorkspaceLayout in host/workspace.cuh
LSE_DELTA_PADDING = 128  # rows; see common/sequences.cuh
LSE_DELTA_SPARE = 2  # blocks of a packed sequence
ROW_VALUES = 2  # LSE and delta
SPAN_BYTES = 8  # of common/spans.cuh
LISTED_BYTES, LISTED_PART_BYTES, COUNT_BYTES = 32, 48, 4  # of sm90/sequence_list.cuh

FITTING_BYTES, DRIFTING = 50_000_000, 400_000_000_000  # of drifts() in host/head_splits.cuh

BIAS_TILE, BIAS_SUMS, BIAS_CTAS = 128, 258, 1024  # of common/bias_gradient.cuh


def layout_bytes(sizes: Iterable[int]) -> int:
    """Bytes of buffers of these sizes, with their alignment."""
    return sum(-(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT for size in sizes)


def cut_of(
    problem: Problem, *, chunk: int, wanted: int, ctas: int, always: bool = False
) -> SuperChunks:
    """The cut of a retention problem's sequences; of packed ones the counts are of all, with those that are nobody's.

    The twin of ``packed_super_chunks`` in ``host/super_chunks.cuh``; arguments as :meth:`.SuperChunks.of` has them.

    Args:
        problem: gives the lengths.
        chunk: tokens of a step.
        wanted: tokens of a super-chunk; 0 for whole sequences.
        ctas: that work on each super-chunk.
        always: packed sequences are cut whatever their greatest length.
    """
    if not problem.packed:
        return SuperChunks.of(problem.seqlen_q, chunk, wanted, ctas)
    longest = min(problem.seqlen_q, problem.packed_rows[0])
    super_chunk = wanted if always or 0 < wanted < longest else WHOLE_SEQUENCE
    supers = count_blocks(problem, super_chunk)
    return SuperChunks(
        chunks=count_blocks(problem, chunk), super_chunk=super_chunk, supers=supers, slots=supers
    )


def states_bytes(problem: Problem, cut: SuperChunks) -> int:
    """Bytes of the states of all super-chunks of retention."""
    heads = problem.extents[0] * problem.heads_q
    return FP32_BYTES * heads * cut.slots * problem.dim_qk * problem.dim_v


def key_blocks(problem: Problem, block: int) -> int:
    """Blocks of so many keys of all heads, batch included."""
    batch, _, keys = problem.extents
    return -(-keys // block) * problem.heads_kv * batch


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of keys of a pass, the twin of ``KeyBlocks`` in ``key_splits.cuh``.

    Attributes:
        of_head: those of a head.
        all: those of all heads.
        queries: that see them.
        filling: of all, as many as fill a GPU where CTAs claim them.
    """

    of_head: int
    all: int
    queries: int
    filling: int

    @classmethod
    def of(cls, problem: Problem, block: int, enough_ctas: int) -> KeyBlocks:
        """The blocks of so many keys; of packed sequences those of the longest, and as many as are the work of all."""
        (_, _, total), longest, queries = problem.extents, problem.seqlen_k, problem.seqlen_q
        if not problem.packed:
            every = key_blocks(problem, block)
            return cls(-(-longest // block), every, queries, -(-19 * enough_ctas // 10))
        greatest = min(longest, total)
        shorter = min(1.0, math.sqrt(total / (problem.batch * greatest)))
        every = int(shorter * problem.heads_kv * total) // block
        filling = -(-16 * enough_ctas // 10)
        return cls(-(-greatest // block), every, int(shorter * queries), filling)


def count_head_splits(problem: Problem, ctas: int, enough_ctas: int) -> int:
    """CTAs that share a block of keys where those are too few, each with some of the query heads of a group.

    The least divisor of the group that makes enough CTAs, or the group; the twin of ``count_head_splits`` in
    ``host/head_splits.cuh``.

    Args:
        problem: gives the heads.
        ctas: blocks of keys of all heads.
        enough_ctas: CTAs that are enough.
    """
    group = problem.heads_q // problem.heads_kv
    return _least_head_splits(group, lambda n: group % n == 0 and ctas * n >= enough_ctas)


def enough_uneven_ctas(blocks: int, enough_ctas: int) -> int:
    """CTAs that are enough where a head's blocks of keys are causal; the twin in ``host/head_splits.cuh``."""
    return max(enough_ctas, blocks * -(-enough_ctas // 8))


def count_tailed_head_splits(counted: KeyBlocks, group: int, head_bytes: int) -> int:
    """CTAs that share a block of keys where causal blocks are claimed, with parts of a group that may differ by a head.

    The twin of the function of this name in ``host/head_splits.cuh``; ``head_bytes`` is what the CTAs of all SMs stream
    of a head.
    """

    def enough(splits: int) -> bool:
        wanted = 4 if group // splits <= 4 else 8
        allowed = group % splits == 0 or group // splits >= 2
        ctas = counted.all * splits
        return allowed and ctas >= wanted * counted.of_head and ctas >= counted.filling

    splits = _least_head_splits(group, enough)
    finer = -(-group // 3)
    beyond_l2 = group // splits * head_bytes - FITTING_BYTES
    drifts = beyond_l2 * group * counted.queries // finer >= DRIFTING
    return finer if drifts and finer > splits else splits


def _least_head_splits(group: int, enough: Callable[[int], bool]) -> int:
    return next((n for n in range(1, group) if enough(n)), group)


def head_sums_bytes(problem: Problem) -> list[int]:
    """Bytes of retention's dk and dv of every query head, where heads share one of K and V; else none."""
    if problem.heads_q == problem.heads_kv:
        return []
    batch, tokens, _ = problem.extents
    rows = batch * problem.heads_q * tokens
    return [FP32_BYTES * rows * dim for dim in (problem.dim_qk, problem.dim_v)]


def lse_delta_bytes(problem: Problem) -> int:
    """Bytes of LSE and delta of all rows of queries, with what a tile may read beyond the sequence."""
    rows = (-(-problem.seqlen_q // LSE_DELTA_PADDING) + 1) * LSE_DELTA_PADDING
    if problem.packed:
        rows = count_blocks(problem, LSE_DELTA_PADDING, LSE_DELTA_SPARE) * LSE_DELTA_PADDING
    return FP32_BYTES * ROW_VALUES * problem.extents[0] * problem.heads_q * rows


def count_blocks(problem: Problem, block: int, spare: int = 1, *, by_queries: bool = True) -> int:
    """Blocks of rows of all packed sequences at most; the twin of ``count_blocks`` in ``common/sequences.cuh``."""
    return problem.packed_rows[not by_queries] // block + (problem.batch + 1) * spare


def query_tiles(problem: Problem, block: int) -> int:
    """Blocks of queries of all heads, batch included; of packed sequences as many as there are at most."""
    blocks = count_blocks(problem, block) if problem.packed else -(-problem.seqlen_q // block)
    return problem.extents[0] * problem.heads_q * blocks


def list_bytes(
    problem: Problem, block: int, *, by_queries: bool, most_splits: int = 0
) -> list[int]:
    """Bytes of a list of the blocks of packed sequences, and of its length; the twin of ``BlockList`` and ``PartList``.

    Args:
        problem: gives the sequences; others have none.
        block: rows of a block.
        by_queries: whose rows these are.
        most_splits: parts that a block may have; 0 in a list of whole blocks.
    """
    if not problem.packed:
        return []
    block_bytes = LISTED_PART_BYTES * most_splits if most_splits else LISTED_BYTES
    return [block_bytes * count_blocks(problem, block, by_queries=by_queries), COUNT_BYTES]


def bias_sums_bytes(problem: Problem) -> int:
    """Bytes of the sums that become the gradient of a bias table of typical distance; none without one.

    The twin of ``BiasGradient`` in ``common/bias_gradient.cuh``.
    """
    if "bias_table" not in problem.modifications:
        return 0
    batch, *rows = problem.extents
    blocks_q, blocks_k = (-(-count // BIAS_TILE) for count in rows)
    blocks = count_blocks(problem, BIAS_TILE) if problem.packed else blocks_q * batch
    reach = (TYPICAL_BIAS_DISTANCE + BIAS_TILE - 2) // BIAS_TILE
    near, heads = min(reach, blocks_k) + min(reach, blocks_q) + 1, problem.heads_q
    of_near, of_far = (min(blocks, -(-BIAS_CTAS // (heads * count))) for count in (near, 1))
    return FP32_BYTES * BIAS_SUMS * heads * (near * of_near + 2 * of_far)


def span_bytes(problem: Problem) -> int:
    """Bytes of the spans of all queries and, of a backward, of all keys; none without documents or a prefix."""
    if not problem.spanned:
        return 0
    keys = problem.seqlen_k if problem.direction == "backward" else 0
    return SPAN_BYTES * problem.batch * (problem.seqlen_q + keys)


def backward_bytes(problem: Problem, splits: int) -> int:
    """Bytes that every backward over scores takes: of LSE and delta, of partial dK and dV, and of spans."""
    # Partial dK and dV of CTAs that share a block of keys; none where a CTA has its block alone.
    batch, _, keys = problem.extents
    rows = splits * batch * problem.heads_kv * keys if splits > 1 else 0
    gradients = FP32_BYTES * rows * (problem.padded_dim_qk + problem.padded_dim_v)
    return lse_delta_bytes(problem) + gradients + span_bytes(problem)
