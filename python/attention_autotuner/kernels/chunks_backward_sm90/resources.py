"""Resources of a backward candidate of retention, family ``sm90``: the shapes of its passes, and the workspace."""

from __future__ import annotations

from dataclasses import replace

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..chunks_sm90.resources import ChunkSm90Shape, shape_of
from ..shared.super_chunks import SuperChunks
from ..shared.workspace import head_sums_bytes, layout_bytes, states_bytes


def transposed(candidate: Candidate) -> Candidate:
    """A candidate whose head dims have changed places: the depth of dq and dk is dim_v, their columns are of dim_qk."""
    return replace(
        candidate, padded_dim_qk=candidate.padded_dim_v, padded_dim_v=candidate.padded_dim_qk
    )


def shapes_of(candidate: Candidate) -> dict[str, ChunkSm90Shape]:
    """The shapes of a candidate's passes, by name, in the order they run."""
    across, along = shape_of(transposed(candidate)), shape_of(candidate)
    return {"dq": across, "dk": across, "dv": along}


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of the states of super-chunks and their gradients, where there are several, and of partial sums."""
    shapes = shapes_of(candidate)
    knobs, slices = shapes["dv"].knobs, min(shape.slices for shape in shapes.values())
    ctas = problem.batch * problem.heads_q * slices
    cut = SuperChunks.of(problem.seqlen_q, knobs.chunk, knobs.super_chunk, ctas)
    sizes = [states_bytes(problem, cut)] * 2 if cut.supers > 1 else []
    return layout_bytes([*sizes, *head_sums_bytes(problem)])
