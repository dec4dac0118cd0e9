"""Forward over scores, family ``sm90``: retnet with an explicit mask."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Entry, Kernel, Traits
from ..shared.cells import FORWARD_COLUMNS, cells, order_words
from ..shared.knobs import RENAMED_ORDERS
from . import cost, rules, space
from .knobs import ForwardSm90Knobs, knobs_of


class ScoresForwardSm90(Kernel[ForwardSm90Knobs]):
    """WGMMA over tiles that a producer warpgroup loads by TMA."""

    knobs = ForwardSm90Knobs
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    renamed = RENAMED_ORDERS

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        return Entry(cpp_type="ForwardSm90Entry")

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        slices = f"v/{knobs.v_slices}" if knobs.v_slices > 1 else "-"
        return Traits(
            tile=(self.name, knobs.warpgroups, knobs.block_n, knobs.v_slices),
            feed=(knobs.num_stages, knobs.cta_order),
            stratum=(knobs.block_m, knobs.block_n, knobs.num_threads // 32, knobs.num_stages),
            cells=cells(
                FORWARD_COLUMNS,
                candidate,
                f"{knobs.block_m}x{knobs.block_n}",
                f"{knobs.warpgroups} groups",
                str(knobs.num_stages),
                slices,
                order_words(knobs.cta_order),
            ),
        )
