"""The retnet backward candidates of family ``sm90`` that a policy offers, and the one that needs no tuning.

A candidate takes one kind of tile for its three passes. What follows from a tile, each pass has as its own head dims
allow: as many stages as fit, and where not even two do, streamed tiles of the first product in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..codegen.candidate import Candidate
from ..codegen.problem import Problem
from ..codegen.wgmma_knobs import CtaOrder, WgmmaBackwardKnobs, WgmmaPass
from .legality import Rejection, check
from .spec import ArchSpec
from .wgmma_backward_legality import MAX_SLOTS, MAX_STAGES, pass_broken
from .wgmma_backward_resources import WgmmaPassShape, shapes, smem_bytes
from .wgmma_legality import MAX_COLUMNS
from .wgmma_resources import SWIZZLE_COLUMNS


@dataclass(frozen=True, kw_only=True)
class WgmmaBackwardSpace:
    """The values each knob may take.

    Attributes:
        tiles: (warpgroups, block_columns) pairs.
        turns: whether products are issued in turns, where a pass can.
        cta_orders: orders of the list of CTAs.
    """

    tiles: tuple[tuple[int, int], ...] = ((2, 128), (3, 64), (2, 64))
    turns: tuple[bool, ...] = (True, False)
    cta_orders: tuple[CtaOrder, ...] = ("rows_first", "heads_first")


def offered(
    problem: Problem, space: WgmmaBackwardSpace, spec: ArchSpec
) -> list[Candidate | Rejection]:
    """Every point of the space, as a candidate or as the rejection that says why not."""
    return [check(one, spec) or one for one in _points(problem, space, spec)]


def preferred(problem: Problem, space: WgmmaBackwardSpace, spec: ArchSpec) -> Candidate | None:
    """The first legal point, in the order of CTAs that suits the mask; None where there is none.

    Wide results do without turns: their warpgroups weigh little beside what they multiply.
    """
    order: CtaOrder = "heads_first" if problem.causal else "rows_first"
    widest = max(problem.class_qk, problem.class_v)
    chosen = replace(space, turns=(widest < MAX_COLUMNS,), cta_orders=(order,))
    return next((one for one in _points(problem, chosen, spec) if check(one, spec) is None), None)


def _points(problem: Problem, space: WgmmaBackwardSpace, spec: ArchSpec) -> Iterator[Candidate]:
    if (problem.op, problem.direction, problem.mask) != ("retnet", "backward", "explicit"):
        return
    seen: set[str] = set()
    for (groups, columns), turns, order in product(space.tiles, space.turns, space.cta_orders):
        slices = -(-problem.class_v // MAX_COLUMNS)
        plain = WgmmaPass(
            warpgroups=groups, block_columns=columns, num_stages=1, part_slots=2, turns=turns
        )
        knobs = WgmmaBackwardKnobs(
            dq=plain, dk=plain, dv=replace(plain, slices=slices), cta_order=order
        )
        whole = Candidate.of(problem, "sm90", knobs)
        dq, dk, dv = (fit(shape, spec) or shape.knobs for shape in shapes(whole))
        found = replace(whole, knobs=replace(knobs, dq=dq, dk=dk, dv=dv))
        if found.name not in seen:
            seen.add(found.name)
            yield found


def fit(shape: WgmmaPassShape, spec: ArchSpec) -> WgmmaPass | None:
    """A pass with all the stages that shared memory has room for; None where it has none for one."""
    for stages in range(MAX_STAGES, 1, -1):
        found = replace(shape.knobs, num_stages=stages, part_slots=stages)
        if _fits(shape, found, spec):
            return found
    blocks = shape.depth // SWIZZLE_COLUMNS
    for slots in range(MAX_SLOTS, 2, -1):
        found = replace(
            shape.knobs,
            num_stages=1,
            parts=blocks,
            part_slots=slots,
            turns=shape.knobs.turns and blocks == 1,
        )
        if _fits(shape, found, spec):
            return found
    return None


def _fits(shape: WgmmaPassShape, knobs: WgmmaPass, spec: ArchSpec) -> bool:
    made = replace(shape, knobs=knobs)
    return pass_broken(made) is None and smem_bytes(made) <= spec.smem_per_block_bytes
