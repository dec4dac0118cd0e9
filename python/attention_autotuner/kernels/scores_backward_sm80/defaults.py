"""The backward candidate that needs no tuning, from tables of passes to try first.

Which passes lead was measured on an H200 (docs/kernel_log.md); the smaller ones are for GPUs with less shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...arch.spec import ArchSpec
from ...core.problem import Problem
from ..shared.knobs import CtaOrder
from .knobs import BackwardKnobs, KeyPass, RowPass
from .space import Passes

PassKnobs = TypeVar("PassKnobs", KeyPass, RowPass)


def _keys(*, m: int, n: int, pairs: int, stages: int, ctas: int = 1) -> KeyPass:
    return KeyPass(block_m=m, block_n=n, warp_pairs=pairs, num_stages=stages, ctas_per_sm=ctas)


def _rows(*, rows: int, columns: int, warps: int, stages: int) -> RowPass:
    return RowPass(block_rows=rows, block_columns=columns, warps=warps, num_stages=stages)


@dataclass(frozen=True, kw_only=True)
class BackwardPreferences:
    """Passes to try in order: the first legal one wins whose number covers both padded head dims.

    Attributes:
        keys: (greatest padded head dim, key pass).
        dq: (greatest padded head dim, row pass for dQ beside a key pass).
    """

    keys: tuple[tuple[int, KeyPass], ...] = (
        (64, _keys(m=64, n=64, pairs=2, stages=2, ctas=3)),
        (64, _keys(m=64, n=64, pairs=2, stages=2)),
        (64, _keys(m=64, n=64, pairs=2, stages=1)),
        (128, _keys(m=64, n=128, pairs=4, stages=2)),
        (128, _keys(m=64, n=128, pairs=4, stages=1)),
        (128, _keys(m=64, n=64, pairs=4, stages=1)),
        (256, _keys(m=64, n=64, pairs=4, stages=2)),
        (256, _keys(m=64, n=64, pairs=4, stages=1)),
        (256, _keys(m=32, n=64, pairs=4, stages=2)),
        (256, _keys(m=32, n=64, pairs=4, stages=1)),
        (512, _keys(m=16, n=64, pairs=4, stages=1)),
        (512, _keys(m=32, n=32, pairs=2, stages=1)),
        (512, _keys(m=16, n=32, pairs=2, stages=1)),
    )
    dq: tuple[tuple[int, RowPass], ...] = (
        (64, _rows(rows=128, columns=64, warps=4, stages=2)),
        (128, _rows(rows=128, columns=32, warps=4, stages=2)),
        (128, _rows(rows=128, columns=32, warps=4, stages=1)),
        (256, _rows(rows=128, columns=32, warps=8, stages=2)),
    )


def _covering(table: Sequence[tuple[int, PassKnobs]], problem: Problem) -> Iterator[PassKnobs]:
    widest = problem.widest_dim
    return (knobs for up_to, knobs in table if widest <= up_to)


# By the spec's name; the others have the tables above.
PREFERENCES: dict[str, BackwardPreferences] = {}


def default(problem: Problem, spec: ArchSpec) -> BackwardKnobs | None:
    """The first passes of the tables that are legal, or None.

    One pass where the problem allows atomics and any key pass fits so, else two kernels, else three; passes that the
    tables do not have are those of the space that compile most easily.
    """
    preferences = PREFERENCES.get(spec.name, BackwardPreferences())
    passes = Passes(problem, spec)
    order: CtaOrder = "longest_first" if problem.causal else "raster"
    one_pass = None
    if not problem.deterministic:
        one_pass = passes.first_keys(_covering(preferences.keys, problem), "one_pass")
    if one_pass is not None:
        return BackwardKnobs(plan="one_pass", keys=one_pass, cta_order=order)
    if keys := passes.first_keys(_covering(preferences.keys, problem), "two_kernels"):
        dq = passes.first_rows(_covering(preferences.dq, problem), "dq")
        dq = dq or passes.easiest("dq", passes.space.dq_choices)
        if dq is None:
            return None
        return BackwardKnobs(plan="two_kernels", keys=keys, dq=dq, cta_order=order)
    dq, dk, dv = (
        passes.easiest(name, passes.space.three_kernels_choices) for name in ("dq", "dk", "dv")
    )
    if dq is None or dk is None or dv is None:
        return None
    return BackwardKnobs(plan="three_kernels", dq=dq, dk=dk, dv=dv, cta_order=order)
