"""The launches of a backward candidate over scores, family ``sm90``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass
from .knobs import BackwardSm90Knobs
from .resources import Sm90PassShape, needs, shapes
from .rules import PASS_SM90_PREDICATES

SYMBOL = r"scores_backward_sm90I.*6ResultE{}E"
RESULTS = ("dq", "dk", "dv")  # attention_autotuner::Result, in the order of its values


def pass_of(shape: Sm90PassShape) -> Pass:
    """The launch of a pass."""
    return Pass(
        kernel=BackwardSm90Knobs.kernel,
        subject=shape,
        rules=PASS_SM90_PREDICATES,
        needs_of=needs,
        symbol=SYMBOL.format(RESULTS.index(shape.result)),
    )


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate, in the order they run."""
    return tuple(map(pass_of, shapes(candidate)))
