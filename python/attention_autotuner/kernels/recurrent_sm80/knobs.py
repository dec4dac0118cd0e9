"""Knobs of retention's recurrent form, family ``sm80``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.candidate import Service, knobs_as
from ...core.problem import Form
from ..shared.knobs import Sm80Knobs


@dataclass(frozen=True, kw_only=True)
class RecurrentKnobs(Sm80Knobs):
    """Retention forward, token by token: a CTA keeps some columns of a head's state in registers.

    Attributes:
        columns: columns of the state that a CTA takes; four a thread.
        warps: warps of one CTA, which share the state's rows.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    kernel: ClassVar[str] = "recurrent_sm80"
    serves: ClassVar[frozenset[Service]] = frozenset({("retention", "forward", "decayed")})
    form: ClassVar[Form] = "recurrent"

    columns: int
    warps: int
    ctas_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.warps

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return f"recurrent_v{self.columns}w{self.warps}b{self.ctas_per_sm}"


knobs_of = knobs_as(RecurrentKnobs)
