"""Backward over scores, family ``sm80``: attention and retnet."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Entry, Kernel, Traits
from ..shared.cells import BACKWARD_COLUMNS, backward_cells, pass_stratum
from ..shared.knobs import RENAMED_ORDERS
from . import cost, defaults, resources, rules, space
from .knobs import BackwardKnobs, KeyPass, RowPass, knobs_of


class ScoresBackwardSm80(Kernel[BackwardKnobs]):
    """mma.sync in one pass with atomics, two kernels, or three."""

    knobs = BackwardKnobs
    points = staticmethod(space.points)
    default = staticmethod(defaults.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    headings = BACKWARD_COLUMNS
    workspace_bytes = staticmethod(resources.workspace_bytes)
    renamed = RENAMED_ORDERS | {
        "fused": "one_pass",
        "pair": "two_kernels",
        "split": "three_kernels",
        "query_parts": "query_subtiles",
    }

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        op = "Attention" if candidate.score == "softmax" else "RetNet"
        return Entry(
            cpp_type=f"{op}BackwardEntry",
            header=f"{op.lower()}_entry.cuh",
            enough_ctas=resources.ENOUGH_CTAS,
        )

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        all_passes = tuple(knobs.passes.values())
        # dQ's pass beside a key pass costs little of what both cost.
        main = all_passes if knobs.keys is None else (knobs.keys,)
        return Traits(
            tile=(knobs.plan, *map(_tile, main)),
            feed=(
                knobs.cta_order,
                tuple(knobs.num_stages for knobs in all_passes),
                *map(_tile, all_passes),
            ),
            stratum=(knobs.plan, *pass_stratum(knobs.passes, _tile)),
            cells=backward_cells(candidate, knobs.plan),
            companion=knobs.dq if knobs.plan == "two_kernels" else None,
        )


def _tile(knobs: KeyPass | RowPass) -> tuple[int, ...]:
    """Rows, columns, warps and slices of a pass."""
    if isinstance(knobs, KeyPass):
        return (knobs.block_m, knobs.block_n, knobs.warp_pairs, knobs.query_subtiles)
    return (knobs.block_rows, knobs.block_columns, knobs.warps, knobs.column_warps, knobs.slices)
