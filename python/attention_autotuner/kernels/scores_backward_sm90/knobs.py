"""Knobs of the backward kernels over scores, family ``sm90``: one pass for each gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...core.candidate import Service, knobs_as
from ...core.identity import LATER
from ..shared.knobs import ORDER_LABELS, CtaOrder, PlannedPasses, Sm90Knobs, Warpgroups


@dataclass(frozen=True, kw_only=True)
class Sm90Pass(Warpgroups):
    """A pass of retnet backward with one result: dQ by blocks of queries, or dK or dV by blocks of keys.

    Attributes:
        warpgroups: consumers; each owns 64 rows of the result.
        block_columns: rows of the other side (keys for dQ, queries for dK and dV) of one step of the main loop.
        num_stages: shared-memory stages of the second MMA's tiles and of the mask.
        depth_slices: slices of the head dim in which the first MMA's streamed tiles arrive.
        slice_stages: shared-memory stages of such slices.
        slices: CTAs that share rows and split the result's head dim.
        ping_pong: consumer warpgroups issue their MMAs by turns, so that one modifies scores while another's MMAs run.
        exchange_stages: stages of P that the two slices of a result send each other, as a cluster in which each
            computes ``block_columns`` of a step's scores; 0 where each computes all of them. Tiles of both MMAs then
            go through one ring of ``slice_stages`` slots, each in ``depth_slices`` slices.
        kept_depth: columns of the first MMA's left tile that stay in registers, so that shared memory is read less.
    """

    warpgroups: int
    block_columns: int
    num_stages: int
    depth_slices: int = 1
    slice_stages: int
    slices: int = 1
    ping_pong: bool = False
    exchange_stages: int = field(default=0, metadata=LATER)
    kept_depth: int = field(default=0, metadata=LATER)

    @property
    def block_rows(self) -> int:
        """Rows of the result that one CTA computes."""
        return 64 * self.warpgroups

    @property
    def step_columns(self) -> int:
        """Rows of the other side of one step of the CTAs that share its scores."""
        return self.block_columns * (self.slices if self.exchange_stages else 1)

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        tile = f"g{self.warpgroups}c{self.block_columns}s{self.num_stages}"
        ping_pong = "t" if self.ping_pong else ""
        kept = f"k{self.kept_depth}" if self.kept_depth else ""
        exchange = f"e{self.exchange_stages}" if self.exchange_stages else ""
        return f"{tile}p{self.depth_slices}x{self.slice_stages}v{self.slices}{ping_pong}{exchange}{kept}"


@dataclass(frozen=True, kw_only=True)
class StoredPass(Warpgroups):
    """A pass for dK that multiplies the scores dS which dQ's pass has stored, and computes none.

    Attributes:
        warpgroups: consumers.
        warpgroup_rows: rows of dK of each.
        num_stages: shared-memory stages of 64 queries: of their scores and of Q.
    """

    warpgroups: int = 2
    warpgroup_rows: int
    num_stages: int

    depth_slices: ClassVar[int] = 1
    slices: ClassVar[int] = 1
    ping_pong: ClassVar[bool] = False
    block_columns: ClassVar[int] = 64
    step_columns: ClassVar[int] = 64

    @property
    def block_rows(self) -> int:
        """Rows of dK that one CTA computes."""
        return self.warpgroup_rows * self.warpgroups

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return f"g{self.warpgroups}r{self.warpgroup_rows}s{self.num_stages}"


@dataclass(frozen=True, kw_only=True)
class BackwardSm90Knobs(PlannedPasses, Sm90Knobs):
    """Retnet backward in family ``sm90``: after a common preprocess, a pass for each result.

    Attributes:
        dq, dk, dv: the passes.
        stored_dk: the pass for dK in the place of ``dk``, which is None then: dQ's pass stores its scores for a band of
            heads at a time, and this one multiplies them.
        cta_order: of every pass; ``raster``: all blocks of rows of a head before the next head; ``longest_first``: all
            heads for one block of rows, the longest causal ones first (LPT).
        gathered_stores: True where lanes exchange results until each has 16 bytes of a row to store, not four.
    """

    kernel: ClassVar[str] = "scores_backward_sm90"
    serves: ClassVar[frozenset[Service]] = frozenset({("retnet", "backward", "masked")})

    pass_names: ClassVar[tuple[str, ...]] = ("dq", "dk", "stored_dk", "dv")

    dq: Sm90Pass
    dk: Sm90Pass | None
    stored_dk: StoredPass | None = field(default=None, metadata=LATER)
    dv: Sm90Pass
    cta_order: CtaOrder = "raster"
    gathered_stores: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        if (self.dk is None) == (self.stored_dk is None):
            raise ValueError(
                "dK takes one pass: dk, or stored_dk where its scores are stored; got "
                f"dk={self.dk}, stored_dk={self.stored_dk}"
            )

    @property
    def dk_rows(self) -> int:
        """Rows of dK that one CTA computes."""
        rows: int = self.passes["stored_dk" if self.dk is None else "dk"].block_rows
        return rows

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        gathered = ["gathered"] * self.gathered_stores
        return "_".join([*self.pass_labels, ORDER_LABELS[self.cta_order], *gathered])


knobs_of = knobs_as(BackwardSm90Knobs)
