"""Every kernel family. A new one is its folder here, one of the same name among the headers, and a line in KERNELS."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ..arch.spec import ArchSpec
from ..core.candidate import Candidate, Family, Rejection
from ..core.problem import Direction, Op, Problem
from .attention_backward_sm90.kernel import AttentionBackwardSm90
from .attention_forward_sm90.kernel import AttentionForwardSm90
from .chunks_backward_sm90.kernel import ChunksBackwardSm90
from .chunks_sm80.kernel import ChunksSm80
from .chunks_sm90.kernel import ChunksSm90
from .gemm_sm90.kernel import GemmSm90
from .kernel import Kernel
from .recurrent_sm80.kernel import RecurrentSm80
from .scores_backward_sm80.kernel import ScoresBackwardSm80
from .scores_backward_sm90.kernel import ScoresBackwardSm90
from .scores_forward_sm80.kernel import ScoresForwardSm80

KERNELS: dict[str, Kernel[Any]] = {
    kernel.name: kernel
    for kernel in (
        ScoresForwardSm80(),
        ScoresBackwardSm80(),
        AttentionBackwardSm90(),
        ScoresBackwardSm90(),
        ChunksSm80(),
        ChunksSm90(),
        RecurrentSm80(),
        AttentionForwardSm90(),
        ChunksBackwardSm90(),
        GemmSm90(),
    )
}
"""Name -> kernel. Of one family, a problem's candidates come in this order."""


def kernel_of(candidate: Candidate) -> Kernel[Any]:
    """The kernel of a candidate."""
    return KERNELS[candidate.kernel]


def kernels_for(problem: Problem, families: tuple[Family, ...]) -> Iterator[Kernel[Any]]:
    """The kernels that compute a problem, in the order in which they are tried: family by family."""
    for family in families:
        for kernel in KERNELS.values():
            if kernel.family == family and kernel.serves_problem(problem):
                yield kernel


def families(op: Op, direction: Direction) -> tuple[Family, ...]:
    """The families that an operation's kernels come in."""
    serving = (
        kernel.family
        for kernel in KERNELS.values()
        if any(service[:2] == (op, direction) for service in kernel.serves)
    )
    return tuple(dict.fromkeys(serving))


def candidates(
    problem: Problem, families: tuple[Family, ...], spec: ArchSpec
) -> list[Candidate | Rejection]:
    """Every point of a problem's space on a GPU, as a candidate or as the rejection that says why not.

    A search asks several times; the last answers are kept, as those of the kernels that are registered.
    """
    return list(_candidates(problem, families, spec, tuple(KERNELS)))


@lru_cache(maxsize=8)
def _candidates(
    problem: Problem, families: tuple[Family, ...], spec: ArchSpec, _kernels: tuple[str, ...]
) -> tuple[Candidate | Rejection, ...]:
    return tuple(
        point if isinstance(point, Rejection) else Candidate.of(problem, point)
        for kernel in kernels_for(problem, families)
        for point in kernel.points(problem, spec)
    )


def default(problem: Problem, families: tuple[Family, ...], spec: ArchSpec) -> Candidate | None:
    """The candidate that serves a problem without tuning: the default of the first kernel that has one; else None."""
    for kernel in kernels_for(problem, families):
        knobs = kernel.default(problem, spec)
        if knobs is not None:
            return Candidate.of(problem, knobs)
    return None
