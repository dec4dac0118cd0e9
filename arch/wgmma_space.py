"""The candidates of family ``sm90`` for retnet's masked forward pass, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..codegen.candidate import Candidate
from ..codegen.problem import Problem
from ..codegen.wgmma_knobs import CtaOrder, WgmmaForwardKnobs
from .legality import Rejection, check
from .spec import ArchSpec
from .wgmma_legality import MAX_COLUMNS


@dataclass(frozen=True, kw_only=True)
class WgmmaSpace:
    """The values each knob may take.

    Attributes:
        tiles: (warpgroups, block_n) pairs, the first legal one being the default's.
        num_stages: stages, likewise.
        cta_orders: orders of the list of CTAs.
    """

    tiles: tuple[tuple[int, int], ...] = ((2, 128), (2, 64), (3, 128), (3, 64))
    num_stages: tuple[int, ...] = (3, 2, 1, 4)
    cta_orders: tuple[CtaOrder, ...] = ("rows_first", "heads_first")


def offered(problem: Problem, space: WgmmaSpace, spec: ArchSpec) -> list[Candidate | Rejection]:
    """Every point of the space, as a candidate or as the rejection that says why not."""
    return [check(one, spec) or one for one in _points(problem, space)]


def preferred(problem: Problem, space: WgmmaSpace, spec: ArchSpec) -> Candidate | None:
    """The first legal point, in the order of CTAs that suits the mask; None where there is none."""
    order = "heads_first" if problem.causal else "rows_first"
    points = (
        one
        for one in _points(problem, space)
        if isinstance(one.knobs, WgmmaForwardKnobs) and one.knobs.cta_order == order
    )
    return next((one for one in points if check(one, spec) is None), None)


def _points(problem: Problem, space: WgmmaSpace) -> Iterator[Candidate]:
    if (problem.op, problem.direction, problem.mask) != ("retnet", "forward", "explicit"):
        return
    slices = -(-problem.class_v // MAX_COLUMNS)  # more would repeat Q K^T for nothing
    for (warpgroups, block_n), stages, order in product(
        space.tiles, space.num_stages, space.cta_orders
    ):
        knobs = WgmmaForwardKnobs(
            warpgroups=warpgroups,
            block_n=block_n,
            num_stages=stages,
            v_slices=slices,
            cta_order=order,
        )
        yield Candidate.of(problem, "sm90", knobs)
