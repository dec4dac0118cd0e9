"""What a candidate costs an SM, whatever its operation: its kernels, each with shared memory, threads and registers."""

from __future__ import annotations

from dataclasses import replace

from ..codegen.candidate import Candidate
from ..codegen.knobs import BackwardKnobs, ForwardKnobs, ParallelKnobs
from ..codegen.retention_knobs import RecurrentKnobs
from . import (
    backward_resources,
    chunkwise_resources,
    forward_resources,
    recurrent_resources,
    wgmma_backward_resources,
    wgmma_resources,
    wgmma_retention_resources,
)
from .occupancy import KernelNeeds


def rows_of(candidate: Candidate) -> Candidate | None:
    """The forward candidate of the kernel over blocks of rows: itself, or parallel retention's, or None."""
    if isinstance(candidate.knobs, ForwardKnobs):
        return candidate
    if isinstance(candidate.knobs, ParallelKnobs):
        return replace(candidate, op="attention", knobs=candidate.knobs.rows)
    return None


def kernels(candidate: Candidate) -> tuple[KernelNeeds, ...]:
    """The kernels that a candidate's tiles size, in the order they run; of backward, the plan's passes."""
    knobs = candidate.knobs
    wide = wgmma_resources.shape_of(candidate)
    if wide is not None:
        return (wgmma_resources.needs(wide),)
    wide_passes = wgmma_backward_resources.shapes(candidate)
    if wide_passes:
        return tuple(map(wgmma_backward_resources.needs, wide_passes))
    walk = wgmma_retention_resources.shape_of(candidate)
    if walk is not None:
        return (wgmma_retention_resources.needs(walk),)
    if isinstance(knobs, BackwardKnobs):
        shapes = backward_resources.shapes(candidate)
        return tuple(backward_resources.needs(shape) for shape in shapes)
    if isinstance(knobs, RecurrentKnobs):
        return (recurrent_resources.needs(candidate, knobs),)
    passes = tuple(map(chunkwise_resources.needs, chunkwise_resources.shapes(candidate)))
    rows = rows_of(candidate)
    if rows is None:
        return passes
    needs = forward_resources.needs(rows)
    return (replace(needs, name="rows"), *passes) if passes else (needs,)


def smem_bytes(candidate: Candidate) -> int:
    """Dynamic shared memory of one CTA of the hungriest kernel, bytes."""
    return max(kernel.smem_bytes for kernel in kernels(candidate))
