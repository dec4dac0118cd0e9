"""What a candidate costs an SM, whatever its operation: its kernels, each with shared memory, threads and registers."""

from __future__ import annotations

from ..codegen.candidate import Candidate
from ..codegen.knobs import ForwardKnobs
from . import backward_resources, forward_resources
from .occupancy import KernelNeeds


def kernels(candidate: Candidate) -> tuple[KernelNeeds, ...]:
    """The kernels that a candidate's tiles size, in the order they run; of backward, the plan's passes."""
    if isinstance(candidate.knobs, ForwardKnobs):
        return (forward_resources.needs(candidate),)
    return tuple(backward_resources.needs(shape) for shape in backward_resources.shapes(candidate))


def smem_bytes(candidate: Candidate) -> int:
    """Dynamic shared memory of one CTA of the hungriest kernel, bytes."""
    return max(kernel.smem_bytes for kernel in kernels(candidate))
