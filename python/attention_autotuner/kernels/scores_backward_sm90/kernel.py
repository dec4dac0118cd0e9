"""Backward over scores, family ``sm90``: retnet with an explicit mask."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Entry, Kernel, Traits
from ..shared.cells import BACKWARD_COLUMNS, backward_cells, pass_stratum
from ..shared.knobs import RENAMED_ORDERS
from . import cost, resources, rules, space
from .knobs import BackwardSm90Knobs, Sm90Pass, StoredPass, knobs_of


class ScoresBackwardSm90(Kernel[BackwardSm90Knobs]):
    """WGMMA in one pass for each gradient, no atomics."""

    knobs = BackwardSm90Knobs
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    headings = BACKWARD_COLUMNS
    workspace_bytes = staticmethod(resources.workspace_bytes)
    renamed = RENAMED_ORDERS | {
        "parts": "depth_slices",
        "part_slots": "slice_stages",
        "turns": "ping_pong",
    }

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        return Entry(cpp_type="BackwardSm90Entry", enough_ctas=resources.ENOUGH_CTAS)

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        all_passes = tuple(knobs.passes.values())
        return Traits(
            tile=(self.name, *map(_tile, all_passes)),
            feed=(knobs.cta_order, *(item.ping_pong for item in all_passes)),
            stratum=(self.name, *pass_stratum(knobs.passes, _tile)),
            cells=backward_cells(candidate, "three_kernels"),
        )


def _tile(knobs: Sm90Pass | StoredPass) -> tuple[int, ...]:
    """Rows, columns and slices of a pass."""
    return (knobs.block_rows, knobs.block_columns, knobs.depth_slices, knobs.slices)
