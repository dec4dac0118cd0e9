"""Device memory of a backward candidate beside its tensors: the twin of ``Workspace`` in its entry."""

from __future__ import annotations

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.workspace import SUM_BYTES, lse_delta_bytes, shared_gradient_bytes
from .cost import shares_of_group
from .resources import KeyShape, shapes


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of LSE and delta, sums of dQ, and partial dK and dV."""
    sums = 0
    for shape in shapes(candidate):
        if isinstance(shape, KeyShape) and shape.one_pass:
            rows = -(-problem.seqlen_q // shape.knobs.block_m) * shape.knobs.block_m
            sums = SUM_BYTES * problem.batch * problem.heads_q * rows * problem.padded_dim_qk
    shared = shared_gradient_bytes(problem, shares_of_group(problem, candidate))
    return lse_delta_bytes(problem) + sums + shared
