"""The problem: what a caller wants computed, as plain numbers, before anyone decides how.

A :class:`Problem` is frozen, hashable and free of torch. Two problems that are equal may share a tuned pick; two that
round to the same padded class (:attr:`Problem.class_qk`, :attr:`Problem.class_v`) may share a compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import UnsupportedProblemError

Op = Literal["attention", "retnet", "retention"]
Direction = Literal["forward", "backward"]
DType = Literal["fp16", "bf16"]
CausalAlignment = Literal["bottom_right", "top_left"]
Mask = Literal["none", "explicit", "decay"]
Form = Literal["auto", "parallel", "chunkwise", "recurrent"]
Shape = tuple[int, int, int, int, int]  # batch, heads, seqlen, dim_qk, dim_v

OPS: tuple[str, ...] = ("attention", "retnet", "retention")
DIRECTIONS: tuple[str, ...] = ("forward", "backward")
DTYPES: tuple[str, ...] = ("fp16", "bf16")
CAUSAL_ALIGNMENTS: tuple[str, ...] = ("bottom_right", "top_left")
MASKS: tuple[str, ...] = ("none", "explicit", "decay")
FORMS: tuple[str, ...] = ("auto", "parallel", "chunkwise", "recurrent")

DIM_MULTIPLE = 8  # elements; one 16-byte access of a 2-byte type
DIM_CLASS = (
    16  # elements; head dims are compiled for the next multiple of this (the k of one mma.sync)
)
MAX_DIM_QK = 256
MAX_DIM_V = 512
MAX_RETENTION_SEQUENCES = 65535  # batch times heads: the second extent of a CUDA grid
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
        op: ``attention``: softmax attention. ``retnet``: retention with a mask or a decay and, usually, a normaliser.
            ``retention``: retention with decay that carries a state.
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
        mask: of retnet: ``explicit``, a tensor, or ``decay``, powers of gamma that are never stored. A decay is causal.
        form: of retention forward: how it must be computed; ``auto`` leaves that to the tuner.

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
    mask: Mask = "none"
    form: Form = "auto"

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
        self._check_retention()

    def _check_retention(self) -> None:
        _require(self.mask in MASKS, f"mask must be one of {MASKS}, got {self.mask!r}")
        _require(self.form in FORMS, f"form must be one of {FORMS}, got {self.form!r}")
        _require(
            (self.op == "retnet") == (self.mask != "none"),
            f"mask must be 'explicit' or 'decay' for retnet and 'none' for others, got {self.mask!r} for {self.op}",
        )
        _require(
            self.form == "auto" or (self.op, self.direction) == ("retention", "forward"),
            f"form is for retention forward, got {self.form!r} for {self.op} {self.direction}",
        )
        _require(
            self.op == "attention" or self.causal_alignment == "bottom_right",
            f"causal_alignment must be 'bottom_right' for {self.op}, got {self.causal_alignment!r}",
        )
        decays = self.op == "retention" or self.mask == "decay"
        _require(self.causal or not decays, f"{self.op} with decay is causal, got causal=False")
        sequences = self.batch * self.heads_q
        _require(
            self.op != "retention" or sequences <= MAX_RETENTION_SEQUENCES,
            f"batch * heads_q must be at most {MAX_RETENTION_SEQUENCES} for retention, got {sequences}",
        )
        _require(
            self.op != "retention" or self.seqlen_q == self.seqlen_k,
            f"retention takes as many queries as keys, got {self.seqlen_q} and {self.seqlen_k}",
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

        Forward: 2 b h sq sk (dqk + dv). Backward: 2 b h sq sk (3 dqk + 2 dv), whatever a plan computes twice. Retention
        is counted as a recurrence: 2 b h s dqk dv for each product of a token with a state, two forward and five
        backward.
        """
        rows = 2 * self.batch * self.heads_q * self.seqlen_q
        if self.op == "retention":
            products = 2 if self.direction == "forward" else 5
            return rows * self.dim_qk * self.dim_v * products
        full = rows * self.seqlen_k
        if self.direction == "forward":
            full *= self.dim_qk + self.dim_v
        else:
            full *= 3 * self.dim_qk + 2 * self.dim_v
        return full // 2 if self.causal else full

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes through device memory, each tensor read or written once.

        Forward: q, k, v and o. Backward: q, k, v, o, the gradient of o and those of q, k, v, and the LSE in fp32.
        An explicit mask of every head is read, and retention reads and writes a state (and its gradient).
        """
        rows_q = self.batch * self.heads_q * self.seqlen_q
        rows_k = self.batch * self.heads_kv * self.seqlen_k
        more = 2 * self.heads_q * self.seqlen_q * self.seqlen_k if self.mask == "explicit" else 0
        if self.op == "retention":
            more += 2 * 4 * self.batch * self.heads_q * self.dim_qk * self.dim_v
        dims = self.dim_qk + self.dim_v
        if self.direction == "forward":
            return 2 * (rows_q + rows_k) * dims + more
        if self.op == "retention":  # reads no o and no LSE
            return 2 * (2 * rows_k * dims + rows_q * (dims + self.dim_qk)) + 2 * more
        # elements of a row of q and dq, o and do; of k and dk, v and dv
        return 2 * (rows_q + rows_k) * 2 * dims + 4 * rows_q + more

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
        op = self.op if self.form == "auto" else f"{self.op} {self.form}"
        mask += f" {self.mask}" if self.op == "retnet" else ""
        return f"{op} {self.direction} {self.dtype} b{self.batch} {heads} {seqlen} {dims}{mask}{narrow}"


def of_shape(shape: Shape, **fields: Any) -> Problem:
    """A problem with as many heads of k and v as of q, and as many keys as queries.

    Args:
        shape: batch, heads, seqlen, dim_qk and dim_v.
        fields: the others of :class:`Problem`.

    Raises:
        UnsupportedProblemError: as :class:`Problem`.
    """
    batch, heads, seqlen, dim_qk, dim_v = shape
    return Problem(
        batch=batch,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        dim_qk=dim_qk,
        dim_v=dim_v,
        **fields,
    )
