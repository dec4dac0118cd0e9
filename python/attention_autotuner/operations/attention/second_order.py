"""The derivative of attention's gradients, in plain PyTorch.

With ``P`` and ``dS`` as :mod:`.attention` names them, and ``A, B, C`` the gradients of some loss by dQ, dK and dV::

    X  = scale (A K^T + Q B^T)            the loss by dS
    E  = dO V^T - rowsum(P dO V^T) + dLSE      dS = P E
    Y  = X E - rowsum(P X) dO V^T + dO C^T     the loss by P
    Z  = P (Y - rowsum(P Y))                   the loss by the scores
    loss by Q = scale (dS B + Z K)             loss by dO   = P C + P (X - rowsum(P X)) V
    loss by K = scale (dS^T A + Z^T Q)         loss by dLSE = rowsum(P X)
    loss by V = (P (X - rowsum(P X)))^T dO
"""

from __future__ import annotations

import torch

from ...core.problem import CausalAlignment
from ..shared.blocks import MAX_SCORES, Blocks, full_precision

Derivatives = tuple[
    "torch.Tensor | None", "torch.Tensor | None", torch.Tensor, torch.Tensor, torch.Tensor
]


def attention_double_backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
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
) -> Derivatives:
    """Gradients of a loss of :func:`.attention_backward`'s results by its arguments, block by block.

    Made of differentiable steps, so that autograd takes it to any higher order, at the price of keeping every block.

    Args:
        gradients: of the loss by dQ, dK and dV, each shaped like its tensor.
        grad_o: as given to :func:`.attention_backward`, as are the rest.
        grad_lse: None for none, like ``grad_o``.
        q: ``[batch, heads_q, seqlen_q, dim_qk]``.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        softmax_scale: ``1 / sqrt(dim_qk)`` when None.
        causal: row i sees keys ``j <= i + offset`` only.
        causal_alignment: offset is ``seqlen_k - seqlen_q`` for ``bottom_right``, 0 for ``top_left``.
        dtype: of the computation.
        max_scores: the scores held at a time.

    Returns:
        Gradients by ``grad_o`` and ``grad_lse``, None where those are, and by q, k and v, each in its tensor's dtype.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    plan = Blocks.of(q, k, causal, causal_alignment, max_scores)
    out = q.new_zeros(*q.shape[:3], v.shape[3]) if grad_o is None else grad_o
    total = q.new_zeros(q.shape[:3]) if grad_lse is None else grad_lse
    query, grad_query, grad_out, grad_sum = map(plan.group_queries, (q, gradients[0], out, total))
    key, value, grad_key, grad_value = map(plan.flatten, (k, v, *gradients[1:]))
    by_rows: tuple[list[torch.Tensor], ...] = ([], [], [])  # of q, grad_o and grad_lse
    by_key, by_value = [], []
    with full_precision():
        for heads in plan.head_blocks():
            keys, values, b, c = (x[heads].to(dtype) for x in (key, value, grad_key, grad_value))
            keys_sum, values_sum = torch.zeros_like(keys), torch.zeros_like(values)
            of_rows: tuple[list[torch.Tensor], ...] = ([], [], [])
            for rows in plan.row_blocks():
                queries, a, go, gl = (
                    x[heads, :, rows].to(dtype).flatten(1, 2)
                    for x in (query, grad_query, grad_out, grad_sum)
                )
                s, empty = plan.scores(queries, keys, scale, rows)
                p = s.softmax(-1)
                if empty is not None:
                    p = p.masked_fill(empty, 0.0)
                    gl = gl.masked_fill(empty[..., 0], 0.0)  # perhaps NaN, of which 0 times is NaN
                dp = go @ values.mT
                e = dp - (p * dp).sum(-1, keepdim=True) + gl[..., None]
                by_ds = scale * (a @ keys.mT + queries @ b.mT)
                mean = (p * by_ds).sum(-1, keepdim=True)
                y = by_ds * e - mean * dp + go @ c.mT
                z = p * (y - (p * y).sum(-1, keepdim=True))
                ds, by_dp = p * e, p * (by_ds - mean)
                results = (scale * (ds @ b + z @ keys), p @ c + by_dp @ values, mean[..., 0])
                for kept, part in zip(of_rows, results, strict=True):
                    kept.append(plan.split_rows(part))
                keys_sum = keys_sum + scale * (ds.mT @ a + z.mT @ queries)
                values_sum = values_sum + by_dp.mT @ go
            for kept, of_block in zip(by_rows, of_rows, strict=True):
                kept.append(torch.cat(of_block, dim=2))
            by_key.append(keys_sum)
            by_value.append(values_sum)
    by_query, by_out, by_sum = (torch.cat(of_heads) for of_heads in by_rows)
    return (
        None if grad_o is None else by_out.reshape(grad_o.shape).to(grad_o.dtype),
        None if grad_lse is None else by_sum.reshape(grad_lse.shape).to(grad_lse.dtype),
        by_query.reshape(q.shape).to(q.dtype),
        torch.cat(by_key).reshape(k.shape).to(k.dtype),
        torch.cat(by_value).reshape(v.shape).to(v.dtype),
    )
