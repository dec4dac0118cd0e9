"""Backward over scores, family ``sm90``: retnet with an explicit mask."""

from __future__ import annotations

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..kernel import Entry, Kernel, Traits
from ..shared.cells import BACKWARD_COLUMNS, cells, order_words
from . import cost, passes, space, workspace
from .knobs import BackwardSm90Knobs, Sm90Pass, knobs_of


class ScoresBackwardSm90(Kernel[BackwardSm90Knobs]):
    """WGMMA in one pass for each gradient, no atomics."""

    knobs = BackwardSm90Knobs
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(passes.passes_of)
    predict = staticmethod(cost.predict)

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        return Entry(cpp_type="BackwardSm90Entry", enough_ctas=workspace.ENOUGH_CTAS)

    def workspace_bytes(self, problem: Problem, candidate: Candidate) -> int:
        """Bytes of device memory that a launch takes beside its tensors."""
        return workspace.workspace_bytes(problem, candidate)

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        all_passes = tuple(knobs.passes.values())
        return Traits(
            tile=(self.name, *map(_tile, all_passes)),
            feed=(knobs.cta_order, *(one.turns for one in all_passes)),
            stratum=(
                self.name,
                *((*_tile(one)[:2], one.num_threads // 32, one.num_stages) for one in all_passes),
            ),
            cells=cells(
                BACKWARD_COLUMNS,
                candidate,
                "split",
                " ".join(f"{name}:{one.label}" for name, one in knobs.passes.items()),
                order_words(knobs.cta_order),
                more=("deterministic",),
            ),
        )

    def columns(self, problem: Problem) -> tuple[str, ...]:
        """The headings of the cells."""
        return BACKWARD_COLUMNS


def _tile(one: Sm90Pass) -> tuple[int, ...]:
    """Rows, columns, parts and slices of a pass."""
    return (one.block_rows, one.block_columns, one.parts, one.slices)
