"""The backward candidates that a policy offers, in a fixed order.

Passes are checked one by one and then combined, so the space is a product of passes that are legal by themselves. To
keep it small enough to rank, of a pass that a plan has beside its main one only a few are tried: those nearest to the
first value of every knob, by the number of steps that they are away from it (:func:`_by_distance`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, TypeVar

from ...arch.occupancy import REGISTERS_BESIDE_FRAGMENTS_TYPICAL, register_cap
from ...arch.spec import ArchSpec
from ...core.candidate import Rejection, rejected
from ...core.identity import plain
from ...core.problem import Problem
from ..shared.knobs import CtaOrder
from ..shared.rules import Violation
from .knobs import BackwardKnobs, BackwardPlan, KeyPass, RowPass
from .resources import KeyShape, PassShape, RowShape, key_shape, needs, row_shape
from .rules import MAX_PAIRS, MIN_WARPS, pass_of

Shape = TypeVar("Shape", KeyShape, RowShape)

MIN_PAIRS = 2  # a key pass with fewer leaves schedulers of an SM idle
MIN_SUBTILE_ROWS = 32  # queries of one of several subtiles: each reads all of the keys' operands
FULL_WARPS = 4  # so does a row pass with fewer
MAX_WHOLE_COLUMNS = 256  # a result as wide as this fits its warps' registers, so it is not sliced


@dataclass(frozen=True, kw_only=True)
class BackwardSpace:
    """The values each knob may take, the most promising first.

    Attributes:
        block_m: query rows of a key pass's step.
        block_n: key rows of a key pass's CTA.
        rows_per_warp: key rows that a pair of warps owns.
        row_tiles: (block_rows, warps, column_warps) of row passes.
        block_columns: columns of a row pass's step.
        query_subtiles: subtiles of a key pass's step whose scores are held at a time.
        key_stages, row_stages: stages of what streams.
        slices: CTAs that share rows of a row pass.
        ctas_per_sm: launch bounds.
        cta_orders: the orders of the list of CTAs.
        dq_choices: dQ passes that a key pass is combined with.
        three_kernels_choices: passes of each result in a plan of three kernels.
    """

    block_m: tuple[int, ...] = (64, 128, 32, 96, 16)
    block_n: tuple[int, ...] = (128, 64, 256, 96, 192, 32)
    rows_per_warp: tuple[int, ...] = (32, 16, 64)
    row_tiles: tuple[tuple[int, int, int], ...] = (
        (128, 4, 1),
        (128, 8, 1),
        (64, 4, 1),
        (256, 8, 1),
        (64, 2, 2),
        (32, 2, 2),
        (64, 2, 1),
        (32, 2, 1),
    )
    block_columns: tuple[int, ...] = (64, 32, 128, 16)
    query_subtiles: tuple[int, ...] = (1, 2)
    key_stages: tuple[int, ...] = (2, 1, 3)
    row_stages: tuple[int, ...] = (2, 1)
    slices: tuple[int, ...] = (1, 2, 3, 4)
    ctas_per_sm: tuple[int, ...] = (1, 2, 3)
    cta_orders: tuple[CtaOrder, ...] = ("raster", "longest_first")
    dq_choices: int = 4
    three_kernels_choices: int = 4


SPACES: dict[str, BackwardSpace] = {}  # by the spec's name; the others have the values above


def points(problem: Problem, spec: ArchSpec) -> Iterator[BackwardKnobs | Rejection]:
    """Every point of the space as knobs, and every pass that is not legal as a rejection.

    Where the problem asks for determinism, plans that are not deterministic are no points of its space.
    """
    passes = Passes(problem, spec)
    space = passes.space
    one_pass = [] if problem.deterministic else passes.keys("one_pass")
    two_kernels = passes.keys("two_kernels")
    rows = [passes.rows(name) for name in ("dq", "dk", "dv")]
    for order in space.cta_orders:
        for keys in one_pass:
            yield BackwardKnobs(plan="one_pass", keys=keys, cta_order=order)
        for keys, dq in product(two_kernels, rows[0][: space.dq_choices]):
            yield BackwardKnobs(plan="two_kernels", keys=keys, dq=dq, cta_order=order)
        for dq, dk, dv in product(*(choices[: space.three_kernels_choices] for choices in rows)):
            yield BackwardKnobs(plan="three_kernels", dq=dq, dk=dk, dv=dv, cta_order=order)
    for shape, violation in passes.rejected:
        plan = {"plan": "one_pass"} if isinstance(shape, KeyShape) and shape.one_pass else {}
        yield rejected(problem, BackwardKnobs, plan | {shape.name: plain(shape.knobs)}, violation)


class Passes:
    """The legal passes of a problem.

    Attributes:
        space: the values of the knobs.
        rejected: the others, with the rule that they break.
    """

    def __init__(self, problem: Problem, spec: ArchSpec) -> None:
        self.space = SPACES.get(spec.name, BackwardSpace())
        self._problem = problem
        self._spec = spec
        self.rejected: list[tuple[PassShape, Violation]] = []

    def first_keys(self, choices: Iterable[KeyPass], plan: BackwardPlan) -> KeyPass | None:
        """The first key pass that is legal under a plan, or None."""
        shape = next(self._legal(self._key_shape(keys, plan) for keys in choices), None)
        return None if shape is None else shape.knobs

    def first_rows(self, choices: Iterable[RowPass], name: str) -> RowPass | None:
        """The first row pass that is legal for a result, or None."""
        shape = next(self._legal(row_shape(self._problem, name, rows) for rows in choices), None)
        return None if shape is None else shape.knobs

    def _key_shape(self, keys: KeyPass, plan: BackwardPlan) -> KeyShape:
        """A key pass under a plan."""
        return key_shape(self._problem, keys, one_pass=plan == "one_pass")

    def keys(self, plan: BackwardPlan) -> list[KeyPass]:
        """All legal key passes under a plan."""
        shapes = (self._key_shape(keys, plan) for keys in _key_points(self.space))
        return [shape.knobs for shape in self._legal(shapes)]

    def rows(self, name: str) -> list[RowPass]:
        """The legal row passes for a result that are worth a try, by distance."""
        shapes = [row_shape(self._problem, name, rows) for rows in _row_points(self.space)]
        shapes = [s for s in shapes if s.knobs.slices == 1 or s.result_dim > MAX_WHOLE_COLUMNS]
        return _in_few_kinds(list(self._legal(shapes)))

    def easiest(self, name: str, count: int) -> RowPass | None:
        """The first of so many :meth:`rows` that leaves the compiler the registers it likes, or just the first."""
        choices = self.rows(name)[:count]
        easy = (rows for rows in choices if self._is_easy(row_shape(self._problem, name, rows)))
        return next(easy, choices[0] if choices else None)

    def _is_easy(self, shape: RowShape) -> bool:
        kernel = needs(shape)
        wanted = kernel.fragment_registers + REGISTERS_BESIDE_FRAGMENTS_TYPICAL
        return wanted <= register_cap(kernel, self._spec)

    def _legal(self, shapes: Iterable[Shape]) -> Iterator[Shape]:
        for shape in shapes:
            violation = pass_of(shape).violation_on(self._spec)
            if violation is None:
                yield shape
            else:
                self.rejected.append((shape, violation))


@lru_cache
def _key_points(space: BackwardSpace) -> tuple[KeyPass, ...]:
    points = product(
        space.block_m,
        space.block_n,
        space.rows_per_warp,
        space.query_subtiles,
        space.key_stages,
        space.ctas_per_sm,
    )
    return tuple(
        KeyPass(
            block_m=block_m,
            block_n=block_n,
            warp_pairs=block_n // rows,
            num_stages=stages,
            query_subtiles=subtiles,
            ctas_per_sm=ctas,
        )
        for block_m, block_n, rows, subtiles, stages, ctas in points
        if block_n % rows == 0
        and MIN_PAIRS <= block_n // rows <= MAX_PAIRS
        # Whole steps only where dK waits for the next one: see keys_query_subtiles_divide.
        and (subtiles == 1 or (block_m // subtiles >= MIN_SUBTILE_ROWS and stages < 3))
    )


@lru_cache
def _row_points(space: BackwardSpace) -> tuple[RowPass, ...]:
    points = _by_distance(
        space.slices, space.row_tiles, space.block_columns, space.row_stages, space.ctas_per_sm
    )
    return tuple(
        RowPass(
            block_rows=block_rows,
            block_columns=columns,
            warps=warps,
            column_warps=column_warps,
            num_stages=stages,
            slices=slices,
            ctas_per_sm=ctas,
        )
        for slices, (block_rows, warps, column_warps), columns, stages, ctas in points
        if columns % (16 * column_warps) == 0
    )


def _by_distance(*knobs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The product of the knobs' values, ordered by the steps that all of them together are from their first."""
    places = product(*(range(len(values)) for values in knobs))
    return [
        tuple(values[place] for values, place in zip(knobs, point, strict=True))
        for point in sorted(places, key=lambda point: (sum(point), point))
    ]


def _in_few_kinds(shapes: list[RowShape]) -> list[RowPass]:
    """The legal row passes that are worth a try.

    Warps share rows only where the rows do not fill an SM's schedulers, and schedulers are idle only where that fails
    too. Slices repeat the scores, so only the two least numbers of them are tried.
    """
    for column_warps, least in ((1, FULL_WARPS), (2, FULL_WARPS), (1, MIN_WARPS)):
        fitting = [
            shape
            for shape in shapes
            if shape.knobs.column_warps == column_warps
            and shape.knobs.warps * column_warps >= least
        ]
        if not fitting:
            continue
        slices = sorted({shape.knobs.slices for shape in fitting})
        return [shape.knobs for shape in fitting if shape.knobs.slices in slices[:2]]
    return []
