"""The work of retention's parallel form, counted for the cost model: attention's kernel with a decay, and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..arch.spec import ArchSpec
from ..codegen.candidate import Candidate
from ..codegen.knobs import ParallelKnobs
from ..codegen.problem import Problem
from . import forward_costs
from .chunkwise_costs import Beside, total
from .coefficients import Coefficients
from .decoding import decodes
from .estimates import Estimate, Usage
from .kernel_costs import predict_kernel
from .retnet_costs import weighted
from .walk_costs import Walk, walk_time


def rows_of(candidate: Candidate) -> Candidate:
    """The same kernel over blocks of rows as retnet has it, which is what counts its work.

    Raises:
        TypeError: the candidate is of another form.
    """
    return replace(candidate, op="retnet", mask="decay", knobs=_parallel(candidate).rows)


def predict(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    usages: Sequence[Usage],
    fit: Coefficients,
) -> Estimate:
    """The time of the parallel form; ``usages`` of the kernel over rows and of the pass that gives the states.

    Raises:
        TypeError: the candidate is of another form.
    """
    knobs = _parallel(candidate)
    work = weighted(forward_costs.work_of(problem, rows_of(candidate), fit), problem)
    rows = predict_kernel(work, spec, usages[0], fit)
    if not decodes(problem):
        return rows
    walk = Walk(
        knobs=knobs.states,
        chunk=knobs.chunk,
        depth=candidate.class_qk,
        width=candidate.class_v,
        states_only=True,
        heads=problem.batch * problem.heads_q,
        tokens=problem.seqlen_q,
        stretch=problem.seqlen_q,
        copy_bytes=candidate.copy_bytes,
    )
    states = 4 * 2 * walk.heads * problem.dim_qk * problem.dim_v
    beside = Beside().plus(states, spec)
    return total([rows, walk_time(walk, spec, usages[-1], fit)], beside, spec)


def _parallel(candidate: Candidate) -> ParallelKnobs:
    if not isinstance(candidate.knobs, ParallelKnobs):
        raise TypeError(f"{candidate.name} is not parallel")
    return candidate.knobs
