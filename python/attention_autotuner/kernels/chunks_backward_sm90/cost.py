"""The time of a backward candidate of retention, family ``sm90``: that of three passes of the forward kernel."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..chunks_sm90 import cost
from ..shared import engine
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usages
from ..shared.workspace import SUM_BYTES
from .resources import transposed


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate's kernels; ``usages`` of its passes. States of super-chunks are counted with each."""
    across = transposed(candidate)  # the problem's head dims are only ever multiplied or added
    passes = [
        cost.predict(problem, turned, spec, (usage,), fit)
        for turned, usage in zip((across, across, candidate), usages, strict=True)
    ]
    auxiliary = engine.AuxiliaryWork()
    if problem.heads_q > problem.heads_kv:  # partial sums of dk and dv, written and read
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        moved = 2 * SUM_BYTES * rows * (problem.dim_qk + problem.dim_v)
        auxiliary = auxiliary.plus(moved, spec, fit)
    return engine.in_sequence(passes, auxiliary, spec)
