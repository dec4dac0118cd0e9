"""A candidate's knobs as the cells of a table, in the words of its kernel."""

from __future__ import annotations

from ..core.candidate import Candidate
from ..core.problem import Problem
from ..kernels.registry import KERNELS, kernel_of


def knob_headings(problem: Problem) -> list[str]:
    """The columns of :func:`knobs`, for the candidates of a problem."""
    serving = (kernel for kernel in KERNELS.values() if kernel.serves_problem(problem))
    return list(dict.fromkeys(name for kernel in serving for name in kernel.columns(problem)))


def knobs(candidate: Candidate) -> list[str]:
    """A candidate's knobs as cells under :func:`knob_headings`."""
    return list(kernel_of(candidate).describe(candidate).cells.values())
