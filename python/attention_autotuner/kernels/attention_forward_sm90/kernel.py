"""Attention forward, family ``sm90``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Kernel, Traits
from ..shared.cells import FORWARD_COLUMNS, cells
from . import cost, resources, rules, space
from .knobs import AttentionForwardSm90Knobs, knobs_of


class AttentionForwardSm90(Kernel[AttentionForwardSm90Knobs]):
    """WGMMA over tiles that a producer warpgroup loads by TMA, and a softmax that runs beside them."""

    knobs = AttentionForwardSm90Knobs
    cpp_type = "AttentionForwardSm90Entry"
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    workspace_bytes = staticmethod(resources.workspace_bytes)
    pruning = rules.PRUNING_PREDICATES

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        stages = (knobs.q_stages, knobs.k_stages, knobs.v_stages, knobs.mask_stages)
        return Traits(
            tile=(self.name, knobs.warpgroups, knobs.block_n, knobs.mainloop, knobs.pack_gqa),
            feed=(
                *stages,
                knobs.optimistic,
                knobs.ping_pong,
                knobs.kept_depth,
                knobs.output,
                knobs.schedule,
                knobs.splits,
            ),
            stratum=(self.name, knobs.warpgroups, knobs.mainloop, knobs.schedule, knobs.split_kv),
            cells=cells(
                FORWARD_COLUMNS,
                candidate,
                f"{knobs.block_m}x{knobs.block_n}",
                f"{knobs.warpgroups} groups",
                "/".join(map(str, stages)),
                f"{knobs.splits} splits" if knobs.split_kv else "-",
                knobs.schedule,
                more=(
                    knobs.mainloop.replace("_", " "),
                    "" if knobs.optimistic else "exact maxima",
                    "by turns" if knobs.ping_pong else "",
                    "packed heads" if knobs.pack_gqa else "",
                    "O from registers" if knobs.output == "direct" else "",
                    f"{knobs.kept_depth} columns of Q kept" if knobs.kept_depth else "",
                ),
            ),
            persistent=knobs.schedule != "grid",
        )
