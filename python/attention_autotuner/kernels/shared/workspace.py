"""Bytes of a launch's workspace, as the host sides of the artifacts lay it out: twins of ``Workspace`` in the entries.

A test compares them with what built artifacts and the headers answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...core.problem import Problem

SUM_BYTES = 4  # fp32
ELEMENT_BYTES = 2  # fp16 and bf16
PART_ALIGNMENT = 256  # of WorkspaceParts in host/workspace.cuh
STATISTICS_PADDING = 128  # rows; see common/backward_arguments.cuh
ROW_STATISTICS = 2  # a row's shift and factor, or LSE and delta
# As SuperChunks in host/super_chunks.cuh has them: CTAs that are enough, and pieces of a super-chunk where they are
# fewer.
ENOUGH_PIECES = 128
MAX_PIECES = 4


def parts_bytes(sizes: Iterable[int]) -> int:
    """Bytes of parts of these sizes, with their alignment."""
    return sum(-(-size // PART_ALIGNMENT) * PART_ALIGNMENT for size in sizes)


def pieces_of(super_chunk: int, chunk: int, ctas: int) -> int:
    """Pieces that the state of a super-chunk is computed in.

    Args:
        super_chunk: tokens.
        chunk: tokens of a step, whose multiple a piece is.
        ctas: that compute states of super-chunks in one piece.
    """
    pieces = 1
    while (
        pieces < MAX_PIECES
        and super_chunk % (2 * pieces * chunk) == 0
        and 2 * pieces * ctas <= ENOUGH_PIECES
    ):
        pieces *= 2
    return pieces


@dataclass(frozen=True, kw_only=True)
class SuperChunks:
    """How a sequence is cut; the twin of ``SuperChunks`` in ``host/super_chunks.cuh``.

    Attributes:
        chunks: of the sequence.
        super_chunk: tokens.
        supers: super-chunks of the sequence.
        slots: states of the sequence that are stored, one a piece.
    """

    chunks: int
    super_chunk: int
    supers: int
    slots: int

    @classmethod
    def of(cls, seqlen: int, chunk: int, wanted: int, ctas: int) -> SuperChunks:
        """The cut of a sequence.

        Args:
            seqlen: its tokens.
            chunk: tokens of a step.
            wanted: tokens of a super-chunk; 0 for the whole sequence.
            ctas: that work on each super-chunk.
        """
        chunks = -(-seqlen // chunk)
        super_chunk = wanted if 0 < wanted < seqlen else chunks * chunk
        supers = -(-seqlen // super_chunk)
        pieces = 1 if supers == 1 else pieces_of(super_chunk, chunk, ctas * (supers - 1))
        return cls(
            chunks=chunks,
            super_chunk=super_chunk,
            supers=supers,
            slots=-(-seqlen // (super_chunk // pieces)),
        )


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
