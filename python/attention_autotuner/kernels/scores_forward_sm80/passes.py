"""The launches of a forward candidate over scores: its kernel over blocks of rows, and retention's pass for states."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..chunks_sm80.passes import chunk_pass
from ..shared.passes import Pass
from .knobs import knobs_of
from .resources import needs
from .rules import KERNEL_PREDICATES


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate, in the order they run."""
    knobs = knobs_of(candidate)
    rows = Pass(kernel=knobs.kernel, subject=candidate, rules=KERNEL_PREDICATES, needs_of=needs)
    if knobs.states is None or knobs.chunk is None:
        return (rows,)
    return (rows, chunk_pass(candidate, "states", knobs.states, knobs.chunk, 0))
