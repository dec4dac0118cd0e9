"""Device memory of chunkwise retention of family ``sm90`` beside its tensors: the twin of its ``Workspace``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.super_chunks import SuperChunks
from ..shared.workspace import layout_bytes, states_bytes
from .resources import shape_of


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of the states of super-chunks, where there are several."""
    shape = shape_of(candidate)
    knobs, heads = shape.knobs, problem.batch * problem.heads_q
    cut = SuperChunks.of(problem.seqlen_q, knobs.chunk, knobs.super_chunk, heads * shape.slices)
    return layout_bytes([states_bytes(problem, cut)]) if cut.supers > 1 else 0
