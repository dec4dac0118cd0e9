"""Knobs of family ``sm90`` over scores: kernels whose warpgroups multiply while threads of another load by maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CtaOrder = Literal["rows_first", "heads_first"]


class Warpgroups:
    """What the knobs of all kernels of family ``sm90`` say: one warpgroup is beside those that they count.

    Attributes:
        warpgroups: those.
    """

    warpgroups: int

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 128 * (1 + self.warpgroups)

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return True


@dataclass(frozen=True, kw_only=True)
class WgmmaForwardKnobs(Warpgroups):
    """A forward kernel of family ``sm90``.

    Attributes:
        warpgroups: that multiply; each owns 64 query rows.
        block_n: key rows of one step of the main loop.
        num_stages: shared-memory stages of K, V and the mask.
        v_slices: number of CTAs that share one row block, each computing its part of the value columns.
        cta_order: ``rows_first`` walks the row blocks of a head before the next head; ``heads_first`` walks all
            heads for one row block, the longest causal row blocks first.
    """

    warpgroups: int
    block_n: int
    num_stages: int
    v_slices: int = 1
    cta_order: CtaOrder = "rows_first"

    @property
    def block_m(self) -> int:
        """Query rows of one CTA tile."""
        return 64 * self.warpgroups

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        order = "rows" if self.cta_order == "rows_first" else "heads"
        tile = f"g{self.warpgroups}n{self.block_n}"
        return f"{tile}_s{self.num_stages}_v{self.v_slices}_{order}"


@dataclass(frozen=True, kw_only=True)
class WgmmaPass(Warpgroups):
    """A pass of retnet backward with one result: dQ by blocks of queries, or dK or dV by blocks of keys.

    Attributes:
        warpgroups: that multiply; each owns 64 rows of the result.
        block_columns: rows of the other side (keys for dQ, queries for dK and dV) of one step of the main loop.
        num_stages: shared-memory stages of the second product's tiles and of the mask.
        parts: how many parts the head dim of the first product's streamed tiles comes in.
        part_slots: shared-memory slots of such parts.
        slices: CTAs that share rows, each computing its part of the result's head dim.
        turns: whether warpgroups issue their products in turns, so that one weighs while another multiplies.
    """

    warpgroups: int
    block_columns: int
    num_stages: int
    parts: int = 1
    part_slots: int
    slices: int = 1
    turns: bool = False

    @property
    def block_rows(self) -> int:
        """Rows of the result that one CTA computes."""
        return 64 * self.warpgroups

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        tile = f"g{self.warpgroups}c{self.block_columns}s{self.num_stages}"
        turns = "t" if self.turns else ""
        return f"{tile}p{self.parts}x{self.part_slots}v{self.slices}{turns}"


@dataclass(frozen=True, kw_only=True)
class WgmmaBackwardKnobs:
    """Retnet backward in family ``sm90``: after a common preparation, a pass for each result.

    Attributes:
        dq, dk, dv: the passes.
        cta_order: as in :class:`WgmmaForwardKnobs`, for every pass.
    """

    dq: WgmmaPass
    dk: WgmmaPass
    dv: WgmmaPass
    cta_order: CtaOrder = "rows_first"

    @property
    def passes(self) -> dict[str, WgmmaPass]:
        """The passes by name, in the order they run."""
        return {"dq": self.dq, "dk": self.dk, "dv": self.dv}

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest pass."""
        return max(one.num_threads for one in self.passes.values())

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return True

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        order = "rows" if self.cta_order == "rows_first" else "heads"
        passes = [f"{name}_{one.label}" for name, one in self.passes.items()]
        return "_".join([*passes, order])
