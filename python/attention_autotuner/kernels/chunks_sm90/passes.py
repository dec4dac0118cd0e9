"""The launch of a chunkwise candidate, family ``sm90``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass
from .resources import needs, shape_of
from .rules import CHUNK_SM90_PREDICATES


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launch of a candidate that its knobs size; that for the states of super-chunks takes no more."""
    return (
        Pass(
            kernel=candidate.kernel,
            subject=shape_of(candidate),
            rules=CHUNK_SM90_PREDICATES,
            needs_of=needs,
        ),
    )
