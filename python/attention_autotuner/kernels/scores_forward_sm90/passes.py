"""The launch of a forward candidate over scores, family ``sm90``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass
from .resources import needs, shape_of
from .rules import FORWARD_SM90_PREDICATES


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The one launch of a candidate."""
    return (
        Pass(
            kernel=candidate.kernel,
            subject=shape_of(candidate),
            rules=FORWARD_SM90_PREDICATES,
            needs_of=needs,
        ),
    )
