"""The launch of a toy candidate."""

from __future__ import annotations

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.shared.passes import Pass

from .knobs import NaiveKnobs
from .resources import needs
from .rules import NAIVE_PREDICATES


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The one launch."""
    return (
        Pass(kernel=NaiveKnobs.kernel, subject=candidate, rules=NAIVE_PREDICATES, needs_of=needs),
    )
