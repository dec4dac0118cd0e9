"""The gradient of an additive mask, in PyTorch: scores are made again, a few heads at a time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...errors import UnsupportedProblemError
from ...operations.attention.modified import Block, Modifiers, cuts
from ...operations.shared.blocks import precision_of_products
from ..shared import checks
from ..shared.plain import Gradient
from ..shared.torch_library import define, differentiate_by


class MaskGradient(NamedTuple):
    """Arguments of the op for the gradient of an additive mask."""

    attn_mask: torch.Tensor
    grad_o: torch.Tensor | None
    grad_lse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float | None
    causal: bool
    top_left: bool
    device_type: str
    window_left: int
    window_right: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    bias_table: torch.Tensor | None
    prefix_lens: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None


def mask_gradient(call: MaskGradient) -> torch.Tensor:
    """The gradient of a mask that was added to scores: ``P (dP - rowsum(dO O) + dLSE)``, summed where it was broadcast.

    Sums are fp32 and taken in a fixed order. It holds fp32 scores of as many heads at a time as the reference takes.
    """
    grad_o, grad_lse, q, k, v, o, lse = call[1:8]
    mask = call.attn_mask
    if checks.is_empty(q, k):
        return torch.zeros_like(mask)
    scale = q.shape[3] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    modifiers = Modifiers(
        window_size=(call.window_left, call.window_right),
        softcap=call.softcap,
        alibi_slopes=call.alibi_slopes,
        bias_table=call.bias_table,
        attn_mask=mask.expand(*q.shape[:3], k.shape[2]),
        prefix_lens=call.prefix_lens,
        document_ids=call.document_ids,
    )
    hung: Any = {
        "causal": call.causal,
        "causal_alignment": "top_left" if call.top_left else "bottom_right",
    }
    total = torch.zeros(mask.shape, dtype=torch.float32, device=q.device)
    # In TF32, which holds fp16 and bf16.
    with torch.no_grad(), precision_of_products("tf32"):
        for entries, of_heads in cuts(q, k):
            for heads in of_heads:
                block = Block(q, k, (entries, heads), modifiers, **hung)
                level = block.of_queries(lse)[..., None]
                empty = level == -math.inf
                # In place, as the time is that of reading and writing scores.
                p = _products(block.of_queries(q), k[entries, heads], scale)
                _bend(block, p, modifiers)
                p.sub_(level.masked_fill(empty, math.inf)).exp_()
                shift = torch.zeros_like(level)
                if grad_lse is not None:
                    shift -= block.of_queries(grad_lse)[..., None].masked_fill(empty, 0.0)
                if grad_o is not None:
                    of_grad = block.of_queries(grad_o)
                    of_o = block.of_queries(o)
                    shift += (of_grad.float() * of_o.float()).sum(-1, keepdim=True)
                    p.mul_(_products(of_grad, v[entries, heads], 1.0).sub_(shift))
                else:
                    p.mul_(-shift)
                _add(total, p.flatten(1, 2), (entries, block.queries))
    return total.to(mask.dtype)


def _bend(block: Block, s: torch.Tensor, modifiers: Modifiers) -> None:
    """Put what the exponentials take in the place of scaled scores; -inf where a pair takes no part."""
    if modifiers.softcap:
        s.div_(modifiers.softcap).tanh_().mul_(modifiers.softcap)
    assert modifiers.attn_mask is not None
    for term in (*block.terms(s), block.of_queries(modifiers.attn_mask)):
        s.add_(term)
    if block.hides:
        s.masked_fill_(block.hidden(s), -math.inf)


def _products(rows: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled products of ``[entries, heads, group, rows, dim]`` and ``[entries, heads, keys, dim]``, in fp32."""
    a, b = rows.flatten(2, 3).flatten(0, 1).float(), keys.flatten(0, 1).float()
    products = torch.baddbmm(a.new_zeros(()), a, b.mT, beta=0.0, alpha=scale)
    return products.view(*rows.shape[:4], keys.shape[2])


def _add(total: torch.Tensor, addend: torch.Tensor, places: tuple[slice, slice]) -> None:
    """Add gradients of scores ``[entries, heads, seqlen_q, seqlen_k]`` to those of a mask."""
    kept = tuple(
        slice(None) if size == 1 else place
        for size, place in zip(total.shape[:2], places, strict=True)
    )
    single = [axis for axis, size in enumerate(total.shape) if size == 1]
    total[kept] += addend.sum(single, keepdim=True) if single else addend


def _fake(call: MaskGradient) -> torch.Tensor:
    return torch.empty_like(call.attn_mask)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse(ctx: Any, direction: Gradient) -> tuple[Gradient, ...]:
    raise UnsupportedProblemError("the gradient of attn_mask has no derivative: pass it detached")


MASK_GRADIENT_OP = define(
    "attention_mask_gradient", MaskGradient, mask_gradient, mask_gradient, _fake, results=1
)
differentiate_by(MASK_GRADIENT_OP, _refuse, setup_context=_keep_nothing)
