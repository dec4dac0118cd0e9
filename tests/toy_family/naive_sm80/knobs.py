"""Knobs of the toy kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from attention_autotuner.core.candidate import Candidate, Service
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


def knobs_of(candidate: Candidate) -> NaiveKnobs:
    """The knobs of a candidate of this kernel.

    Raises:
        TypeError: the candidate is of another kernel.
    """
    if not isinstance(candidate.knobs, NaiveKnobs):
        raise TypeError(f"{candidate.name} has no NaiveKnobs")
    return candidate.knobs
