"""Bytes of a launch's workspace, as the host sides of the artifacts lay it out: twins of ``Workspace`` in the entries.

A test compares them with what built artifacts and the headers answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.problem import Problem
from .super_chunks import SuperChunks

SUM_BYTES = 4  # fp32
ELEMENT_BYTES = 2  # fp16 and bf16
PART_ALIGNMENT = 256  # of WorkspaceParts in host/workspace.cuh
STATISTICS_PADDING = 128  # rows; see common/backward_arguments.cuh
ROW_STATISTICS = 2  # a row's shift and factor, or LSE and delta


def parts_bytes(sizes: Iterable[int]) -> int:
    """Bytes of parts of these sizes, with their alignment."""
    return sum(-(-size // PART_ALIGNMENT) * PART_ALIGNMENT for size in sizes)


def states_bytes(problem: Problem, cut: SuperChunks) -> int:
    """Bytes of the states of all super-chunks of retention."""
    heads = problem.batch * problem.heads_q
    return SUM_BYTES * heads * cut.slots * problem.dim_qk * problem.dim_v


def count_head_splits(problem: Problem, block: int, enough_ctas: int) -> int:
    """CTAs that share a block of keys where those are too few, each with a part of the query heads of a group.

    The least divisor of the group that makes enough CTAs, or the group; the twin of ``count_head_splits`` in
    ``host/head_splits.cuh``.

    Args:
        problem: gives keys and heads.
        block: keys of a CTA.
        enough_ctas: CTAs that are enough.
    """
    group = problem.heads_q // problem.heads_kv
    ctas = -(-problem.seqlen_k // block) * problem.heads_kv * problem.batch
    divisors = (n for n in range(1, group + 1) if group % n == 0)
    return next((n for n in divisors if ctas * n >= enough_ctas), group)


def statistics_bytes(problem: Problem) -> int:
    """Bytes of the statistics of all rows of queries, with what a tile may read beyond the sequence."""
    rows = (-(-problem.seqlen_q // STATISTICS_PADDING) + 1) * STATISTICS_PADDING
    return SUM_BYTES * ROW_STATISTICS * problem.batch * problem.heads_q * rows


def shared_gradient_bytes(problem: Problem, splits: int) -> int:
    """Bytes of the parts of dK and dV that CTAs compute which share a block of keys; none where nobody shares."""
    if splits == 1:
        return 0
    rows = splits * problem.batch * problem.heads_kv * problem.seqlen_k
    return SUM_BYTES * rows * (problem.class_qk + problem.class_v)
