"""Attention backward, family ``sm90``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Entry, Kernel, Traits
from ..shared.cells import BACKWARD_COLUMNS, backward_cells
from . import cost, defaults, resources, rules, space
from .knobs import AttentionBackwardSm90Knobs, knobs_of


class AttentionBackwardSm90(Kernel[AttentionBackwardSm90Knobs]):
    """WGMMA over tiles that a producer loads by TMA, in one pass that adds dQ or in two or three without atomics."""

    knobs = AttentionBackwardSm90Knobs
    points = staticmethod(space.points)
    default = staticmethod(defaults.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    headings = BACKWARD_COLUMNS
    workspace_bytes = staticmethod(resources.workspace_bytes)
    pruning = rules.PRUNING_PREDICATES

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        named = {"cpp_type": "AttentionBackwardSm90Entry"}
        if candidate.score != "softmax":
            named = {"cpp_type": "RetNetBackwardSm90Entry", "header": "retnet_entry.cuh"}
        return Entry(**named, enough_ctas=resources.ENOUGH_CTAS)

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        passes = tuple(knobs.passes.values())
        share = () if knobs.dq_share is None else (knobs.dq_share.dq_by, knobs.dq_share.dq_add)
        dq_by = "" if knobs.dq_share is None else f"dQ by {knobs.dq_share.dq_by}"
        tiles = tuple((item.warpgroups, item.block_columns) for item in passes)
        return Traits(
            tile=(self.name, knobs.decomposition, tiles),
            feed=(share, knobs.cta_order, tuple(item.issue_order for item in passes)),
            stratum=(self.name, knobs.decomposition, tiles, share),
            persistent=True,  # in form: of one tile where the grid has a CTA for each
            cells=backward_cells(candidate, knobs.decomposition, dq_by),
        )
