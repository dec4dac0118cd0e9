"""Knobs of the backward kernels over scores, family ``sm80``: a plan of passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...core.candidate import Service, knobs_as
from ...core.modifications import COMPILED
from ..shared.knobs import ORDER_LABELS, SCORE_GRADIENTS, CtaOrder, PlannedPasses, Sm80Knobs

BackwardPlan = Literal["one_pass", "two_kernels", "three_kernels"]

PASSES_OF_PLAN: dict[str, tuple[str, ...]] = {
    "one_pass": ("keys",),
    "two_kernels": ("keys", "dq"),
    "three_kernels": ("dq", "dk", "dv"),
}


@dataclass(frozen=True, kw_only=True)
class KeyPass:
    """The pass of attention backward that gives a block of keys its dK and dV, and perhaps adds its share of dQ.

    Warps work in pairs that share key rows: one computes S and dV, the other dP and dK.

    Attributes:
        block_m: query rows of one step of the main loop.
        block_n: key rows of one CTA.
        warp_pairs: pairs of warps along the keys; each owns ``block_n / warp_pairs`` rows.
        num_stages: shared-memory stages of Q and dO. 3 is two of both and a third of Q: a tile's dK then waits for the
            next step, where it runs under the exponentials.
        query_subtiles: of a step's queries; a warp holds the scores of one at a time.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    block_m: int
    block_n: int
    warp_pairs: int
    num_stages: int
    query_subtiles: int = 1
    ctas_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 64 * self.warp_pairs

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return (
            f"m{self.block_m}n{self.block_n}p{self.warp_pairs}s{self.num_stages}"
            f"q{self.query_subtiles}b{self.ctas_per_sm}"
        )


@dataclass(frozen=True, kw_only=True)
class RowPass:
    """A pass of attention backward with one result: dQ by blocks of queries, or dK or dV by blocks of keys.

    Attributes:
        block_rows: rows of the result that one CTA computes.
        block_columns: rows of the other side (keys for dQ, queries for dK and dV) of one step of the main loop.
        warps: warps along the rows; each owns ``block_rows / warps``.
        column_warps: warps that share rows and split every step's columns; their sums are added at the end.
        num_stages: shared-memory stages of what is streamed.
        slices: CTAs that share rows and split the result's head dim.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    block_rows: int
    block_columns: int
    warps: int
    column_warps: int = 1
    num_stages: int
    slices: int = 1
    ctas_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.warps * self.column_warps

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return (
            f"r{self.block_rows}c{self.block_columns}w{self.warps}x{self.column_warps}"
            f"s{self.num_stages}v{self.slices}b{self.ctas_per_sm}"
        )


@dataclass(frozen=True, kw_only=True)
class BackwardKnobs(PlannedPasses, Sm80Knobs):
    """Attention backward: a plan of passes between a common preprocess and, for ``one_pass``, a conversion of dQ.

    Attributes:
        plan: ``one_pass``: one key pass that adds its shares of dQ to an fp32 workspace by atomics (not
            deterministic). ``two_kernels``: a key pass for dK and dV, a row pass for dQ. ``three_kernels``: a row pass
            each for dQ, dK and dV, for head dims that do not fit a key pass.
        keys: the key pass; None for ``three_kernels``.
        dq: the row pass for dQ; None for ``one_pass``.
        dk, dv: the row passes for dK and dV; None but for ``three_kernels``.
        cta_order: as in forward, for every pass.
    """

    kernel: ClassVar[str] = "scores_backward_sm80"
    serves: ClassVar[frozenset[Service]] = SCORE_GRADIENTS
    modifications: ClassVar[frozenset[str]] = frozenset(COMPILED)

    pass_names: ClassVar[tuple[str, ...]] = ("keys", "dq", "dk", "dv")

    plan: BackwardPlan
    keys: KeyPass | None = None
    dq: RowPass | None = None
    dk: RowPass | None = None
    dv: RowPass | None = None
    cta_order: CtaOrder = "raster"

    def __post_init__(self) -> None:
        names = tuple(self.passes)
        if PASSES_OF_PLAN.get(self.plan) != names:
            raise ValueError(f"plan {self.plan!r} takes other passes than {names}")

    @property
    def deterministic(self) -> bool:
        """True where two runs on equal inputs give equal bits."""
        return self.plan != "one_pass"

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return "_".join([self.plan, *self.pass_labels, ORDER_LABELS[self.cta_order]])


knobs_of = knobs_as(BackwardKnobs)
