"""The time of a backward candidate of retention, family ``sm90``: that of three passes of the forward kernel."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..chunks_sm90 import cost
from ..shared import engine
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usages
from ..shared.workspace import head_sums_bytes
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
    if partial := sum(head_sums_bytes(problem)):  # written and read
        auxiliary = auxiliary.plus(2 * partial, spec, fit)
    return engine.in_sequence(passes, auxiliary, spec)
