"""The legality of a candidate on a GPU: the rules of its kernel, and the limits of the GPU."""

from __future__ import annotations

from ..arch.spec import ArchSpec
from ..core.candidate import Candidate, Rejection
from .registry import kernel_of
from .shared.passes import check_passes, kernel_violation, rejection_of

__all__ = ["Rejection", "check", "check_kernel"]


def check(candidate: Candidate, spec: ArchSpec) -> Rejection | None:
    """The first rule that a candidate breaks on a GPU, or None."""
    kernel = kernel_of(candidate)
    return check_passes(candidate, kernel.passes, spec, kernel.pruning)


def check_kernel(candidate: Candidate) -> Rejection | None:
    """The first rule of the kernel headers that a candidate breaks, or None where it can be compiled."""
    passes = kernel_of(candidate).passes(candidate)
    return rejection_of(candidate, kernel_violation(candidate, passes))
