"""The problem: what a caller wants computed, as plain numbers, before anyone decides how.

A :class:`Problem` is frozen, hashable and free of torch. Two problems that are equal may share a tuned pick; two that
round to the same padded class (:attr:`Problem.class_qk`, :attr:`Problem.class_v`) may share a compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..errors import UnsupportedProblemError

Op = Literal["attention"]
Direction = Literal["forward", "backward"]
DType = Literal["fp16", "bf16"]
CausalAlignment = Literal["bottom_right", "top_left"]

OPS: tuple[str, ...] = ("attention",)
DIRECTIONS: tuple[str, ...] = ("forward", "backward")
DTYPES: tuple[str, ...] = ("fp16", "bf16")
CAUSAL_ALIGNMENTS: tuple[str, ...] = ("bottom_right", "top_left")

DIM_MULTIPLE = 8  # elements; one 16-byte access of a 2-byte type
DIM_CLASS = (
    16  # elements; head dims are compiled for the next multiple of this (the k of one mma.sync)
)
MAX_DIM_QK = 256
MAX_DIM_V = 512
MAX_EXTENT = 2**30  # rows plus causal offset stay within 32-bit arithmetic in the kernels


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UnsupportedProblemError(message)


def padded_class(dim: int) -> int:
    """The compiled head dim that serves a true head dim: the next multiple of 16."""
    return -(-dim // DIM_CLASS) * DIM_CLASS


def bucket_seqlen(seqlen: int) -> int:
    """The power of two that a sequence length is recorded under: the nearest one above, at least 16."""
    return 1 << max(4, (seqlen - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation on one shape.

    Attributes:
        op: the operation.
        direction: which pass.
        dtype: element type of q, k, v and the output; accumulation is always fp32.
        batch: number of independent sequences.
        heads_q: query heads; a multiple of ``heads_kv``.
        heads_kv: key/value heads.
        seqlen_q: query rows per head.
        seqlen_k: key rows per head.
        dim_qk: head dim of q and k, a multiple of 8 up to 256.
        dim_v: head dim of v and of the output, a multiple of 8 up to 512.
        causal: whether row i is kept from keys beyond its diagonal.
        causal_alignment: ``bottom_right``: row i sees keys j <= i + seqlen_k - seqlen_q; ``top_left``: j <= i.
        alignment_bytes: 16 when all pointers and strides allow 16-byte accesses, else 2.
        deterministic: only kernels whose results agree bit for bit between runs may serve. A matter of ``backward``:
            every forward kernel is so, and a forward problem does not say it.

    Raises:
        UnsupportedProblemError: a field is outside these limits.
    """

    op: Op = "attention"
    direction: Direction = "forward"
    dtype: DType = "fp16"
    batch: int = 4
    heads_q: int = 16
    heads_kv: int = 16
    seqlen_q: int = 4096
    seqlen_k: int = 4096
    dim_qk: int = 128
    dim_v: int = 128
    causal: bool = False
    causal_alignment: CausalAlignment = "bottom_right"
    alignment_bytes: Literal[2, 16] = 16
    deterministic: bool = False

    def __post_init__(self) -> None:
        _require(self.op in OPS, f"op must be one of {OPS}, got {self.op!r}")
        _require(
            self.direction in DIRECTIONS,
            f"direction must be one of {DIRECTIONS} for {self.op}, got {self.direction!r}",
        )
        _require(self.dtype in DTYPES, f"dtype must be one of {DTYPES}, got {self.dtype!r}")
        for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} must be at least 1, got {value}")
            _require(value <= MAX_EXTENT, f"{name} must be at most 2**30, got {value}")
        _require(
            self.heads_q % self.heads_kv == 0,
            f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}",
        )
        for name, limit in (("dim_qk", MAX_DIM_QK), ("dim_v", MAX_DIM_V)):
            value = getattr(self, name)
            _require(
                value >= DIM_MULTIPLE and value % DIM_MULTIPLE == 0,
                f"{name} must be a positive multiple of {DIM_MULTIPLE}, got {value}",
            )
            _require(value <= limit, f"{name} must be at most {limit}, got {value}")
        _require(
            self.causal_alignment in CAUSAL_ALIGNMENTS,
            f"causal_alignment must be one of {CAUSAL_ALIGNMENTS}, got {self.causal_alignment!r}",
        )
        _require(
            self.alignment_bytes in (2, 16),
            f"alignment_bytes must be 2 or 16, got {self.alignment_bytes}",
        )
        _require(
            not self.deterministic or self.direction == "backward",
            "deterministic is for backward problems: every forward kernel is, got deterministic=True",
        )

    @property
    def class_qk(self) -> int:
        """Compiled head dim of q and k, elements."""
        return padded_class(self.dim_qk)

    @property
    def class_v(self) -> int:
        """Compiled head dim of v and o, elements."""
        return padded_class(self.dim_v)

    @property
    def causal_offset(self) -> int:
        """Row i sees keys j <= i + causal_offset (meaningful when ``causal``)."""
        return self.seqlen_k - self.seqlen_q if self.causal_alignment == "bottom_right" else 0

    @property
    def flops(self) -> int:
        """Floating-point operations by the field's convention, halved when causal.

        Forward: 2 b h sq sk (dqk + dv). Backward: 2 b h sq sk (3 dqk + 2 dv), whatever a plan computes twice.
        """
        full = 2 * self.batch * self.heads_q * self.seqlen_q * self.seqlen_k
        if self.direction == "forward":
            full *= self.dim_qk + self.dim_v
        else:
            full *= 3 * self.dim_qk + 2 * self.dim_v
        return full // 2 if self.causal else full

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes through device memory, each tensor read or written once.

        Forward: q, k, v and o. Backward: q, k, v, o, the gradient of o and those of q, k, v, and the LSE in fp32.
        """
        rows_q = self.batch * self.heads_q * self.seqlen_q
        rows_k = self.batch * self.heads_kv * self.seqlen_k
        if self.direction == "forward":
            return 2 * (rows_q + rows_k) * (self.dim_qk + self.dim_v)
        both = 2 * (
            self.dim_qk + self.dim_v
        )  # elements of a row of q and dq, o and do; of k and dk, v and dv
        return 2 * (rows_q + rows_k) * both + 4 * rows_q

    def bucketed(self) -> Problem:
        """The same problem with sequence lengths rounded up to their record buckets."""
        return replace(
            self, seqlen_q=bucket_seqlen(self.seqlen_q), seqlen_k=bucket_seqlen(self.seqlen_k)
        )

    def describe(self) -> str:
        """One line for tables and logs, e.g. ``attention forward fp16 b4 h16 s4096 d128 causal``."""
        heads = f"h{self.heads_q}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        seqlen = f"s{self.seqlen_q}" + (
            f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else ""
        )
        dims = f"d{self.dim_qk}" + (f"/{self.dim_v}" if self.dim_v != self.dim_qk else "")
        mask = ""
        if self.causal:
            mask = " causal" if self.causal_alignment == "bottom_right" else " causal-top-left"
        narrow = " narrow" if self.alignment_bytes == 2 else ""
        narrow += " deterministic" if self.deterministic else ""
        return f"{self.op} {self.direction} {self.dtype} b{self.batch} {heads} {seqlen} {dims}{mask}{narrow}"
