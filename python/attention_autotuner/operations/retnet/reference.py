"""Retention with an explicit mask and a normaliser, as RetNet's parallel form has it, in plain PyTorch.

``X = (scale Q K^T) * mask``; ``r = clamp(rowsum |X|, 1, r_clamp_max)``; ``O = (X / r) V``. Tensors are ``[batch, heads,
seqlen, dim]``; K and V may have fewer heads (GQA). The mask is ``[heads_q, seqlen_q, seqlen_k]`` or ``[1, seqlen_q,
seqlen_k]``, holds any values and is shared by the batch.

``causal`` is the caller's promise that the mask is zero where ``j > i + seqlen_k - seqlen_q``: what stands there has no
influence, whatever it is, and its gradient is zero.

r is a constant to the gradients, as RetNet trains it, unless ``r_grad`` asks for the true derivative. The r that is
returned never carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UnsupportedProblemError
from ..shared.blocks import MAX_SCORES, Blocks, full_precision, summing_dtype, zeros


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """The rule by which rows are divided.

    Attributes:
        normalize: False for r = 1 everywhere.
        r_clamp_max: the most that r may be; None for no limit.
        r_grad: whether gradients flow through r, where ``1 <= rowsum |X| <= r_clamp_max``.

    Raises:
        UnsupportedProblemError: the limit is below 1, or something is asked of an r that is not there.
    """

    normalize: bool = True
    r_clamp_max: float | None = None
    r_grad: bool = False

    def __post_init__(self) -> None:
        if self.r_clamp_max is not None and not self.r_clamp_max >= 1:
            raise UnsupportedProblemError(f"r_clamp_max must be at least 1, got {self.r_clamp_max}")
        if not self.normalize and (self.r_clamp_max is not None or self.r_grad):
            raise UnsupportedProblemError(
                f"normalize=False leaves no r to clamp or differentiate, got r_clamp_max={self.r_clamp_max}, "
                f"r_grad={self.r_grad}"
            )

    def divide(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of X over their r.

        Args:
            x: ``[..., seqlen_k]``, the keys that count.

        Returns:
            ``X / r`` in x's dtype, r ``[..., 1]`` in fp32 (fp64 for fp64), summed there so that it outlives the range
            of fp16, and where r is the row's own sum, ``[..., 1]``.
        """
        total = x.abs().sum(-1, keepdim=True, dtype=summing_dtype(x.dtype))
        if not self.normalize:
            return x, torch.ones_like(total), torch.zeros_like(total, dtype=torch.bool)
        if not self.r_grad:
            total = total.detach()
        r = total.clamp(1.0, self.r_clamp_max)
        return (x / r).to(x.dtype), r, total == r


@dataclass(frozen=True, kw_only=True)
class MaskBlocks:
    """The part of a mask that meets a block of scores, and the way back for its gradient."""

    plan: Blocks
    mask: torch.Tensor
    """``[heads_kv, group, seqlen_q, seqlen_k]``, or ``[1, 1, seqlen_q, seqlen_k]`` for one that all heads share."""

    @classmethod
    def of(cls, plan: Blocks, mask: torch.Tensor, heads_kv: int) -> MaskBlocks:
        """A mask cut as the scores are.

        Raises:
            UnsupportedProblemError: its shape is not ``[heads_q | 1, seqlen_q, seqlen_k]``.
        """
        heads_q, scores = heads_kv * plan.group, (plan.seqlen_q, plan.seqlen_k)
        if tuple(mask.shape) not in ((1, *scores), (heads_q, *scores)):
            raise UnsupportedProblemError(
                f"mask must be [{heads_q} or 1, {scores[0]}, {scores[1]}], got {list(mask.shape)}"
            )
        shared = mask.shape[0] == 1
        split = (1, 1) if shared else (heads_kv, plan.group)
        return cls(plan=plan, mask=mask.reshape(*split, *scores))

    def hidden(self, rows: slice) -> torch.Tensor | None:
        """``[rows, keys]``: what the causal promise hides of some rows, None where it was not given."""
        if self.plan.offset is None:
            return None
        device = self.mask.device
        index = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.plan.offset
        return torch.arange(self.plan.keys_seen(rows), device=device) > index

    def part(self, heads: slice, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """``[pairs | 1, group | 1, rows, keys]`` for a block of pairs and rows."""
        part = self.mask[:, :, rows, : self.plan.keys_seen(rows)]
        if self.mask.shape[0] > 1:
            part = part[self._kv_heads(heads)]
        part, hidden = part.to(dtype), self.hidden(rows)
        return part if hidden is None else part.masked_fill(hidden, 0.0)

    def add(self, total: torch.Tensor, heads: slice, rows: slice, gradient: torch.Tensor) -> None:
        """Add a block of gradients to those of the mask.

        Args:
            total: shaped like :attr:`mask`.
            heads: which pairs.
            rows: which query rows.
            gradient: ``[pairs, group, rows, keys]``.
        """
        hidden = self.hidden(rows)
        if hidden is not None:
            gradient = gradient.masked_fill(hidden, 0.0)
        target = total[:, :, rows, : self.plan.keys_seen(rows)]
        if total.shape[1] < gradient.shape[1]:
            gradient = gradient.sum(1, keepdim=True)
        if total.shape[0] == 1:
            target += gradient.sum(0, keepdim=True)
        else:
            target.index_add_(0, self._kv_heads(heads), gradient)

    def _kv_heads(self, heads: slice) -> torch.Tensor:
        pairs = torch.arange(heads.start, heads.stop, device=self.mask.device)
        return pairs % self.mask.shape[0]


def retnet_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    normalize: bool = True,
    r_clamp_max: float | None = None,
    r_grad: bool = False,
    dtype: torch.dtype | None = None,
    max_scores: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parallel retention, block by block over heads and rows.

    Autograd works, but keeps every block; :func:`retnet_attention_backward` does not.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]``, any float dtype.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        mask: ``[heads_q | 1, seqlen_q, seqlen_k]``, any float dtype.
        scale: any finite number.
        causal: the promise that the mask is zero where ``j > i + seqlen_k - seqlen_q``.
        normalize: False for r = 1.
        r_clamp_max: the most that r may be; None for no limit.
        r_grad: whether autograd follows r.
        dtype: of the computation; None for fp32, or fp64 where q is.
        max_scores: the scores held at a time.

    Returns:
        O ``[batch, heads_q, seqlen_q, dim_v]`` in the dtype of the computation, and r ``[batch, heads_q, seqlen_q]``
        in fp32, or fp64 where the computation is.

    Raises:
        UnsupportedProblemError: the mask's shape does not fit, or the arguments of r contradict each other.
    """
    dtype = dtype or summing_dtype(q.dtype)
    rule = Normaliser(normalize=normalize, r_clamp_max=r_clamp_max, r_grad=r_grad)
    plan = Blocks.of(q, k, causal, "bottom_right", max_scores)
    masks = MaskBlocks.of(plan, mask, k.shape[1])
    query, key, value = plan.group_queries(q), plan.flatten(k), plan.flatten(v)
    outputs, normalisers = [], []
    with full_precision():
        for heads in plan.head_blocks():
            keys, values = key[heads].to(dtype), value[heads].to(dtype)
            o_rows, r_rows = [], []
            for rows in plan.row_blocks():
                seen = plan.keys_seen(rows)
                queries = query[heads, :, rows].to(dtype).flatten(1, 2)
                s = plan.split_rows(scale * (queries @ keys[:, :seen].mT))
                p, r, _ = rule.divide(s * masks.part(heads, rows, dtype))
                o_rows.append(plan.split_rows(p.flatten(1, 2) @ values[:, :seen]))
                r_rows.append(r[..., 0].detach())
            outputs.append(torch.cat(o_rows, dim=2))
            normalisers.append(torch.cat(r_rows, dim=2))
    shape = q.shape[:3]
    return torch.cat(outputs).reshape(*shape, v.shape[-1]), torch.cat(normalisers).reshape(shape)


def retnet_attention_low(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula as written, in the dtype of the inputs: the rounding that the error rule excuses.

    Options are those of :func:`retnet_attention`, but for ``dtype``. An X beyond the range of fp16 leaves its row
    infinite or NaN, which excuses nothing.

    Returns:
        O in the dtype of q, and r in fp32 of the rounded X.
    """
    return retnet_attention(q, k, v, mask, dtype=q.dtype, **options)


def retnet_attention_backward(
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    normalize: bool = True,
    r_clamp_max: float | None = None,
    r_grad: bool = False,
    need_dmask: bool = False,
    dtype: torch.dtype | None = None,
    max_scores: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of :func:`retnet_attention`, recomputed block by block from q, k, v and the mask.

    ``dP = dO V^T``, ``dX = dP / r``, ``dS = dX * mask``, ``dQ = scale dS K``, ``dK = scale dS^T Q``,
    ``dV = (X / r)^T dO``, ``dmask = sum over the batch of dX * (scale Q K^T)``. With ``r_grad``, in rows where r is the
    sum itself, ``dX = (dP - sign(X) rowsum(dO * O)) / r``: ``O = X V / r`` falls by O/r as ``|X|`` grows, and
    ``rowsum(dO * O) = rowsum(X / r * dP)``.

    Args:
        grad_o: ``[batch, heads_q, seqlen_q, dim_v]``.
        q: as given to :func:`retnet_attention`, as are the rest.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        mask: ``[heads_q | 1, seqlen_q, seqlen_k]``.
        scale: any finite number.
        causal: nothing above the diagonal is read, and its gradient is zero.
        normalize: False for r = 1.
        r_clamp_max: the most that r may be.
        r_grad: whether gradients flow through r.
        need_dmask: whether the gradient of the mask is wanted; the only result of its size.
        dtype: of the computation; None for fp32, or fp64 where q is. The dtype of q gives the rounding that the error
            rule excuses.
        max_scores: the scores held at a time.

    Returns:
        Gradients of q, k, v and the mask (summed over heads for a mask of one), or None for the last, each in its
        tensor's dtype and contiguous.

    Raises:
        UnsupportedProblemError: as :func:`retnet_attention`.
    """
    dtype = dtype or summing_dtype(q.dtype)
    rule = Normaliser(normalize=normalize, r_clamp_max=r_clamp_max, r_grad=r_grad)
    plan = Blocks.of(q, k, causal, "bottom_right", max_scores)
    masks = MaskBlocks.of(plan, mask, k.shape[1])
    query, key, value = plan.group_queries(q), plan.flatten(k), plan.flatten(v)
    grad_out = plan.group_queries(grad_o)
    dq, dk, dv = map(zeros, (query, key, value))
    sums = summing_dtype(dtype)
    dmask = torch.zeros(masks.mask.shape, dtype=sums, device=q.device) if need_dmask else None
    with torch.no_grad(), full_precision():
        for heads in plan.head_blocks():
            keys, values = key[heads].to(dtype), value[heads].to(dtype)
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
            for rows in plan.row_blocks():
                seen = plan.keys_seen(rows)
                queries = query[heads, :, rows].to(dtype).flatten(1, 2)
                go = grad_out[heads, :, rows].to(dtype).flatten(1, 2)
                s = plan.split_rows(scale * (queries @ keys[:, :seen].mT))
                factors = masks.part(heads, rows, dtype)
                x = s * factors
                p, r, summed = rule.divide(x)
                dp = plan.split_rows(go @ values[:, :seen].mT)
                dx = dp
                if rule.r_grad:
                    through = (p * dp).sum(-1, keepdim=True).masked_fill(~summed, 0.0)
                    dx = dx - x.sign() * through
                dx = (dx / r).to(dtype)
                ds = (dx * factors).flatten(1, 2)
                dq[heads, :, rows] = plan.split_rows(scale * (ds @ keys[:, :seen]))
                dkeys[:, :seen] += scale * (ds.mT @ queries)
                dvalues[:, :seen] += p.flatten(1, 2).mT @ go
                if dmask is not None:
                    masks.add(dmask, heads, rows, (dx * s).to(sums))
            dk[heads], dv[heads] = dkeys, dvalues
    dmask_of_dtype = None if dmask is None else dmask.reshape(mask.shape).to(mask.dtype)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), dmask_of_dtype
