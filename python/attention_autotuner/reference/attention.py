"""Attention as the formula says, in plain PyTorch.

``S = scale Q K^T``, masked; ``P = softmax(S)``; ``O = P V``; ``LSE = log(sum(exp(S)))``. A row that sees no key gives
O = 0 and LSE = -inf, and no gradient. Tensors are ``[batch, heads, seqlen, dim]``; K and V may have fewer heads (GQA).

:func:`attention_naive` is the definition, and the others are held against it by the tests.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..codegen.problem import CausalAlignment

MAX_SCORES = 2**26
"""Scores held at a time by the blocked forms: 256 MiB in fp32."""


def attention_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_alignment: CausalAlignment = "bottom_right",
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the whole score matrix at hand, differentiable by autograd.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]``, any float dtype.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        softmax_scale: any finite number; ``1 / sqrt(dim_qk)`` when None.
        causal: row i sees keys ``j <= i + offset`` only.
        causal_alignment: offset is ``seqlen_k - seqlen_q`` for ``bottom_right``, 0 for ``top_left``.
        dtype: of the computation and of the results, fp32 or fp64.

    Returns:
        O ``[batch, heads_q, seqlen_q, dim_v]`` and LSE ``[batch, heads_q, seqlen_q]``.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    with _full_precision():
        s = scale * (q.to(dtype) @ k.mT)
        if not causal:
            return s.softmax(-1) @ v, s.logsumexp(-1)
        offset = s.shape[-1] - s.shape[-2] if causal_alignment == "bottom_right" else 0
        rows = torch.arange(s.shape[-2], device=s.device)[:, None]
        hidden = torch.arange(s.shape[-1], device=s.device) > rows + offset
        empty = hidden.all(-1, keepdim=True)
        s = s.masked_fill(hidden, -math.inf).masked_fill(empty, 0.0)  # 0: no NaN and no gradient
        o = s.softmax(-1).masked_fill(empty, 0.0) @ v
        return o, s.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_alignment: CausalAlignment = "bottom_right",
    dtype: torch.dtype = torch.float32,
    max_scores: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention_naive` block by block, for shapes whose score matrix does not fit.

    Arguments and results are those of :func:`attention_naive`, but for ``max_scores``, the scores held at a time.
    Autograd works, but keeps every block; :func:`attention_backward` does not.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    plan = _Blocks.of(q, k, causal, causal_alignment, max_scores)
    query, key, value = plan.group_queries(q), plan.flatten(k), plan.flatten(v)
    outputs, lses = [], []
    with _full_precision():
        for heads in plan.head_blocks():
            keys, values = key[heads].to(dtype), value[heads].to(dtype)
            o_rows, lse_rows = [], []
            for rows in plan.row_blocks():
                seen = plan.keys_seen(rows)
                queries = query[heads, :, rows].to(dtype).flatten(1, 2)
                s, empty = plan.scores(queries, keys[:, :seen], scale, rows)
                p = s.softmax(-1)
                lse = (s if s.dtype == torch.float64 else s.float()).logsumexp(-1)
                if empty is not None:
                    p, lse = p.masked_fill(empty, 0.0), lse.masked_fill(empty[..., 0], -math.inf)
                o_rows.append(plan.split_rows(p @ values[:, :seen]))
                lse_rows.append(plan.split_rows(lse))
            outputs.append(torch.cat(o_rows, dim=2))
            lses.append(torch.cat(lse_rows, dim=2))
    shape = q.shape[:3]
    return torch.cat(outputs).reshape(*shape, v.shape[-1]), torch.cat(lses).reshape(shape)


def attention_low(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_alignment: CausalAlignment = "bottom_right",
    max_scores: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula as written, in the dtype of the inputs: the rounding that the error rule excuses.

    Arguments are those of :func:`attention`.

    Returns:
        O in the dtype of q, and LSE in fp32 of the rounded scores.
    """
    return attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        causal_alignment=causal_alignment,
        dtype=q.dtype,
        max_scores=max_scores,
    )


def attention_backward(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_alignment: CausalAlignment = "bottom_right",
    dtype: torch.dtype = torch.float32,
    max_scores: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`attention`, recomputed block by block from q, k and v.

    ``dP = dO V^T``, ``dS = P (dP - rowsum(P dP) + dLSE)``, ``dQ = scale dS K``, ``dK = scale dS^T Q``, ``dV = P^T dO``.

    ``grad_o`` ``[batch, heads_q, seqlen_q, dim_v]`` and ``grad_lse`` ``[batch, heads_q, seqlen_q]`` may each be None
    for zero; the other arguments are those of :func:`attention`.

    Returns:
        Gradients of q, k and v, each in its tensor's dtype and contiguous.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    plan = _Blocks.of(q, k, causal, causal_alignment, max_scores)
    query, key, value = plan.group_queries(q), plan.flatten(k), plan.flatten(v)
    grad_out = None if grad_o is None else plan.group_queries(grad_o)
    grad_sum = None if grad_lse is None else plan.group_queries(grad_lse)
    dq = torch.zeros(query.shape, dtype=q.dtype, device=q.device)
    dk = torch.zeros(key.shape, dtype=k.dtype, device=k.device)
    dv = torch.zeros(value.shape, dtype=v.dtype, device=v.device)
    with torch.no_grad(), _full_precision():
        for heads in plan.head_blocks():
            keys, values = key[heads].to(dtype), value[heads].to(dtype)
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
            for rows in plan.row_blocks():
                seen = plan.keys_seen(rows)
                queries = query[heads, :, rows].to(dtype).flatten(1, 2)
                s, empty = plan.scores(queries, keys[:, :seen], scale, rows)
                p = s.softmax(-1)
                if empty is not None:
                    p = p.masked_fill(empty, 0.0)
                ds = torch.zeros_like(p)
                if grad_out is not None:
                    go = grad_out[heads, :, rows].to(dtype).flatten(1, 2)
                    dp = go @ values[:, :seen].mT
                    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
                    dvalues[:, :seen] += p.mT @ go
                if grad_sum is not None:
                    ds += p * grad_sum[heads, :, rows].to(dtype).flatten(1, 2)[..., None]
                dq[heads, :, rows] = plan.split_rows(scale * (ds @ keys[:, :seen]))
                dkeys[:, :seen] += scale * (ds.mT @ queries)
            dk[heads], dv[heads] = dkeys, dvalues
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """How the score matrices are cut: over (batch, kv head) pairs, and over rows where one pair is too large."""

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
        cls, q: torch.Tensor, k: torch.Tensor, causal: bool, alignment: str, max_scores: int
    ) -> _Blocks:
        """_Blocks of at most ``max_scores`` scores, though never less than one row of one pair."""
        group, seqlen_q, seqlen_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
        offset = None
        if causal:
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
        """How many leading keys some row of a block may see, at least one."""
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


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Keep fp32 products out of TF32, whatever the program chose for its own."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
