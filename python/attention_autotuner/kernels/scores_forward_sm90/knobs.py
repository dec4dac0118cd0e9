"""Knobs of the forward kernels over scores, family ``sm90``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.candidate import Service, knobs_as
from ..shared.knobs import ORDER_LABELS, CtaOrder, Sm90Knobs, Warpgroups


@dataclass(frozen=True, kw_only=True)
class ForwardSm90Knobs(Warpgroups, Sm90Knobs):
    """A forward kernel of family ``sm90``.

    Attributes:
        warpgroups: consumers; each owns 64 query rows.
        block_n: key rows of one step of the main loop.
        num_stages: shared-memory stages of K, V and the mask.
        v_slices: number of CTAs that share one row block, each computing its part of the value columns.
        cta_order: ``raster``: all row blocks of a head before the next head; ``longest_first``: all heads for one row
            block, the longest causal row blocks first (LPT).
    """

    kernel: ClassVar[str] = "scores_forward_sm90"
    serves: ClassVar[frozenset[Service]] = frozenset({("retnet", "forward", "masked")})

    warpgroups: int
    block_n: int
    num_stages: int
    v_slices: int = 1
    cta_order: CtaOrder = "raster"

    @property
    def block_m(self) -> int:
        """Query rows of one CTA tile."""
        return 64 * self.warpgroups

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        tile = f"g{self.warpgroups}n{self.block_n}"
        return f"{tile}_s{self.num_stages}_v{self.v_slices}_{ORDER_LABELS[self.cta_order]}"


knobs_of = knobs_as(ForwardSm90Knobs)
