"""The predicted time of a candidate, and what limits it: arithmetic only, no GPU, no torch.

A step of a main loop costs the busiest unit of an SM plus the part that the design cannot overlap
(:mod:`.shared.tile_costs`); the grid is the scheduler's list over the resident slots (:mod:`.shared.schedule`); device
memory and L2 bound the whole (:mod:`.shared.engine`). The work is counted beside each kernel, in its
``cost``. Fitted constants are in :mod:`.shared.coefficients`. :func:`estimate` works before the build, :func:`refine`
after it, with the compiler's report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..arch.spec import ArchSpec
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..core.report import CompilerReport, Counts
from .registry import kernel_of
from .shared.coefficients import FITTED, Coefficients
from .shared.estimates import Estimate, Usage, expected_usage, reported_usage
from .shared.passes import Pass

__all__ = ["Estimate", "Usage", "estimate", "predict", "rank", "refine"]


def estimate(
    problem: Problem, candidate: Candidate, spec: ArchSpec, coefficients: Coefficients = FITTED
) -> Estimate:
    """Predict a candidate's time before it is built."""
    passes = kernel_of(candidate).passes(candidate)
    usages = tuple(expected_usage(launch.needs, spec) for launch in passes)
    return predict(problem, candidate, spec, usages, coefficients)


def refine(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    report: CompilerReport,
    coefficients: Coefficients = FITTED,
) -> Estimate:
    """Predict a built candidate's time with the compiler's registers, spills and static shared memory."""
    passes = kernel_of(candidate).passes(candidate)
    usages = tuple(
        reported_usage(launch.needs, report_of(launch, report), coefficients) for launch in passes
    )
    return predict(problem, candidate, spec, usages, coefficients)


def report_of(launch: Pass, report: CompilerReport) -> Counts:
    """A compiler's report of a pass: of its own kernel where that has a name, else of the worst of all kernels."""
    if not launch.symbol:
        return report
    named = [kernel for kernel in report.kernels if re.search(launch.symbol, kernel.name)]
    return named[-1] if named else report


def rank(
    problem: Problem,
    candidates: Iterable[Candidate],
    spec: ArchSpec,
) -> list[tuple[Candidate, Estimate]]:
    """All candidates with their estimates, fastest first; equal times in the order of their names."""
    pairs = [(c, estimate(problem, c, spec)) for c in candidates]
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
        usages: of each pass.
        coefficients: fitted constants.

    Raises:
        ValueError: there are not as many usages as kernels.
    """
    kernel = kernel_of(candidate)
    needed = len(kernel.passes(candidate))
    if len(usages) != needed:
        raise ValueError(f"{candidate.name} has {needed} passes, got {len(usages)} usages")
    return kernel.predict(problem, candidate, spec, usages, coefficients)
