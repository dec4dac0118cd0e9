"""A toy kernel family, which nothing in the package knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from attention_autotuner.arch.spec import ArchSpec
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.kernel import Kernel, Traits
from attention_autotuner.kernels.shared.cells import FORWARD_COLUMNS, bound_words, cells
from attention_autotuner.kernels.shared.coefficients import Coefficients
from attention_autotuner.kernels.shared.estimates import Estimate, Usage
from attention_autotuner.kernels.shared.passes import Pass

from . import cost, rules, space
from .knobs import NaiveKnobs, knobs_of


class NaiveSm80(Kernel[NaiveKnobs]):
    """One warp a query row, for padded head dims up to 64."""

    knobs = NaiveKnobs
    cpp_type: ClassVar[str] = "NaiveEntry"
    spills_in_loop: ClassVar[bool] = True

    def points(self, problem: Problem, spec: ArchSpec) -> Iterator[NaiveKnobs | Rejection]:
        """Every point of a problem's space; see :func:`.space.points`."""
        return space.points(problem, spec)

    def default(self, problem: Problem, spec: ArchSpec) -> NaiveKnobs | None:
        """None: a toy serves nobody who did not tune."""
        return None

    def passes(self, candidate: Candidate) -> tuple[Pass, ...]:
        """The one launch."""
        return rules.passes_of(candidate)

    def predict(
        self,
        problem: Problem,
        candidate: Candidate,
        spec: ArchSpec,
        usages: tuple[Usage, ...],
        fit: Coefficients,
    ) -> Estimate:
        """The time of a candidate; see :func:`.cost.predict`."""
        return cost.predict(problem, candidate, spec, usages, fit)

    def workspace_bytes(self, problem: Problem, candidate: Candidate) -> int:
        """None is taken."""
        return 0

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        return Traits(
            tile=("naive", knobs.warps),
            feed=(knobs.exponential,),
            stratum=("naive", knobs.warps),
            cells=cells(
                FORWARD_COLUMNS,
                candidate,
                f"{knobs.warps}x32",
                str(knobs.warps),
                "-",
                "-",
                "naive",
                more=(knobs.exponential, bound_words(knobs.ctas_per_sm)),
            ),
        )
