"""Retention forward token by token, family ``sm80``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, Rejection
from ...core.problem import Problem
from ..kernel import Entry, Kernel, Traits
from ..shared.cells import RETENTION_COLUMNS, bound_words, cells
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usage
from ..shared.passes import Pass
from . import cost, passes, space
from .knobs import RecurrentKnobs, knobs_of


class RecurrentSm80(Kernel[RecurrentKnobs]):
    """A CTA keeps some columns of a head's state in registers."""

    knobs = RecurrentKnobs
    spills_in_loop: ClassVar[bool] = True

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        return Entry(cpp_type="RecurrentEntry")

    def points(self, problem: Problem, spec: ArchSpec) -> Iterator[RecurrentKnobs | Rejection]:
        """Every point of a problem's space; see :func:`.space.points`."""
        return space.points(problem, spec)

    def default(self, problem: Problem, spec: ArchSpec) -> RecurrentKnobs | None:
        """What serves a problem that nobody tuned; see :func:`.space.default`."""
        return space.default(problem, spec)

    def passes(self, candidate: Candidate) -> tuple[Pass, ...]:
        """The launches that the knobs size, in the order they run."""
        return passes.passes_of(candidate)

    def predict(
        self,
        problem: Problem,
        candidate: Candidate,
        spec: ArchSpec,
        usages: tuple[Usage, ...],
        coefficients: Coefficients,
    ) -> Estimate:
        """The time of a candidate; see :func:`.cost.predict`."""
        return cost.predict(problem, candidate, spec, usages, coefficients)

    def workspace_bytes(self, problem: Problem, candidate: Candidate) -> int:
        """0: states stay in registers."""
        return 0

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

    def columns(self, problem: Problem) -> tuple[str, ...]:
        """The headings of the cells."""
        return RETENTION_COLUMNS
