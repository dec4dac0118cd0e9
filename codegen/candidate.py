"""The candidate: one way to solve a problem, as a kernel family and its compile-time knobs.

A candidate depends on the padded classes of the head dims only, never on the true dims or lengths, so one compiled
candidate serves every problem of its class. Which candidates are legal on which GPU is for ``arch`` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from .problem import Direction, DType, Op

Family = Literal["sm80"]
CtaOrder = Literal["rows_first", "heads_first"]

FAMILIES: tuple[str, ...] = ("sm80",)
CTA_ORDERS: tuple[str, ...] = ("rows_first", "heads_first")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel family with every knob set.

    Attributes:
        family: ``sm80``: mma.sync, ldmatrix, cp.async; runs on compute capability 8.0 and newer.
        op, direction, dtype: as in :class:`~.problem.Problem`.
        class_qk, class_v: padded head dims that the kernel is compiled for, elements.
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
        copy_bytes: width of global reads: 16, or 2 for tensors without 16-byte alignment.
    """

    family: Family
    op: Op = "attention"
    direction: Direction = "forward"
    dtype: DType
    class_qk: int
    class_v: int
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
    copy_bytes: Literal[2, 16] = 16

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.warps_m * self.warps_n

    @property
    def name(self) -> str:
        """A readable, unique name made from every field; also a valid C++ and file-system identifier."""
        parts = [
            self.op,
            self.direction,
            self.family,
            self.dtype,
            f"d{self.class_qk}x{self.class_v}",
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
            f"c{self.copy_bytes}",
        ]
        return "_".join(parts)

    @property
    def config(self) -> dict[str, Any]:
        """All fields by name, in declaration order, as JSON-ready values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Candidate:
        """Rebuild a candidate from :attr:`config`.

        Raises:
            TypeError: a field is unknown or missing.
        """
        return cls(**config)
