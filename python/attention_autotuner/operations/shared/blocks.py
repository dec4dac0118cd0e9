"""The blocks that the reference cuts score matrices into, and full precision for its matrix products."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

MAX_SCORES = 2**26
"""Scores held at a time by the blocked forms: 256 MiB in fp32."""


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in for inputs or a computation of a dtype: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def zeros(x: torch.Tensor) -> torch.Tensor:
    """Zeros shaped like a tensor, contiguous whatever its strides are."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The cut of the score matrices: over (batch, kv head) pairs, and over rows where one pair is too large."""

    pairs: int
    group: int
    seqlen_q: int
    seqlen_k: int
    offset: int | None
    """Row i sees keys j <= i + offset; None when all are seen."""
    pairs_per_block: int
    rows_per_block: int

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, causal: bool, alignment: str | int, max_scores: int
    ) -> Blocks:
        """Blocks of at most ``max_scores`` scores, though never less than one row of one pair.

        An integer as ``alignment`` is the offset itself.
        """
        group, seqlen_q, seqlen_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
        offset = None
        if causal and isinstance(alignment, int):
            offset = alignment
        elif causal:
            offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
        return cls(
            pairs=k.shape[0] * k.shape[1],
            group=group,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            offset=offset,
            pairs_per_block=max(1, max_scores // (group * seqlen_q * seqlen_k)),
            rows_per_block=max(1, max_scores // (group * seqlen_k)),
        )

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, heads_kv, ...]`` to ``[pairs, ...]``."""
        return x.reshape(self.pairs, *x.shape[2:])

    def group_queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, heads_q, ...]`` to ``[pairs, group, ...]``."""
        return x.reshape(self.pairs, self.group, *x.shape[2:])

    def split_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[pairs, group * rows, ...]`` to ``[pairs, group, rows, ...]``."""
        return x.reshape(x.shape[0], self.group, -1, *x.shape[2:])

    def head_blocks(self) -> Iterator[slice]:
        """Slices of the pairs."""
        for start in range(0, self.pairs, self.pairs_per_block):
            yield slice(start, min(start + self.pairs_per_block, self.pairs))

    def row_blocks(self) -> Iterator[slice]:
        """Slices of the query rows."""
        for start in range(0, self.seqlen_q, self.rows_per_block):
            yield slice(start, min(start + self.rows_per_block, self.seqlen_q))

    def keys_seen(self, rows: slice) -> int:
        """The number of leading keys that some row of a block may see, at least one."""
        if self.offset is None:
            return self.seqlen_k
        last: int = rows.stop + self.offset
        return min(self.seqlen_k, max(1, last))

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, scale: float, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores of a block with hidden keys at -inf, and which rows see no key (theirs are 0), if any might.

        Args:
            q: ``[pairs, group * rows, dim_qk]``.
            k: ``[pairs, keys, dim_qk]``.
            scale: the softmax scale.
            rows: which query rows these are.
        """
        s = (q @ k.mT) * scale
        if self.offset is None:
            return s, None
        index = torch.arange(rows.start, rows.stop, device=q.device).repeat(self.group)[:, None]
        hidden = torch.arange(k.shape[1], device=q.device) > index + self.offset
        s = s.masked_fill(hidden, -math.inf)
        if rows.start + self.offset >= 0:
            return s, None
        empty = index + self.offset < 0
        return s.masked_fill(empty, 0.0), empty


class _WithoutTf32:
    """The program's TF32 setting, put off while at least one thread computes; torch has one for all threads."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, ""

    def __enter__(self) -> None:
        matmul = torch.backends.cuda.matmul
        with self._lock:
            self._users += 1
            if self._users == 1 and matmul.fp32_precision == "tf32":
                # A setting that is inherited reads as that of all products, and is to be inherited again.
                inherited = torch._C._get_fp32_precision_getter("cuda", "all") == "tf32"
                self._before = "none" if inherited else "tf32"
                matmul.fp32_precision = "ieee"

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._before:
                torch.backends.cuda.matmul.fp32_precision, self._before = self._before, ""


_WITHOUT_TF32 = _WithoutTf32()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Keep fp32 products out of TF32 and of autocast, whatever the program chose for its own."""
    with (
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
        _WITHOUT_TF32,
    ):
        yield
