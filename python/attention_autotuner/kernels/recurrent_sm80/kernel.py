"""Retention forward token by token, family ``sm80``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Kernel, Traits
from ..shared.cells import RETENTION_COLUMNS, bound_words, cells
from . import cost, rules, space
from .knobs import RecurrentKnobs, knobs_of


class RecurrentSm80(Kernel[RecurrentKnobs]):
    """A CTA keeps some columns of a head's state in registers."""

    knobs = RecurrentKnobs
    cpp_type = "RecurrentEntry"
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    headings = RETENTION_COLUMNS
    spills_in_loop = True

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        return Traits(
            tile=("recurrent", knobs.columns),
            feed=(knobs.warps,),
            stratum=("recurrent", knobs.columns, knobs.warps),
            cells=cells(
                RETENTION_COLUMNS,
                candidate,
                "recurrent",
                "-",
                f"{knobs.columns} columns {knobs.warps} warps",
                more=(bound_words(knobs.ctas_per_sm),),
            ),
        )
