"""The recurrent candidates that a policy offers, in a fixed order, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ...arch.spec import ArchSpec
from ...core.candidate import Rejection
from ...core.problem import Problem
from ..shared.forms import default_form, forms
from ..shared.passes import first_legal, points_of
from .knobs import RecurrentKnobs
from .rules import passes_of


@dataclass(frozen=True, kw_only=True)
class RecurrentSpace:
    """The values each knob may take, the most promising first.

    Attributes:
        tiles: (columns, warps) pairs.
        ctas_per_sm: launch bounds.
    """

    tiles: tuple[tuple[int, int], ...] = tuple(product((64, 32, 16, 8, 128), (8, 4, 2, 1, 16)))
    ctas_per_sm: tuple[int, ...] = (2, 1, 4)


SPACES: dict[str, RecurrentSpace] = {}  # by the spec's name; the others have the values above


def points(problem: Problem, spec: ArchSpec) -> Iterator[RecurrentKnobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    if "recurrent" in forms(problem):
        yield from points_of(problem, spec, _points(spec), passes_of)


def default(problem: Problem, spec: ArchSpec) -> RecurrentKnobs | None:
    """The first legal point, where the form serves untuned."""
    if default_form(problem) != "recurrent":
        return None
    return first_legal(problem, spec, _points(spec), passes_of)


def _points(spec: ArchSpec) -> Iterator[RecurrentKnobs]:
    space = SPACES.get(spec.name, RecurrentSpace())
    for (columns, warps), ctas in product(space.tiles, space.ctas_per_sm):
        yield RecurrentKnobs(columns=columns, warps=warps, ctas_per_sm=ctas)
