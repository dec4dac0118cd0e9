"""Attention as the formula says, in plain PyTorch.

``S = scale Q K^T``, masked; ``P = softmax(S)``; ``O = P V``; ``LSE = log(sum(exp(S)))``. A row that sees no key gives
O = 0 and LSE = -inf, and no gradient. Tensors are ``[batch, heads, seqlen, dim]``; K and V may have fewer heads (GQA).

:func:`attention_naive` is the definition, and the others are held against it by the tests.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.problem import CausalAlignment
from ..shared.blocks import MAX_SCORES, Blocks, full_precision, summing_dtype, zeros

Bounds = torch.Tensor | None


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
    with full_precision():
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
    causal_alignment: CausalAlignment | int = "bottom_right",
    dtype: torch.dtype = torch.float32,
    max_scores: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention_naive` block by block, for shapes whose score matrix does not fit.

    Arguments and results are those of :func:`attention_naive`, but for ``max_scores``, the scores held at a time, and
    for an integer as ``causal_alignment``, which is the offset itself.
    Autograd works, but keeps every block; :func:`attention_backward` does not.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    plan = Blocks.of(q, k, causal, causal_alignment, max_scores)
    query, key, value = plan.group_queries(q), plan.flatten(k), plan.flatten(v)
    outputs, lses = [], []
    with full_precision():
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


def key_range(k: torch.Tensor, b: int, seqlens_k: Bounds, starts_k: Bounds) -> tuple[int, int]:
    """The first key of batch entry ``b`` and their end, both within ``[0, seqlen_k]``; the end may be the lesser.

    Args:
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        b: the entry.
        seqlens_k: ends, int32 ``[batch]``; ``seqlen_k`` where None.
        starts_k: first keys, int32 ``[batch]``; 0 where None.
    """
    seqlen_k = k.shape[2]
    begin = 0 if starts_k is None else min(max(int(starts_k[b]), 0), seqlen_k)
    return begin, seqlen_k if seqlens_k is None else min(max(int(seqlens_k[b]), 0), seqlen_k)


def attention_bounded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seqlens_k: Bounds,
    starts_k: Bounds,
    causal_alignment: CausalAlignment = "bottom_right",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention` of every batch entry over its own keys, see ``key_range``; others are never read.

    A bottom-right diagonal hangs at the end of an entry's keys, a top-left one at key 0. Options are those of
    :func:`attention`, as are the results.
    """
    if seqlens_k is None and starts_k is None:
        return attention(q, k, v, causal_alignment=causal_alignment, **options)
    results = []
    for b in range(q.shape[0]):
        begin, end = key_range(k, b, seqlens_k, starts_k)
        entry, keys = slice(b, b + 1), slice(begin, max(begin, end))
        offset = (end - q.shape[2] if causal_alignment == "bottom_right" else 0) - begin
        if begin < end:
            few = (x[entry, :, keys] for x in (k, v))
            results.append(attention(q[entry], *few, causal_alignment=offset, **options))
        else:
            dtype = options.get("dtype", torch.float32)
            o = q.new_zeros((1, *q.shape[1:3], v.shape[3]), dtype=dtype)
            results.append((o, o.new_full(o.shape[:3], -math.inf, dtype=summing_dtype(dtype))))
    o, lse = map(torch.cat, zip(*results, strict=True))
    return o, lse


def attention_low(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seqlens_k: Bounds = None,
    starts_k: Bounds = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula as written, in the dtype of the inputs: the rounding that the error rule excuses.

    Options are those of :func:`attention_bounded`, but for ``dtype``.

    Returns:
        O in the dtype of q, and LSE in fp32 of the rounded scores.
    """
    return attention_bounded(
        q, k, v, seqlens_k=seqlens_k, starts_k=starts_k, dtype=q.dtype, **options
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
    plan = Blocks.of(q, k, causal, causal_alignment, max_scores)
    query, key, value = plan.group_queries(q), plan.flatten(k), plan.flatten(v)
    grad_out = None if grad_o is None else plan.group_queries(grad_o)
    grad_sum = None if grad_lse is None else plan.group_queries(grad_lse)
    dq, dk, dv = map(zeros, (query, key, value))
    with torch.no_grad(), full_precision():
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
                    gl = grad_sum[heads, :, rows].to(dtype).flatten(1, 2)[..., None]
                    if empty is not None:
                        gl = gl.masked_fill(empty, 0.0)  # perhaps NaN, of which 0 times is NaN
                    ds += p * gl
                dq[heads, :, rows] = plan.split_rows(scale * (ds @ keys[:, :seen]))
                dkeys[:, :seen] += scale * (ds.mT @ queries)
            dk[heads], dv[heads] = dkeys, dvalues
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
