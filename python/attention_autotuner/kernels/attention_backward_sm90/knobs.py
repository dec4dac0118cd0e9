"""Knobs of attention's backward kernel of family ``sm90``: how the results are shared out among passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.candidate import Service, knobs_as
from ...core.identity import LATER, later_words
from ...core.modifications import COMPILED
from ..shared.knobs import (
    ORDER_LABELS,
    SCORE_GRADIENTS,
    CtaOrder,
    PlannedPasses,
    Sm90Knobs,
    Warpgroups,
)

Decomposition = Literal["fused", "two_pass", "three_pass"]
IssueOrder = Literal["serial", "scores_ahead", "both_ahead", "interleaved", "by_turns"]
DqBy = Literal["keys", "own"]
DqAdd = Literal["reduce", "bulk", "ordered", "stored", "queued"]
STORED: frozenset[DqAdd] = frozenset({"stored", "queued"})  # of a tile, the first share

PASSES: dict[Decomposition, tuple[str, ...]] = {
    "fused": ("keys",),
    "two_pass": ("keys", "dq"),
    "three_pass": ("dk", "dv", "dq"),
}
ISSUE_LABELS: dict[IssueOrder, str] = {
    "serial": "s",
    "scores_ahead": "a",
    "both_ahead": "b",
    "interleaved": "i",
    "by_turns": "t",
}


@dataclass(frozen=True, kw_only=True)
class BackwardPassSm90(Warpgroups):
    """A pass of attention backward: over blocks of keys for dK, dV or both, or over blocks of queries for dQ.

    Attributes:
        warpgroups: consumers; each owns 64 rows of the results, unless they share rows.
        block_columns: rows of the other side (queries, or keys for dQ) of one step of the main loop.
        issue_order: what of the next step is issued before the results of this one. ``serial``: nothing;
            ``scores_ahead``: S; ``both_ahead``: S and dP; ``interleaved``: S, after dP and dV and before dK and dQ;
            ``by_turns``: S, before dK, then dQ, dV and dP, each of S, dQ and dP in the same registers.
        first_stages: shared-memory stages of what streams for S: Q, or K for dQ.
        second_stages: of what streams for dP: dO, or V for dQ.
        held_rows: True where the rows' own operands, K and V or Q and dO, are read into registers once.
        mask_stages: of an explicit mask; 0 without one.
        shared_rows: True where two warpgroups share 64 keys: one has P and dV, the other dS and dK.
    """

    warpgroups: int = 2
    block_columns: int
    issue_order: IssueOrder = field(metadata=later_words("by_turns"))
    first_stages: int = 2
    second_stages: int = 2
    held_rows: bool = False
    mask_stages: int = field(default=0, metadata=LATER)
    shared_rows: bool = field(default=False, metadata=LATER)

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        order, held = ISSUE_LABELS[self.issue_order], "h" * self.held_rows
        stages = f"{self.first_stages}x{self.second_stages}"
        mask = f"m{self.mask_stages}" if self.mask_stages else ""
        shared = "r" * self.shared_rows
        return f"g{self.warpgroups}c{self.block_columns}{order}{stages}{held}{mask}{shared}"


@dataclass(frozen=True, kw_only=True)
class DqShareSm90:
    """The share of dQ that a pass over keys adds to fp32 sums in the workspace.

    Attributes:
        dq_by: who computes it. ``keys``: the warpgroups of the keys; ``own``: a warpgroup of its own.
        ds_stages: shared-memory stages of dS.
        dq_add: how it is added. ``reduce``: from registers; ``bulk``: through shared memory, by bulk copies that
            nothing waits for; ``ordered``: from registers, CTAs in the order of their keys, so that equal inputs give
            equal bits; ``stored``: by bulk copies of a thread of its own, which stores the first share of a tile to
            come, so that no kernel clears the sums; ``queued``: the same in the order of keys, the last first, or of
            visits, where a head's blocks of keys begin at queries of their own (CTAs that stay, without a mask).
    """

    dq_by: DqBy
    ds_stages: int = 2
    dq_add: DqAdd = field(default="bulk", metadata=later_words("stored", "queued"))

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return f"{self.dq_by}{self.ds_stages}{self.dq_add}"


@dataclass(frozen=True, kw_only=True)
class AttentionBackwardSm90Knobs(PlannedPasses, Sm90Knobs):
    """Attention backward of family ``sm90``: passes between a preprocess of rows and, if ``fused``, the end of dQ.

    Attributes:
        decomposition: ``fused``: one pass over keys, which adds its shares of dQ; ``two_pass``: one over keys and one
            over queries; ``three_pass``: one for each result, for head dims whose dK and dV do not fit a warpgroup.
        keys: the pass for dK and dV; None for ``three_pass``.
        dk, dv: the passes for each; of ``three_pass`` only.
        dq: the pass over queries; None for ``fused``.
        dq_share: of ``fused`` only.
        cta_order: of every pass. ``raster``: a head's blocks in turn; ``longest_first``: sections of heads that fit in
            L2 together, and of a section all heads for one block before the next, the longest causal ones first.
        persistent: True where CTAs stay and take every n-th block, whose loads begin while the one before is written.
        dynamic: True where those that stay claim the next block when they have loaded one, so that uneven blocks leave
            no CTA behind; dK and dV leave through shared memory. Of ``fused`` only.
        early_launches: True where each kernel of a call begins before the one ahead has ended (programmatic dependent
            launch), with what it needs nothing of that one for.
        gathered_stores: True where lanes exchange results until each has 16 bytes of a row to store, not four.
    """

    kernel: ClassVar[str] = "attention_backward_sm90"
    serves: ClassVar[frozenset[Service]] = SCORE_GRADIENTS
    modifications: ClassVar[frozenset[str]] = frozenset(COMPILED)

    pass_names: ClassVar[tuple[str, ...]] = ("keys", "dk", "dv", "dq")

    decomposition: Decomposition
    keys: BackwardPassSm90 | None = None
    dk: BackwardPassSm90 | None = None
    dv: BackwardPassSm90 | None = None
    dq: BackwardPassSm90 | None = None
    dq_share: DqShareSm90 | None = None
    cta_order: CtaOrder = "raster"
    persistent: bool = False
    early_launches: bool = field(default=False, metadata=LATER)
    gathered_stores: bool = field(default=False, metadata=LATER)
    dynamic: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        names = tuple(self.passes)
        if PASSES.get(self.decomposition) != names:
            raise ValueError(f"{self.decomposition!r} takes other passes than {names}")
        if (self.decomposition == "fused") != (self.dq_share is not None):
            raise ValueError(f"a share of dQ belongs to 'fused', got {self.decomposition!r}")

    @property
    def owns_dq(self) -> bool:
        """True where a warpgroup does nothing but the share of dQ."""
        return self.dq_share is not None and self.dq_share.dq_by == "own"

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest pass."""
        return super().num_threads + 128 * self.owns_dq

    @property
    def deterministic(self) -> bool:
        """True where two runs on equal inputs give equal bits."""
        return self.dq_share is None or self.dq_share.dq_add in ("ordered", "queued")

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        share = [] if self.dq_share is None else [self.dq_share.label]
        return "_".join(
            [
                self.decomposition,
                *self.pass_labels,
                *share,
                ORDER_LABELS[self.cta_order],
                *["persistent"] * self.persistent,
                *["early"] * self.early_launches,
                *["gathered"] * self.gathered_stores,
                *["dynamic"] * self.dynamic,
            ]
        )


knobs_of = knobs_as(AttentionBackwardSm90Knobs)
