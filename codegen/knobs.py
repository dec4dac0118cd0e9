"""Knobs: what there is to choose about a kernel family's kernels, one frozen class per operation and direction.

``label`` is the part of a candidate's name that a knob class contributes: unique, readable, and valid in C++ and file
names. A new operation brings a knob class of its own and an entry in :data:`KNOBS` here and in :mod:`.kernel_names`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Direction, Op
from .retention_knobs import (
    ChunkPass,
    ChunkwiseKnobs,
    RecurrentKnobs,
    RetentionBackwardKnobs,
    WgmmaChunkwiseKnobs,
)
from .wgmma_knobs import CtaOrder, WgmmaBackwardKnobs, WgmmaForwardKnobs

BackwardPlan = Literal["fused", "pair", "split"]

CTA_ORDERS: tuple[str, ...] = ("rows_first", "heads_first")
BACKWARD_PLANS: tuple[str, ...] = ("fused", "pair", "split")


@dataclass(frozen=True, kw_only=True)
class ForwardKnobs:
    """Attention forward.

    Attributes:
        block_m: query rows of one CTA tile.
        block_n: key rows of one step of the main loop.
        warps_m: warps along the query rows; each owns ``block_m / warps_m`` rows.
        warps_n: warps along keys (first product) and value columns (second product). 1 keeps P in registers; more
            pass P through shared memory.
        num_stages: shared-memory stages of the K/V pipeline.
        q_in_registers: Q fragments are loaded once into registers and Q's shared memory is reused for K/V.
        qk_ahead: the next tile's Q K^T is issued before this tile's softmax, so the two can overlap.
        k_slice: columns of K loaded per step of the first product; equal to ``class_qk`` when K is not sliced.
        v_slices: number of CTAs that share one row block, each computing ``class_v / v_slices`` output columns.
        persistent: one CTA per resident slot loops over tiles, instead of one CTA per tile.
        cta_order: ``rows_first`` walks the row blocks of a head before the next head; ``heads_first`` walks all
            heads for one row block, the longest causal row blocks first.
        ctas_per_sm: resident CTAs that the compiler must leave registers for (the launch bound).
    """

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int = 1
    num_stages: int
    q_in_registers: bool = False
    qk_ahead: bool = False
    k_slice: int
    v_slices: int = 1
    persistent: bool = False
    cta_order: CtaOrder = "rows_first"
    ctas_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.warps_m * self.warps_n

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return True

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return "_".join(
            [
                f"m{self.block_m}n{self.block_n}",
                f"w{self.warps_m}x{self.warps_n}",
                f"s{self.num_stages}",
                f"k{self.k_slice}",
                f"v{self.v_slices}",
                "qreg" if self.q_in_registers else "qsmem",
                "ahead" if self.qk_ahead else "inorder",
                "persistent" if self.persistent else "grid",
                "rows" if self.cta_order == "rows_first" else "heads",
                f"b{self.ctas_per_sm}",
            ]
        )


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
class BackwardKnobs:
    """Attention backward: a plan of passes between a common preparation and, for ``fused``, a conversion of dQ.

    Attributes:
        plan: ``fused``: one key pass that adds its shares of dQ to an fp32 workspace by atomics (not deterministic).
            ``pair``: a key pass for dK and dV, a row pass for dQ. ``split``: a row pass each for dQ, dK and dV, for
            head dims that a key pass has no room for.
        keys: the key pass; None for ``split``.
        dq: the row pass for dQ; None for ``fused``.
        dk, dv: the row passes for dK and dV; None but for ``split``.
        cta_order: as in :class:`ForwardKnobs`, for every pass.
    """

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


@dataclass(frozen=True, kw_only=True)
class ParallelKnobs:
    """Retention's parallel form: attention's kernel with a decay for the output, a pass over chunks for the states.

    Attributes:
        rows: the kernel over blocks of query rows.
        chunk: tokens of one step of the pass over chunks.
        states: that pass.
    """

    rows: ForwardKnobs
    chunk: int
    states: ChunkPass

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest kernel."""
        return max(self.rows.num_threads, self.states.num_threads)

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return True

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return f"parallel_{self.rows.label}_l{self.chunk}_{self.states.label}"


Knobs = (
    ForwardKnobs
    | WgmmaForwardKnobs
    | BackwardKnobs
    | WgmmaBackwardKnobs
    | ParallelKnobs
    | ChunkwiseKnobs
    | WgmmaChunkwiseKnobs
    | RecurrentKnobs
    | RetentionBackwardKnobs
)

KNOBS: dict[tuple[Op, Direction], tuple[type[Knobs], ...]] = {
    ("attention", "forward"): (ForwardKnobs,),
    ("attention", "backward"): (BackwardKnobs,),
    ("retnet", "forward"): (ForwardKnobs, WgmmaForwardKnobs),
    ("retnet", "backward"): (BackwardKnobs, WgmmaBackwardKnobs),
    ("retention", "forward"): (
        ParallelKnobs,
        ChunkwiseKnobs,
        WgmmaChunkwiseKnobs,
        RecurrentKnobs,
    ),
    ("retention", "backward"): (RetentionBackwardKnobs,),
}
"""(op, direction) -> its knob classes: one for each form and family that it has."""
