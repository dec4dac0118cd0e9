"""The candidates of family ``sm90`` for retnet's masked forward pass, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ...arch.spec import ArchSpec
from ...core.candidate import Rejection
from ...core.problem import Problem
from ..shared.knobs import CtaOrder
from ..shared.passes import first_legal, points_of
from ..shared.sm90_tiles import MAX_COLUMNS
from .knobs import ForwardSm90Knobs
from .rules import passes_of


@dataclass(frozen=True, kw_only=True)
class ForwardSm90Space:
    """The values each knob may take.

    Attributes:
        tiles: (warpgroups, block_n) pairs, the first legal one being the default's.
        num_stages: stages, likewise.
        cta_orders: orders of the list of CTAs.
    """

    tiles: tuple[tuple[int, int], ...] = ((2, 128), (2, 64), (3, 128), (3, 64))
    num_stages: tuple[int, ...] = (3, 2, 1, 4)
    cta_orders: tuple[CtaOrder, ...] = ("raster", "longest_first")


SPACES: dict[str, ForwardSm90Space] = {}  # by the spec's name; the others have the values above


def points(problem: Problem, spec: ArchSpec) -> Iterator[ForwardSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    return points_of(problem, spec, _points(problem, spec), passes_of)


def default(problem: Problem, spec: ArchSpec) -> ForwardSm90Knobs | None:
    """The first legal point, in the order of CTAs that suits the mask; None where there is none."""
    order = "longest_first" if problem.causal else "raster"
    ordered = (knobs for knobs in _points(problem, spec) if knobs.cta_order == order)
    return first_legal(problem, spec, ordered, passes_of)


def _points(problem: Problem, spec: ArchSpec) -> Iterator[ForwardSm90Knobs]:
    space = SPACES.get(spec.name, ForwardSm90Space())
    slices = -(-problem.padded_dim_v // MAX_COLUMNS)  # more would repeat Q K^T for nothing
    for (warpgroups, block_n), stages, order in product(
        space.tiles, space.num_stages, space.cta_orders
    ):
        yield ForwardSm90Knobs(
            warpgroups=warpgroups,
            block_n=block_n,
            num_stages=stages,
            v_slices=slices,
            cta_order=order,
        )
