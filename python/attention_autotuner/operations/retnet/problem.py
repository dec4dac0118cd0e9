"""Retention with a mask or a decay and, usually, a normaliser, as a problem."""

from __future__ import annotations

from ...core.operation import Semantics
from ...core.problem import Problem


class RetNetSemantics(Semantics):
    """The meaning of retnet's problems."""

    def scale(self, problem: Problem) -> float:
        """One: the formula has no scale of its own."""
        return 1.0

    def describe(self, problem: Problem) -> str:
        """The mask."""
        return f" {problem.mask}"


SEMANTICS = RetNetSemantics(
    op="retnet", scores={"explicit": "masked", "decay": "decayed"}, small_step="explicit"
)
