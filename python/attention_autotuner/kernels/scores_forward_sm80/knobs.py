"""Knobs of the forward kernels over scores, family ``sm80``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...core.candidate import Service, knobs_as, launch_knob
from ...core.identity import LATER
from ...core.modifications import COMPILED
from ...core.problem import Form
from ..chunks_sm80.knobs import ChunkPass
from ..shared.knobs import ORDER_LABELS, CtaOrder, Sm80Knobs
from ..shared.split_kv import check_splits, split_words


@dataclass(frozen=True, kw_only=True)
class ForwardKnobs(Sm80Knobs):
    """Forward over scores: one kernel over blocks of query rows, and for retention a pass over chunks for the states.

    Attributes:
        block_m: query rows of one CTA tile.
        block_n: key rows of one step of the main loop.
        warps_m: warps along the query rows; each owns ``block_m / warps_m`` rows.
        warps_n: warps along keys (Q K^T) and value columns (P V). 1 keeps P in registers; more pass P through shared
            memory.
        num_stages: shared-memory stages of the K/V pipeline.
        q_in_registers: Q fragments are loaded once into registers and Q's shared memory is reused for K/V.
        qk_ahead: the next tile's Q K^T is issued before this tile's softmax, so the two can overlap.
        k_slice: columns of K loaded per step of Q K^T; equal to ``padded_dim_qk`` when K is not sliced.
        v_slices: number of CTAs that share one row block, each computing ``padded_dim_v / v_slices`` output columns.
        persistent: one CTA per resident slot loops over tiles, instead of one CTA per tile.
        cta_order: ``raster``: all row blocks of a head before the next head; ``longest_first``: all heads for one row
            block, the longest causal row blocks first (LPT).
        ctas_per_sm: resident CTAs that the compiler must leave registers for (the launch bound).
        chunk: tokens of one step of the pass over chunks; None without it.
        states: that pass, of kernel ``chunks_sm80``, which gives retention's parallel form its states; None for others.
        pack_gqa: the rows of a tile are pairs of a query and a head, of the heads that share one of K and V.
        split_kv: CTAs may share the keys of a tile of rows; a second kernel combines their results.
        splits: CTAs that do, at most one for each tile of keys.

    Raises:
        ValueError: ``chunk`` without ``states`` or the reverse; ``splits`` is none, or more than one without
            ``split_kv``.
    """

    kernel: ClassVar[str] = "scores_forward_sm80"
    serves: ClassVar[frozenset[Service]] = frozenset(
        {
            ("attention", "forward", "softmax"),
            ("retnet", "forward", "masked"),
            ("retnet", "forward", "decayed"),
            ("retention", "forward", "decayed"),
        }
    )
    modifications: ClassVar[frozenset[str]] = frozenset(COMPILED)

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
    cta_order: CtaOrder = "raster"
    ctas_per_sm: int = 1
    chunk: int | None = None
    states: ChunkPass | None = None
    pack_gqa: bool = field(default=False, metadata=LATER)
    split_kv: bool = field(default=False, metadata=LATER)
    splits: int = launch_knob(1, **LATER)

    def __post_init__(self) -> None:
        check_splits(self)
        if (self.chunk is None) != (self.states is None):
            raise ValueError(f"chunk and states go together, got {self.chunk} and {self.states}")

    @property
    def row_threads(self) -> int:
        """Threads of one CTA of the kernel over blocks of rows."""
        return 32 * self.warps_m * self.warps_n

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest kernel."""
        return max(self.row_threads, 0 if self.states is None else self.states.num_threads)

    @property
    def form(self) -> Form:
        """``parallel`` of retention."""
        return "auto" if self.states is None else "parallel"

    @property
    def row_label(self) -> str:
        """The part of the name that the kernel over blocks of rows has."""
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
                ORDER_LABELS[self.cta_order],
                f"b{self.ctas_per_sm}",
                *split_words(self),
            ]
        )

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        if self.states is None:
            return self.row_label
        return f"parallel_{self.row_label}_l{self.chunk}_{self.states.label}"


knobs_of = knobs_as(ForwardKnobs)
