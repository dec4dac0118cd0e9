"""Resources of a backward candidate of retention, family ``sm90``: the shapes of its passes, and the workspace."""

from __future__ import annotations

from dataclasses import replace

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..chunks_sm90.resources import ChunkSm90Shape, shape_of
from ..shared.super_chunks import SuperChunks
from ..shared.workspace import SUM_BYTES, layout_bytes, states_bytes


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
    knobs, sequences = shapes["dv"].knobs, problem.batch * problem.heads_q
    ctas = sequences * min(shape.slices for shape in shapes.values())
    cut = SuperChunks.of(problem.seqlen_q, knobs.chunk, knobs.super_chunk, ctas)
    sizes = [states_bytes(problem, cut)] * 2 if cut.supers > 1 else []
    if problem.heads_q != problem.heads_kv:
        rows = sequences * problem.seqlen_q
        sizes += [SUM_BYTES * rows * dim for dim in (problem.dim_qk, problem.dim_v)]
    return layout_bytes(sizes)
