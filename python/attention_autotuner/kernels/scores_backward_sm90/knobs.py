"""Knobs of the backward kernels over scores, family ``sm90``: one pass for each gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.candidate import Candidate, Service
from ..shared.knobs import CtaOrder, Sm90Knobs, Warpgroups


@dataclass(frozen=True, kw_only=True)
class Sm90Pass(Warpgroups):
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
class BackwardSm90Knobs(Sm90Knobs):
    """Retnet backward in family ``sm90``: after a common preparation, a pass for each result.

    Attributes:
        dq, dk, dv: the passes.
        cta_order: as in :class:`~.ForwardSm90Knobs`, for every pass.
    """

    kernel: ClassVar[str] = "scores_backward_sm90"
    serves: ClassVar[frozenset[Service]] = frozenset({("retnet", "backward", "masked")})

    dq: Sm90Pass
    dk: Sm90Pass
    dv: Sm90Pass
    cta_order: CtaOrder = "rows_first"

    @property
    def passes(self) -> dict[str, Sm90Pass]:
        """The passes by name, in the order they run."""
        return {"dq": self.dq, "dk": self.dk, "dv": self.dv}

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest pass."""
        return max(one.num_threads for one in self.passes.values())

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        order = "rows" if self.cta_order == "rows_first" else "heads"
        passes = [f"{name}_{one.label}" for name, one in self.passes.items()]
        return "_".join([*passes, order])


def knobs_of(candidate: Candidate) -> BackwardSm90Knobs:
    """The knobs of a candidate of this kernel.

    Raises:
        TypeError: the candidate is of another kernel.
    """
    if not isinstance(candidate.knobs, BackwardSm90Knobs):
        raise TypeError(f"{candidate.name} has no BackwardSm90Knobs")
    return candidate.knobs
