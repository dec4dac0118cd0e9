"""Bytes of a launch's workspace, as the host sides of the artifacts lay it out: twins of ``Workspace`` in the entries.

A test compares them with what built artifacts and the headers compute.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.problem import Problem
from .super_chunks import SuperChunks

SUM_BYTES = 4  # fp32
ELEMENT_BYTES = 2  # fp16 and bf16
WORKSPACE_ALIGNMENT = 256  # of WorkspaceLayout in host/workspace.cuh
LSE_DELTA_PADDING = 128  # rows; see common/sequences.cuh
LSE_DELTA_SPARE = 2  # blocks of a packed sequence
ROW_VALUES = 2  # LSE and delta
SPAN_BYTES = 8  # of common/spans.cuh
LISTED_BYTES, COUNT_BYTES = 32, 4  # of sm90/sequence_list.cuh


def layout_bytes(sizes: Iterable[int]) -> int:
    """Bytes of buffers of these sizes, with their alignment."""
    return sum(-(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT for size in sizes)


def states_bytes(problem: Problem, cut: SuperChunks) -> int:
    """Bytes of the states of all super-chunks of retention."""
    heads = problem.batch * problem.heads_q
    return SUM_BYTES * heads * cut.slots * problem.dim_qk * problem.dim_v


def count_head_splits(problem: Problem, block: int, enough_ctas: int) -> int:
    """CTAs that share a block of keys where those are too few, each with some of the query heads of a group.

    The least divisor of the group that makes enough CTAs, or the group; the twin of ``count_head_splits`` in
    ``host/head_splits.cuh``.

    Args:
        problem: gives keys and heads.
        block: keys of a CTA.
        enough_ctas: CTAs that are enough.
    """
    if problem.packed:
        return 1
    group = problem.heads_q // problem.heads_kv
    ctas = -(-problem.seqlen_k // block) * problem.heads_kv * problem.batch
    divisors = (n for n in range(1, group + 1) if group % n == 0)
    return next((n for n in divisors if ctas * n >= enough_ctas), group)


def lse_delta_bytes(problem: Problem) -> int:
    """Bytes of LSE and delta of all rows of queries, with what a tile may read beyond the sequence."""
    rows = (-(-problem.seqlen_q // LSE_DELTA_PADDING) + 1) * LSE_DELTA_PADDING
    if problem.packed:
        rows = count_blocks(problem, LSE_DELTA_PADDING, LSE_DELTA_SPARE) * LSE_DELTA_PADDING
    return SUM_BYTES * ROW_VALUES * problem.extents[0] * problem.heads_q * rows


def count_blocks(problem: Problem, block: int, spare: int = 1, *, by_queries: bool = True) -> int:
    """Blocks of rows of all packed sequences at most; the twin of ``count_blocks`` in ``common/sequences.cuh``."""
    return problem.packed_rows[not by_queries] // block + (problem.batch + 1) * spare


def list_bytes(problem: Problem, block: int, *, by_queries: bool) -> list[int]:
    """Bytes of a list of the blocks of packed sequences, and of its length; the twin of ``BlockList``."""
    if not problem.packed:
        return []
    return [LISTED_BYTES * count_blocks(problem, block, by_queries=by_queries), COUNT_BYTES]


def span_bytes(problem: Problem) -> int:
    """Bytes of the spans of all queries and, of a backward, of all keys; none without documents or a prefix."""
    if not problem.spanned:
        return 0
    keys = problem.seqlen_k if problem.direction == "backward" else 0
    return SPAN_BYTES * problem.batch * (problem.seqlen_q + keys)


def shared_gradient_bytes(problem: Problem, splits: int) -> int:
    """Bytes of the partial dK and dV of CTAs that share a block of keys; none where a CTA has its block alone."""
    if splits == 1:
        return 0
    rows = splits * problem.batch * problem.heads_kv * problem.seqlen_k
    return SUM_BYTES * rows * (problem.padded_dim_qk + problem.padded_dim_v)
