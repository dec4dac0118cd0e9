"""Device memory of a forward candidate over scores beside its tensors: the twin of ``Workspace`` in its entries."""

from __future__ import annotations

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.super_chunks import ENOUGH_PIECES, SuperChunks
from ..shared.workspace import layout_bytes, states_bytes
from .knobs import knobs_of

SUPER_CHUNK = 512  # tokens; see ParallelEntry in scores_forward_sm80/retention_entry.cuh


def workspace_bytes(problem: Problem, candidate: Candidate, *, final_state: bool = False) -> int:
    """Bytes of the states of super-chunks, from which retention's final one is made.

    Args:
        problem: gives the sizes.
        candidate: of any operation.
        final_state: whether it is wanted.
    """
    chunk = knobs_of(candidate).chunk
    if not final_state or chunk is None:
        return 0
    cut = SuperChunks.of(problem.seqlen_q, chunk, SUPER_CHUNK, ENOUGH_PIECES)
    return layout_bytes([states_bytes(problem, cut)])
