"""How long a candidate should take, and what limits it: arithmetic only, no GPU, no torch.

A step of a main loop costs the busiest unit of an SM plus the part that the design cannot overlap (:mod:`.tile_costs`);
the grid is the scheduler's list over the resident slots (:mod:`.schedule`); device memory and L2 bound the whole
(:mod:`.kernel_costs`). What there is to do is counted beside each operation (:mod:`.forward_costs`,
:mod:`.backward_costs`, :mod:`.retnet_costs`, :mod:`.parallel_costs`, :mod:`.chunkwise_costs`,
:mod:`.recurrent_costs`; kernels of family ``sm90`` as a whole, :mod:`.wgmma_costs` and
:mod:`.wgmma_retention_costs`). Fitted constants live in
:mod:`.coefficients`. :func:`estimate` works before the build, :func:`refine` after it, with the compiler's report.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..arch import resources
from ..arch.spec import ArchSpec
from ..codegen.candidate import Candidate
from ..codegen.knobs import BackwardKnobs, ParallelKnobs
from ..codegen.problem import Problem
from ..codegen.retention_knobs import (
    ChunkwiseKnobs,
    RecurrentKnobs,
    RetentionBackwardKnobs,
    WgmmaChunkwiseKnobs,
)
from ..codegen.wgmma_knobs import WgmmaBackwardKnobs, WgmmaForwardKnobs
from . import (
    backward_costs,
    chunkwise_costs,
    forward_costs,
    parallel_costs,
    recurrent_costs,
    wgmma_costs,
    wgmma_retention_costs,
)
from .coefficients import FITTED, Coefficients
from .estimates import Estimate, Report, Usage, expected_usage, reported_usage
from .kernel_costs import predict_kernel
from .retnet_costs import weighted

__all__ = ["Estimate", "Report", "Usage", "estimate", "predict", "rank", "refine"]


def estimate(
    problem: Problem, candidate: Candidate, spec: ArchSpec, coefficients: Coefficients = FITTED
) -> Estimate:
    """Predict a candidate's time before it is built."""
    usages = tuple(expected_usage(kernel, spec) for kernel in resources.kernels(candidate))
    return predict(problem, candidate, spec, usages, coefficients)


def refine(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    report: Report,
    coefficients: Coefficients = FITTED,
) -> Estimate:
    """Predict a built candidate's time with the compiler's registers, spills and static shared memory."""
    kernels = resources.kernels(candidate)
    if not isinstance(candidate.knobs, (BackwardKnobs, WgmmaBackwardKnobs)):
        usages = tuple(reported_usage(kernel, report) for kernel in kernels)
    else:
        told = backward_costs.passes_of(report)
        usages = tuple(reported_usage(kernel, told.get(kernel.name, report)) for kernel in kernels)
    return predict(problem, candidate, spec, usages, coefficients)


def rank(
    problem: Problem,
    candidates: Iterable[Candidate],
    spec: ArchSpec,
    coefficients: Coefficients = FITTED,
) -> list[tuple[Candidate, Estimate]]:
    """All candidates with their estimates, fastest first; equal times in the order of their names."""
    pairs = [(c, estimate(problem, c, spec, coefficients)) for c in candidates]
    return sorted(pairs, key=lambda pair: (pair[1].us, pair[0].name))


def predict(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    usages: tuple[Usage, ...],
    coefficients: Coefficients = FITTED,
) -> Estimate:
    """Predict a time under given resource usage; what :func:`estimate` and :func:`refine` share.

    Args:
        problem: what to compute.
        candidate: how.
        spec: the GPU.
        usages: of each kernel in :func:`.resources.kernels`.
        coefficients: fitted constants.

    Raises:
        ValueError: there are not as many usages as kernels.
    """
    knobs = candidate.knobs
    if isinstance(knobs, BackwardKnobs):
        return backward_costs.predict(problem, candidate, spec, usages, coefficients)
    if isinstance(knobs, WgmmaBackwardKnobs):
        return wgmma_costs.predict_backward(problem, candidate, spec, usages)
    if isinstance(knobs, RetentionBackwardKnobs):
        return chunkwise_costs.backward(problem, candidate, spec, usages, coefficients)
    if isinstance(knobs, ParallelKnobs):
        return parallel_costs.predict(problem, candidate, spec, usages, coefficients)
    (usage,) = usages
    if isinstance(knobs, WgmmaForwardKnobs):
        return wgmma_costs.predict(problem, candidate, spec, usage)
    if isinstance(knobs, WgmmaChunkwiseKnobs):
        return wgmma_retention_costs.predict(problem, candidate, spec, usage)
    if isinstance(knobs, ChunkwiseKnobs):
        return chunkwise_costs.forward(problem, candidate, spec, usage, coefficients)
    if isinstance(knobs, RecurrentKnobs):
        return recurrent_costs.predict(problem, candidate, spec, usage, coefficients)
    work = weighted(forward_costs.work_of(problem, candidate, coefficients), problem)
    return predict_kernel(work, spec, usage, coefficients)
