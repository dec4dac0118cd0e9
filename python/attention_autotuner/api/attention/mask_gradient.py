"""The gradient of an additive mask, in PyTorch: scores are made again, a few heads at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...errors import UnsupportedProblemError
from ...operations.attention.modified import Modifiers
from ...operations.shared.blocks import MAX_SCORES
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

    Sums are fp32 and taken in a fixed order. It holds fp32 scores of some heads at a time, 256 MiB or those of a K/V
    head.
    """
    grad_o, grad_lse, q, k, v, o, lse = call[1:8]
    mask = call.attn_mask
    if checks.is_empty(q, k):
        return torch.zeros_like(mask)
    scale = q.shape[3] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    batch, heads_kv, seqlen_k = k.shape[:3]
    group, seqlen_q = q.shape[1] // heads_kv, q.shape[2]
    pairs = group * seqlen_q * seqlen_k
    heads_at_once = max(1, min(heads_kv, MAX_SCORES // pairs))
    entries_at_once = max(1, MAX_SCORES // (pairs * heads_kv))
    by_heads = (batch, heads_kv, group)
    of_q, of_o, of_lse = (x.reshape(*by_heads, *x.shape[2:]) for x in (q, o, lse))
    total = torch.zeros(mask.shape, dtype=torch.float32, device=q.device)
    scores = _Scores(call, (batch, heads_kv, group, seqlen_q, seqlen_k))
    with torch.no_grad(), _exact_products():
        for first in range(0, batch, entries_at_once):
            for head in range(0, heads_kv, heads_at_once):
                here = (slice(first, first + entries_at_once), slice(head, head + heads_at_once))
                level = of_lse[here][..., None]
                empty = level == -math.inf
                # In place, as the time is that of reading and writing scores.
                p = scores.bend(_products(of_q[here], k[here], scale), here)
                p.sub_(level.masked_fill(empty, math.inf)).exp_()
                shift = torch.zeros_like(level)
                if grad_lse is not None:
                    shift -= grad_lse.reshape(of_lse.shape)[here][..., None].masked_fill(empty, 0.0)
                if grad_o is not None:
                    of_grad = grad_o.reshape(of_o.shape)[here]
                    shift += (of_grad.float() * of_o[here].float()).sum(-1, keepdim=True)
                    p.mul_(_products(of_grad, v[here], 1.0).sub_(shift))
                else:
                    p.mul_(-shift)
                _add(total, p.flatten(1, 2), here, group)
    return total.to(mask.dtype)


def _products(rows: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled products of ``[entries, heads, group, rows, dim]`` and ``[entries, heads, keys, dim]``, in fp32."""
    a, b = rows.flatten(2, 3).flatten(0, 1).float(), keys.flatten(0, 1).float()
    products = torch.baddbmm(a.new_zeros(()), a, b.mT, beta=0.0, alpha=scale)
    return products.view(*rows.shape[:4], keys.shape[2])


def _add(total: torch.Tensor, addend: torch.Tensor, here: tuple[slice, slice], group: int) -> None:
    """Add gradients of scores ``[entries, heads, seqlen_q, seqlen_k]`` to those of a mask."""
    entries, heads = here
    places = (entries, slice(heads.start * group, heads.stop * group))
    kept = tuple(
        slice(None) if size == 1 else place
        for size, place in zip(total.shape[:2], places, strict=True)
    )
    single = [axis for axis, size in enumerate(total.shape) if size == 1]
    total[kept] += addend.sum(single, keepdim=True) if single else addend


class _Scores:
    """Modified scores of some heads, ``[entries, heads_kv, group, seqlen_q, seqlen_k]``."""

    def __init__(self, call: MaskGradient, shape: tuple[int, ...]) -> None:
        self._modifiers = Modifiers(
            softcap=call.softcap,
            alibi_slopes=call.alibi_slopes,
            bias_table=call.bias_table,
            attn_mask=call.attn_mask.expand(*call.q.shape[:3], call.k.shape[2]),
            prefix_lens=call.prefix_lens,
            document_ids=call.document_ids,
        )
        self._shape, device = shape, call.q.device
        *_, seqlen_q, seqlen_k = shape
        rows, keys = (torch.arange(n, device=device) for n in (seqlen_q, seqlen_k))
        behind = keys - rows[:, None]
        self._past, self._keys = behind - (seqlen_k - seqlen_q), keys  # of bottom-right diagonals
        diagonal = behind if call.top_left else self._past
        left, right = call.window_left, call.window_right
        self._beyond = diagonal > 0 if call.causal else None
        self._outside: torch.Tensor | None = None
        if left >= 0 or right >= 0:
            last = right if right >= 0 else seqlen_k
            self._outside = (diagonal > last) | (diagonal < (-left if left >= 0 else -math.inf))

    def bend(self, s: torch.Tensor, here: tuple[slice, slice]) -> torch.Tensor:
        """Put what the exponentials take in the place of scaled scores; -inf where a pair takes no part."""
        entries, heads = here
        m, of_group = self._modifiers, self._shape[1:3]
        if m.softcap:
            s.div_(m.softcap).tanh_().mul_(m.softcap)
        if m.alibi_slopes is not None:
            slopes = m.alibi_slopes.reshape(-1, *of_group)
            slopes = (slopes[entries] if len(slopes) > 1 else slopes)[:, heads, :, None, None]
            s.sub_(slopes * self._past.abs())
        if m.bias_table is not None:
            most = m.bias_table.shape[1] // 2
            table = m.bias_table.reshape(*of_group, -1)[heads]
            s.add_(table[..., self._past.clamp(-most, most) + most])
        assert m.attn_mask is not None
        of_pairs = m.attn_mask.view(len(m.attn_mask), *of_group, *m.attn_mask.shape[2:])
        s.add_(of_pairs[entries, heads])
        hidden = self._beyond
        if m.prefix_lens is not None and hidden is not None:
            hidden = hidden & (self._keys >= m.prefix_lens[entries, None, None, None, None])
        outside = [x for x in (hidden, self._outside) if x is not None]
        if m.document_ids is not None:
            ids = m.document_ids[entries, None, None]
            outside.append(ids[..., :, None] != ids[..., None, :])
        for pairs in outside:
            s.masked_fill_(pairs, -math.inf)
        return s


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply in TF32, which holds fp16 and bf16, whatever the program chose for its own products."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


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
