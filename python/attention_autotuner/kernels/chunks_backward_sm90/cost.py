"""The time of a backward candidate of retention, family ``sm90``: that of three passes of the forward kernel."""

from __future__ import annotations

from dataclasses import replace

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
    swapped = replace(problem, dim_qk=problem.dim_v, dim_v=problem.dim_qk)
    across, along = (swapped, transposed(candidate)), (problem, candidate)
    passes = [
        cost.predict(*of, spec, (usage,), fit)
        for of, usage in zip((across, across, along), usages, strict=True)
    ]
    auxiliary = engine.AuxiliaryWork()
    if problem.heads_q > problem.heads_kv:  # partial sums of dk and dv, written and read
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        moved = 2 * SUM_BYTES * rows * (problem.dim_qk + problem.dim_v)
        auxiliary = auxiliary.plus(moved, spec, fit)
    return engine.in_sequence(passes, auxiliary, spec)
