"""Knobs of the backward kernels over scores, family ``sm80``: a plan of passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...core.candidate import Candidate, Service
from ..shared.knobs import CtaOrder, Sm80Knobs

BackwardPlan = Literal["fused", "pair", "split"]

BACKWARD_PLANS: tuple[str, ...] = ("fused", "pair", "split")


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
        query_parts: how many parts a step's queries are taken in; a warp holds the scores of one.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    block_m: int
    block_n: int
    warp_pairs: int
    num_stages: int
    query_parts: int = 1
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
            f"q{self.query_parts}b{self.ctas_per_sm}"
        )


@dataclass(frozen=True, kw_only=True)
class RowPass:
    """A pass of attention backward with one result: dQ by blocks of queries, or dK or dV by blocks of keys.

    Attributes:
        block_rows: rows of the result that one CTA computes.
        block_columns: rows of the other side (keys for dQ, queries for dK and dV) of one step of the main loop.
        warps: warps along the rows; each owns ``block_rows / warps``.
        column_warps: warps that share rows, each taking its part of every step's columns; their sums meet at the end.
        num_stages: shared-memory stages of what is streamed.
        slices: CTAs that share rows, each computing its part of the result's head dim.
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
class BackwardKnobs(Sm80Knobs):
    """Attention backward: a plan of passes between a common preparation and, for ``fused``, a conversion of dQ.

    Attributes:
        plan: ``fused``: one key pass that adds its shares of dQ to an fp32 workspace by atomics (not deterministic).
            ``pair``: a key pass for dK and dV, a row pass for dQ. ``split``: a row pass each for dQ, dK and dV, for
            head dims that a key pass has no room for.
        keys: the key pass; None for ``split``.
        dq: the row pass for dQ; None for ``fused``.
        dk, dv: the row passes for dK and dV; None but for ``split``.
        cta_order: as in forward, for every pass.
    """

    kernel: ClassVar[str] = "scores_backward_sm80"
    serves: ClassVar[frozenset[Service]] = frozenset(
        {
            ("attention", "backward", "softmax"),
            ("retnet", "backward", "masked"),
            ("retnet", "backward", "decayed"),
        }
    )

    plan: BackwardPlan
    keys: KeyPass | None = None
    dq: RowPass | None = None
    dk: RowPass | None = None
    dv: RowPass | None = None
    cta_order: CtaOrder = "rows_first"

    def __post_init__(self) -> None:
        wanted = {"fused": ("keys",), "pair": ("keys", "dq"), "split": ("dq", "dk", "dv")}
        given = tuple(
            name for name in ("keys", "dq", "dk", "dv") if getattr(self, name) is not None
        )
        if wanted.get(self.plan) != given:
            raise ValueError(f"plan {self.plan!r} takes other passes than {given}")

    @property
    def passes(self) -> dict[str, KeyPass | RowPass]:
        """The passes that the plan has, by name, in the order they run."""
        found = ((name, getattr(self, name)) for name in ("keys", "dq", "dk", "dv"))
        return {name: knobs for name, knobs in found if knobs is not None}

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest pass."""
        return max(knobs.num_threads for knobs in self.passes.values())

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return self.plan != "fused"

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        order = "rows" if self.cta_order == "rows_first" else "heads"
        passes = [f"{name}_{knobs.label}" for name, knobs in self.passes.items()]
        return "_".join([self.plan, *passes, order])


def knobs_of(candidate: Candidate) -> BackwardKnobs:
    """The knobs of a candidate of this kernel.

    Raises:
        TypeError: the candidate is of another kernel.
    """
    if not isinstance(candidate.knobs, BackwardKnobs):
        raise TypeError(f"{candidate.name} has no BackwardKnobs")
    return candidate.knobs
