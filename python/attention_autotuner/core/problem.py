"""The problem: the computation that a caller wants, as plain numbers, before the choice of a kernel.

A :class:`Problem` is frozen, hashable and free of torch. Two problems that are equal may share a tuned pick; two that
round to the same padded head dims (:attr:`Problem.padded_dim_qk`, :attr:`Problem.padded_dim_v`) may share a compiled
kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

from .identity import LATER
from .modifications import PACKED, SPANNED, SPANS, VALUED, WINDOW, in_order
from .operation import Semantics, require
from .packing import typical_lengths

Op = str  # a name in operations.registry
Direction = Literal["forward", "backward"]
DType = Literal["fp16", "bf16"]
CausalAlignment = Literal["bottom_right", "top_left"]
Mask = Literal["none", "explicit", "decay"]
Form = Literal["auto", "parallel", "chunkwise", "recurrent"]
# The modification of Q K^T that a kernel is compiled with.
Score = Literal["softmax", "masked", "decayed", "none"]
Operands = Literal["nn", "nt", "tn", "tt"]
Shape = tuple[int, int, int, int, int]  # batch, heads, seqlen, dim_qk, dim_v

DIRECTIONS: tuple[str, ...] = ("forward", "backward")
DTYPES: tuple[str, ...] = ("fp16", "bf16")
CAUSAL_ALIGNMENTS: tuple[str, ...] = ("bottom_right", "top_left")
MASKS: tuple[str, ...] = ("none", "explicit", "decay")
OPERANDS: tuple[Operands, ...] = ("nn", "nt", "tn", "tt")
FORMS: tuple[str, ...] = ("auto", "parallel", "chunkwise", "recurrent")

EXTENTS = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k")
DIM_MULTIPLE = 8  # elements; one 16-byte access of a 2-byte type
DIM_PADDING = 16  # elements; head dims are compiled for its next multiple, the k of one mma.sync
NO_WINDOW = (-1, -1)
NOT_PACKED = (0, 0)
MAX_EXTENT = 2**30  # rows plus causal offset stay within 32-bit arithmetic in the kernels


_SEMANTICS: dict[str, Semantics] = {}  # no functools.cache, of which torch.compile warns


def _semantics() -> Mapping[str, Semantics]:
    if not _SEMANTICS:
        # The registry stands above this module: each operation's semantics is written in terms of a problem.
        from ..operations.registry import OPERATIONS

        _SEMANTICS.update({name: operation.semantics for name, operation in OPERATIONS.items()})
    return _SEMANTICS


def operations() -> tuple[str, ...]:
    """The names of all operations."""
    return tuple(_semantics())


def is_integer(value: object) -> bool:
    """True for an int and for torch's SymInt, a length under torch.compile; this module does not import torch."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or type(value).__name__ == "SymInt"


def is_pair(value: object, least: int) -> TypeGuard[Sequence[Any]]:
    """True for two integers from ``least`` to :data:`MAX_EXTENT`."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(is_integer(x) and least <= x <= MAX_EXTENT for x in value)
    )


def score_of(op: Op, mask: Mask) -> Score:
    """The score modification that an operation asks of a kernel under a mask.

    Raises:
        TypeError: there is no such operation, or it takes no such mask.
    """
    semantics = _semantics().get(op)
    if semantics is None or mask not in semantics.scores:
        raise TypeError(f"there is no {op} with mask {mask!r}")
    return semantics.scores[mask]


def padded_dim(dim: int) -> int:
    """The compiled head dim that serves a true head dim: the next multiple of 16."""
    return -(-dim // DIM_PADDING) * DIM_PADDING


FEW_QUERIES = 64  # the rows of the least tile
LENGTH_STEP = 16  # tokens, to whose multiples lengths are rounded where defaults go by tiles


def round_seqlen(seqlen: int) -> int:
    """The multiple of 16 that a default is chosen for where defaults go by tiles: the nearest one above."""
    return -(-seqlen // LENGTH_STEP) * LENGTH_STEP


def bucket_seqlen(seqlen: int) -> int:
    """The power of two that a sequence length is recorded under: the nearest one above, at least 16."""
    return 1 << max(4, (seqlen - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation on one shape.

    Attributes:
        op: ``attention``: softmax attention. ``retnet``: retention with a mask or a decay and, usually, a normaliser.
            ``retention``: retention with decay that carries a state. ``gemm``: a matrix product, of ``seqlen_q`` rows,
            ``dim_qk`` columns that are summed over and ``dim_v`` columns of the result.
        direction: which pass.
        dtype: element type of q, k, v and the output; accumulation is always fp32.
        batch: number of independent sequences.
        heads_q: query heads; a multiple of ``heads_kv``.
        heads_kv: key/value heads.
        seqlen_q: query rows per head.
        seqlen_k: key rows per head.
        dim_qk: head dim of q and k, a multiple of 8 up to 256 (of gemm: 2**30).
        dim_v: head dim of v and of the output, a multiple of 8 up to 512 (of gemm: 2**30).
        causal: whether row i is kept from keys beyond its diagonal.
        causal_alignment: ``bottom_right``: row i sees keys j <= i + seqlen_k - seqlen_q; ``top_left``: j <= i.
        alignment_bytes: 16 when all pointers and strides allow 16-byte accesses, else 2.
        deterministic: only kernels whose results agree bit for bit between runs may serve. A matter of ``backward``:
            every forward kernel is so, and a forward problem does not say it.
        mask: of retnet: ``explicit``, a tensor, or ``decay``, powers of gamma that are never stored. A decay is causal.
        form: of retention forward: how it must be computed; ``auto`` leaves that to the tuner.
        key_bounds: of attention forward: each batch entry has a first key and an end of its own, in tensors.
        modifications: of attention: what bends its scores, names of ``VALUED`` in any order; their
            values are no part of a problem.
        window_size: of attention: the keys that a row sees before and after its diagonal, -1 for no bound. It holds
            besides ``causal``.
        packed_rows: of attention and retention: the rows of q and of k in all sequences together, where these lie one
            after the other in one batch entry; ``batch`` then counts them, and ``seqlen_q`` and ``seqlen_k`` are the
            greatest lengths.
        documents: of attention with ``document_ids``: how many a sequence has, as far as costs go; 0 for one in every
            1024 rows.
        operands: of gemm: for each factor ``n`` where it lies by rows, ``t`` where it lies by columns.

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
    key_bounds: bool = field(default=False, metadata=LATER)
    modifications: tuple[str, ...] = field(default=(), metadata=LATER)
    window_size: tuple[int, int] = field(default=NO_WINDOW, metadata=LATER)
    packed_rows: tuple[int, int] = field(default=NOT_PACKED, metadata=LATER)
    operands: Operands = field(default="nn", metadata=LATER)
    documents: int = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        self._require_one("op", operations())
        self._require_one("direction", DIRECTIONS, f" for {self.op}")
        self._require_one("dtype", DTYPES)
        for name in (*EXTENTS, "dim_qk", "dim_v", "alignment_bytes", "documents"):
            value = getattr(self, name)
            require(is_integer(value), f"{name} must be an integer, got {value!r}")
        for name in ("causal", "deterministic", "key_bounds"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")
        for name in EXTENTS:
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, got {value}")
            require(value <= MAX_EXTENT, f"{name} must be at most 2**30, got {value}")
        require(
            self.heads_q % self.heads_kv == 0,
            f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}",
        )
        for name, limit in zip(("dim_qk", "dim_v"), self.semantics.max_dims, strict=True):
            value = getattr(self, name)
            require(
                value >= DIM_MULTIPLE and value % DIM_MULTIPLE == 0,
                f"{name} must be a positive multiple of {DIM_MULTIPLE}, got {value}",
            )
            require(value <= limit, f"{name} must be at most {limit}, got {value}")
        self._require_one("causal_alignment", CAUSAL_ALIGNMENTS)
        require(
            self.alignment_bytes in (2, 16),
            f"alignment_bytes must be 2 or 16, got {self.alignment_bytes}",
        )
        require(
            not self.deterministic or self.direction == "backward",
            "deterministic is for backward problems: every forward kernel is, got deterministic=True",
        )
        self._require_one("mask", MASKS)
        self._require_one("form", FORMS)
        self._require_one("operands", OPERANDS)
        object.__setattr__(self, "modifications", in_order(self.modifications, VALUED))
        window: Any = self.window_size
        require(
            is_pair(window, -1),
            f"window_size must be two integers from -1 to 2**30, got {window!r}",
        )
        object.__setattr__(self, "window_size", tuple(window))  # records have lists
        rows: Any = self.packed_rows
        require(
            is_pair(rows, 0) and (rows[0] > 0) == (rows[1] > 0),
            f"packed_rows must be two integers from 1 to 2**30, or (0, 0), got {rows!r}",
        )
        object.__setattr__(self, "packed_rows", tuple(rows))
        self.semantics.check(self)

    def _require_one(self, name: str, words: tuple[str, ...], place: str = "") -> None:
        word = getattr(self, name)
        require(word in words, f"{name} must be one of {words}{place}, got {word!r}")

    @property
    def semantics(self) -> Semantics:
        """The semantics of its operation."""
        return _semantics()[self.op]

    @property
    def score(self) -> Score:
        """The score modification that its kernels are compiled with."""
        return self.semantics.scores[self.mask]

    @property
    def decodes(self) -> bool:
        """True where a call reads and writes states, as a step of decoding does."""
        return self.semantics.decodes(self)

    @property
    def padded_dim_qk(self) -> int:
        """Compiled head dim of q and k, elements."""
        return padded_dim(self.dim_qk) if self.semantics.compiles_dims else DIM_PADDING

    @property
    def padded_dim_v(self) -> int:
        """Compiled head dim of v and o, elements."""
        return padded_dim(self.dim_v) if self.semantics.compiles_dims else DIM_PADDING

    @property
    def widest_dim(self) -> int:
        """The larger of the compiled head dims, elements."""
        return max(self.padded_dim_qk, self.padded_dim_v)

    @property
    def causal_offset(self) -> int:
        """Row i sees keys j <= i + causal_offset (meaningful when ``causal``)."""
        return self.offset_of(self.seqlen_q, self.seqlen_k)

    def offset_of(self, rows: int, keys: int) -> int:
        """The causal offset of a sequence of its own lengths."""
        return keys - rows if self.causal_alignment == "bottom_right" else 0

    @property
    def packed(self) -> bool:
        """True where sequences lie one after the other in one batch entry."""
        return self.packed_rows != NOT_PACKED

    @property
    def spanned(self) -> bool:
        """True where documents or a prefix leave each row a span of keys."""
        return not set(SPANNED).isdisjoint(self.modifications)

    @property
    def extents(self) -> tuple[int, int, int]:
        """Batch entries of its tensors, and in each the rows of q and of k."""
        return (1, *self.packed_rows) if self.packed else (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Rows of q and of k in each sequence of a batch entry; those of packed sequences are typical ones."""
        if not self.packed:
            return ((self.seqlen_q, self.seqlen_k),)
        of_q, of_k = (
            typical_lengths(self.batch, rows, longest)
            for rows, longest in zip(self.packed_rows, (self.seqlen_q, self.seqlen_k), strict=True)
        )
        return tuple(zip(of_q, of_k, strict=True))

    @property
    def compiled_modifications(self) -> tuple[str, ...]:
        """The modifications that its kernels are compiled with; a window is one of them, and so is packing."""
        windowed = (WINDOW,) if self.window_size != NO_WINDOW else ()
        packed = (PACKED,) if self.packed else ()
        spanned = (SPANS,) if self.spanned else ()
        others = (name for name in self.modifications if name not in SPANNED)
        return in_order((*others, *windowed, *packed, *spanned))

    @property
    def window(self) -> tuple[int, int]:
        """Keys that a row sees before and after its diagonal by causal mask and window; a number for no bound, too."""
        left, right = (MAX_EXTENT if bound < 0 else bound for bound in self.window_size)
        return left, 0 if self.causal else right

    @property
    def flops(self) -> int:
        """Floating-point operations by the field's convention; see :meth:`~.operation.Semantics.flops`."""
        return self.semantics.flops(self)

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes through device memory; see :meth:`~.operation.Semantics.bytes_moved`."""
        return self.semantics.bytes_moved(self)

    def bucketed(self) -> Problem:
        """The same problem with sequence lengths, and the number of packed ones, rounded up to their record buckets."""
        left, right = (x if x <= 0 else bucket_seqlen(x) for x in self.window_size)
        rows_q, rows_k = (x and bucket_seqlen(x) for x in self.packed_rows)
        return replace(
            self,
            seqlen_q=bucket_seqlen(self.seqlen_q),
            seqlen_k=bucket_seqlen(self.seqlen_k),
            window_size=(left, right),
            packed_rows=(rows_q, rows_k),
            batch=1 << (self.batch - 1).bit_length() if self.packed else self.batch,
            documents=self.documents and 1 << (self.documents - 1).bit_length(),
        )

    @property
    def goes_by_tiles(self) -> bool:
        """True where defaults go by the number of tiles, as of attention with more than the rows of one."""
        several = not self.packed and self.seqlen_q > FEW_QUERIES
        return self.semantics.goes_by_tiles and several

    @property
    def goes_by_token(self) -> bool:
        """True for a token by itself, where an operation has a form for it."""
        alone = not self.packed and self.seqlen_q == 1
        return self.semantics.goes_by_token and self.direction == "forward" and alone

    def rounded(self) -> Problem:
        """The same problem with the lengths that its default is chosen for, which are in its bucket.

        Where defaults go by tiles they are multiples of 16, as one tile of rows more counts: on an H200 defaults of
        buckets took 1.04 times as long forward. Elsewhere they are those of the bucket, but for a token by itself.
        """
        if self.goes_by_token:
            return self
        bucketed = self.bucketed()
        if not self.goes_by_tiles:
            return bucketed
        seqlen_q, seqlen_k = round_seqlen(self.seqlen_q), round_seqlen(self.seqlen_k)
        return replace(bucketed, seqlen_q=seqlen_q, seqlen_k=seqlen_k)

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
        mask += " key-bounds" if self.key_bounds else ""
        if self.window_size != NO_WINDOW:
            mask += " window {}:{}".format(*self.window_size)
        mask += "".join(f" {name.replace('_', '-')}" for name in self.modifications)
        mask += " packed {}x{}".format(*self.packed_rows) if self.packed else ""
        mask += f" {self.documents} documents" if self.documents else ""
        op = self.op if self.form == "auto" else f"{self.op} {self.form}"
        mask += self.semantics.describe(self)
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
