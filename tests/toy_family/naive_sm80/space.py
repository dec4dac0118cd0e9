"""The toy candidates that a policy offers, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from attention_autotuner.arch.spec import ArchSpec
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.shared.passes import check_passes

from .knobs import Exponential, NaiveKnobs
from .rules import passes_of

WARPS = (4, 8, 16)  # one of them illegal, which a problem's rejections then show
EXPONENTIALS: tuple[Exponential, ...] = ("exact", "approximate")


def points(problem: Problem, spec: ArchSpec) -> Iterator[NaiveKnobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    for warps, exponential in product(WARPS, EXPONENTIALS):
        knobs = NaiveKnobs(warps=warps, exponential=exponential)
        yield check_passes(Candidate.of(problem, knobs), passes_of, spec) or knobs
