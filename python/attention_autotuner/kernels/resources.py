"""Resources that a candidate takes from an SM: its passes, each with shared memory, threads and registers."""

from __future__ import annotations

from ..arch.occupancy import KernelNeeds
from ..core.candidate import Candidate
from .registry import kernel_of


def kernels(candidate: Candidate) -> tuple[KernelNeeds, ...]:
    """The launches that a candidate's tiles size, in the order they run."""
    return tuple(launch.needs for launch in kernel_of(candidate).passes(candidate))


def smem_bytes(candidate: Candidate) -> int:
    """Dynamic shared memory of one CTA of the launch that takes most, bytes."""
    return max(kernel.smem_bytes for kernel in kernels(candidate))
