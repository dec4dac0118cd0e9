"""The launch of a recurrent candidate."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass
from .knobs import knobs_of
from .resources import RecurrentShape, needs
from .rules import RECURRENT_PREDICATES


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The one launch of a candidate."""
    knobs = knobs_of(candidate)
    shape = RecurrentShape(knobs=knobs, padded_dim_qk=candidate.padded_dim_qk)
    return (
        Pass(
            kernel=knobs.kernel,
            subject=shape,
            rules=RECURRENT_PREDICATES,
            needs_of=needs,
        ),
    )
