"""Whether a candidate may exist on a GPU: one front for the rules of every operation.

What the kernel headers can compile, and what never pays, is said beside each operation
(:mod:`.forward_legality`, :mod:`.backward_legality`, :mod:`.chunkwise_legality`, :mod:`.recurrent_legality`,
:mod:`.wgmma_legality`, :mod:`.wgmma_backward_legality`, :mod:`.wgmma_retention_legality`); what one GPU has room
for, in :mod:`.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..codegen.candidate import Candidate
from ..codegen.knobs import BackwardKnobs
from ..codegen.retention_knobs import RecurrentKnobs
from . import (
    backward_legality,
    backward_resources,
    chunkwise_legality,
    chunkwise_resources,
    forward_legality,
    resources,
    wgmma_backward_legality,
    wgmma_backward_resources,
    wgmma_legality,
    wgmma_resources,
    wgmma_retention_legality,
    wgmma_retention_resources,
)
from .recurrent_legality import RECURRENT_PREDICATES, RecurrentShape
from .rules import CLASS_PREDICATES, COPY_PREDICATES, Broken, first_broken, limit_broken
from .spec import ArchSpec


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A candidate, or a pass that candidates would share, that a policy will not offer.

    Attributes:
        config: the candidate's fields, of its knobs those that the rule is about.
        predicate: the name of the rule that said no.
        reason: the constraint with the values that broke it.
    """

    config: dict[str, Any]
    predicate: str
    reason: str


def check(candidate: Candidate, spec: ArchSpec) -> Rejection | None:
    """The first rule that a candidate breaks on a GPU, or None."""
    broken = _kernel_broken(candidate) or _taste_broken(candidate) or _limit_broken(candidate, spec)
    return _rejection(candidate, broken)


def check_kernel(candidate: Candidate) -> Rejection | None:
    """The first rule of the kernel headers that a candidate breaks, or None: whether it can be compiled at all."""
    return _rejection(candidate, _kernel_broken(candidate))


def check_limits(candidate: Candidate, spec: ArchSpec) -> Rejection | None:
    """The first limit of a GPU that a candidate breaks, or None."""
    return _rejection(candidate, _limit_broken(candidate, spec))


def _rejection(candidate: Candidate, broken: Broken | None) -> Rejection | None:
    if broken is None:
        return None
    return Rejection(config=candidate.config, predicate=broken[0], reason=broken[1])


def _kernel_broken(candidate: Candidate) -> Broken | None:
    knobs = candidate.knobs
    wide = wgmma_resources.shape_of(candidate)
    if wide is not None:
        return wgmma_legality.kernel_broken(wide)
    passes = wgmma_backward_resources.shapes(candidate)
    if passes:
        return next(filter(None, map(wgmma_backward_legality.pass_broken, passes)), None)
    walk = wgmma_retention_resources.shape_of(candidate)
    if walk is not None:
        return wgmma_retention_legality.kernel_broken(walk)
    rows = resources.rows_of(candidate)
    if rows is not None:
        broken = first_broken(forward_legality.KERNEL_PREDICATES, rows)
    else:
        broken = first_broken(CLASS_PREDICATES | COPY_PREDICATES, candidate)
    if isinstance(knobs, BackwardKnobs):
        for shape in backward_resources.shapes(candidate):
            broken = broken or backward_legality.kernel_broken(shape)
    elif isinstance(knobs, RecurrentKnobs):
        state = RecurrentShape(knobs=knobs, class_qk=candidate.class_qk)
        broken = broken or first_broken(RECURRENT_PREDICATES, state)
    for chunks in chunkwise_resources.shapes(candidate):
        broken = broken or chunkwise_legality.kernel_broken(chunks)
    return broken


def _taste_broken(candidate: Candidate) -> Broken | None:
    rows = resources.rows_of(candidate)
    if rows is not None:
        return first_broken(forward_legality.TASTE_PREDICATES, rows)
    return None  # the search spaces of the others name what pays by their values


def _limit_broken(candidate: Candidate, spec: ArchSpec) -> Broken | None:
    broken = (limit_broken(kernel, spec) for kernel in resources.kernels(candidate))
    return next((found for found in broken if found is not None), None)
