"""Knobs of the toy kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from attention_autotuner.core.candidate import Service, knobs_as
from attention_autotuner.kernels.shared.knobs import Sm80Knobs

Exponential = Literal["exact", "approximate"]


@dataclass(frozen=True, kw_only=True)
class NaiveKnobs(Sm80Knobs):
    """Attention forward by one warp a query row.

    Attributes:
        warps: of a CTA, and so its query rows.
        exponential: ``exact``: ``exp2f``; ``approximate``: the instruction alone.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    kernel: ClassVar[str] = "naive_sm80"
    serves: ClassVar[frozenset[Service]] = frozenset({("attention", "forward", "softmax")})

    warps: int
    exponential: Exponential = "exact"
    ctas_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.warps

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return f"naive_w{self.warps}_{self.exponential}_b{self.ctas_per_sm}"


knobs_of = knobs_as(NaiveKnobs)
