"""The launches of a backward candidate over scores."""

from __future__ import annotations

from typing import Any

from ...core.candidate import Candidate
from ..shared.passes import Pass
from ..shared.rules import Rule
from .knobs import BackwardKnobs
from .resources import KeyShape, PassShape, needs, shapes
from .rules import KEY_PREDICATES, ROW_PREDICATES

# Lb0: the kernels whose CTAs do not share a group of query heads; the others are for problems with few CTAs.
KEYS_SYMBOL = r"backward_keysI.*Lb0E"
ROWS_SYMBOL = r"backward_rowsI.*6ResultE{}E.*Lb0E"
RESULTS = ("dq", "dk", "dv")  # attention_autotuner::Result, in the order of its values


def pass_of(shape: PassShape) -> Pass:
    """The launch of a pass."""
    is_keys = isinstance(shape, KeyShape)
    rules: dict[str, Rule[Any]] = {**KEY_PREDICATES} if is_keys else {**ROW_PREDICATES}
    symbol = KEYS_SYMBOL if is_keys else ROWS_SYMBOL.format(RESULTS.index(shape.name))
    return Pass(
        kernel=BackwardKnobs.kernel,
        subject=shape,
        rules=rules,
        needs_of=needs,
        symbol=symbol,
    )


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate, in the order they run."""
    return tuple(map(pass_of, shapes(candidate)))
