"""The matrix product of family ``sm90``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Kernel, Traits
from ..shared.cells import FORWARD_COLUMNS, cells
from . import cost, resources, rules, space
from .knobs import GemmSm90Knobs, knobs_of


class GemmSm90(Kernel[GemmSm90Knobs]):
    """C = A B of fp16 or bf16, each factor by rows or by columns."""

    knobs = GemmSm90Knobs
    cpp_type = "GemmSm90Entry"
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    workspace_bytes = staticmethod(resources.workspace_bytes)

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        tile = (knobs.schedule, knobs.block_m, knobs.block_n)
        return Traits(
            tile=(self.name, *tile, knobs.splits),
            feed=(knobs.cluster, knobs.output, knobs.row_blocks),
            stratum=(self.name, *tile, knobs.stages),
            cells=cells(
                FORWARD_COLUMNS,
                candidate,
                f"{knobs.block_m}x{knobs.block_n}",
                f"{knobs.warpgroups} groups",
                str(knobs.stages),
                f"{knobs.splits} splits" if knobs.splits > 1 else "-",
                knobs.schedule.replace("_", "-"),
                more=(
                    f"cluster of {knobs.cluster}" if knobs.cluster > 1 else "",
                    "C from registers" if knobs.output == "direct" else "",
                    f"{knobs.row_blocks} row blocks",
                ),
            ),
            persistent=True,
        )
