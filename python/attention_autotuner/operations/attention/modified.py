"""The definition of attention with modified scores, in plain PyTorch: windows and what else bends scores.

``S = scale Q K^T``; then, in this order, each where it is asked for: softcap, additive terms, masks (causal, window and
key bounds), the sink in the softmax's denominator. One batch entry and K/V head at a time, with its whole score matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from ...core.modifications import SPANNED, VALUED
from ...core.problem import NO_WINDOW, CausalAlignment
from ..shared.blocks import full_precision, summing_dtype, zeros
from .reference import Bounds, key_range

MASK_DTYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16)
"""Of ``attn_mask``, in the order of the C ABI's ``attn_mask_kind``."""
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Modifiers:
    """The values of score modifications; a default leaves its one off.

    Attributes:
        window_size: keys that a row sees before and after its diagonal, which ``causal_alignment`` places; -1 for no
            bound.
        softcap: c of ``c tanh(S / c)``; 0 for none.
        alibi_slopes: fp32 ``[heads_q]`` or ``[batch, heads_q]``: ``-slope |i + seqlen_k - seqlen_q - j|`` is added,
            with the end of a batch entry's keys in place of ``seqlen_k``.
        bias_table: fp32 ``[heads_q, 2 D + 1]``: the entry at ``clamp(j - i - (seqlen_k - seqlen_q), -D, D) + D`` is
            added, again with that end.
        attn_mask: ``[batch, heads_q, seqlen_q, seqlen_k]``, boolean, True where a pair takes part, or what is added.
        prefix_lens: int32 ``[batch]``: row i sees key j, too, where ``j < prefix_lens[b]``, as far as windows allow.
        document_ids: int32 ``[batch, seqlen]``: row i sees key j only where their ids are equal.
        sinks: fp32 ``[heads_q]``, logits that join the denominator and LSE; they are not scaled, capped or masked.
        cu_seqlens_q: where packed sequences end, int32 ``[sequences + 1]`` from 0; None where batch entries are
            sequences. Packed, there is one batch entry, ``alibi_slopes`` may be ``[sequences, heads_q]``, and rows
            behind the last sequence see no key.
        cu_seqlens_k: the same of keys.
        max_seqlens: the greatest lengths of packed queries and keys.
    """

    window_size: tuple[int, int] = NO_WINDOW
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    bias_table: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlens: tuple[int, int] = (0, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The modifications that are on, as :attr:`.Problem.modifications` has them."""
        return tuple(name for name in VALUED if _is_on(getattr(self, name)))

    @property
    def scalars(self) -> dict[str, float]:
        """Fields of the params that say how the values are to be read."""
        slopes, mask = self.alibi_slopes, self.attn_mask
        scalars = {"softcap": self.softcap}
        scalars["alibi_per_batch"] = int(slopes is not None and slopes.dim() == 2)
        if self.bias_table is not None:
            scalars["bias_distance"] = self.bias_table.shape[1] // 2
        if mask is not None:
            scalars |= {"attn_mask_stride_column": mask.stride(3)}
            scalars |= {"attn_mask_kind": MASK_DTYPES.index(mask.dtype)}
        return scalars

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The values that are tensors, by name."""
        values = {name: getattr(self, name) for name in (*VALUED, *CU_SEQLENS)}
        return {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}

    def of_sequences(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[slice, slice, Three, Modifiers]]:
        """The rows of q and k in each packed sequence, its q, k and v, and its modifications; what lies behind is last.

        Args:
            q: ``[1, heads_q, total_q, dim_qk]``.
            k: ``[1, heads_kv, total_k, dim_qk]``.
            v: ``[1, heads_kv, total_k, dim_v]``.
        """
        assert self.cu_seqlens_q is not None
        assert self.cu_seqlens_k is not None
        slopes, bent = self.alibi_slopes, replace(self, cu_seqlens_q=None, cu_seqlens_k=None)
        bounds_q = [*pairwise(self.cu_seqlens_q.tolist()), (int(self.cu_seqlens_q[-1]), q.shape[2])]
        bounds_k = [*pairwise(self.cu_seqlens_k.tolist()), (k.shape[2], k.shape[2])]
        for b, (of_q, of_k) in enumerate(zip(bounds_q, bounds_k, strict=True)):
            rows, keys = slice(*of_q), slice(*of_k)
            if slopes is not None and slopes.dim() == 2:
                bent = replace(bent, alibi_slopes=slopes[min(b, len(slopes) - 1)])
            yield rows, keys, (q[:, :, rows], k[:, :, keys], v[:, :, keys]), bent


def _is_on(value: float | torch.Tensor | None) -> bool:
    return isinstance(value, torch.Tensor) or bool(value)


def attention_modified(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    modifiers: Modifiers,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE, differentiable by autograd.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]``.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        modifiers: what bends the scores.
        dtype: of the computation; LSE is kept in fp32 at least.
        options: ``softmax_scale``, ``causal``, ``causal_alignment``, ``seqlens_k`` and ``starts_k`` as
            :func:`.attention_bounded` takes them.
    """
    if modifiers.cu_seqlens_q is not None:
        packed = list(modifiers.of_sequences(q, k, v))
        named = {"dtype": dtype, **options}
        pairs = [attention_modified(*three, modifiers=m, **named) for _, _, three, m in packed]
        return torch.cat([o for o, _ in pairs], dim=2), torch.cat([lse for _, lse in pairs], dim=2)
    group = q.shape[1] // k.shape[1]
    o, lse = [], []
    with full_precision():
        for b in range(q.shape[0]):
            for head in range(k.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                tensors = (q[b, heads], k[b, head], v[b, head])
                of_head = _Head(b, heads, k, modifiers, **options)
                results = of_head.attend(*(x.to(dtype) for x in tensors))
                o.append(results[0])
                lse.append(results[1])
    return torch.cat(o).view(*q.shape[:3], v.shape[3]), torch.cat(lse).view(q.shape[:3])


def attention_modified_backward(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    modifiers: Modifiers,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v and, where there are any, of sinks and of a bias table, in their tensors' dtypes.

    Arguments are those of :func:`attention_modified`, and gradients of its results, which may be None for zero.
    """
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = map(zeros, (q, k, v))
    of_values = [zeros(x) for x in (modifiers.sinks, modifiers.bias_table) if x is not None]
    if modifiers.cu_seqlens_q is not None:
        for rows, keys, three, of_one in modifiers.of_sequences(q, k, v):
            of_o, of_lse = (None if x is None else x[:, :, rows] for x in (grad_o, grad_lse))
            results = attention_modified_backward(
                of_o, of_lse, *three, modifiers=of_one, dtype=dtype, **options
            )
            dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = results[:3]
            for total, addend in zip(of_values, results[3:], strict=True):
                total += addend
        return dq, dk, dv, *of_values
    with torch.no_grad(), full_precision():
        for b in range(q.shape[0]):
            for head in range(k.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                tensors = tuple(x.to(dtype) for x in (q[b, heads], k[b, head], v[b, head]))
                of_o, of_lse = (None if x is None else x[b, heads] for x in (grad_o, grad_lse))
                of_head = _Head(b, heads, k, modifiers, **options)
                dq[b, heads], dk[b, head], dv[b, head], *addends = of_head.differentiate(
                    of_o, of_lse, *tensors
                )
                for total, addend in zip(of_values, addends, strict=True):
                    total[heads] += addend
    return dq, dk, dv, *of_values


class _Head:
    """One batch entry and the query heads of one K/V head: where its keys begin and end, and which a row sees."""

    def __init__(
        self,
        b: int,
        heads: slice,
        k: torch.Tensor,
        modifiers: Modifiers,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        causal_alignment: CausalAlignment = "bottom_right",
        seqlens_k: Bounds = None,
        starts_k: Bounds = None,
    ) -> None:
        self._b, self._heads, self._modifiers = b, heads, modifiers
        self._begin, self._end = key_range(k, b, seqlens_k, starts_k)
        self._keys = slice(self._begin, max(self._begin, self._end))
        self._scale = k.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._causal, self._top_left = causal, causal_alignment == "top_left"

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """O ``[group, seqlen_q, dim_v]`` and LSE ``[group, seqlen_q]`` of q ``[group, seqlen_q, dim_qk]``."""
        s, empty, _ = self._scores(q, k)
        lse = s.to(torch.promote_types(s.dtype, summing_dtype(s.dtype))).logsumexp(-1)
        p = s.softmax(-1).masked_fill(empty, 0.0)[..., : len(v[self._keys])]
        return p @ v[self._keys], lse.masked_fill(empty[..., 0], -math.inf)

    def differentiate(
        self,
        grad_o: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k, v and, where there are any, of the sink and of the bias of every head.

        ``dS = P (dP - rowsum(P dP) + dLSE)`` after what bends scores, times the derivative of that before it; a sink is
        one more score, whose value is zero.
        """
        s, empty, derivative = self._scores(q, k)
        count = len(v[self._keys])
        p = s.softmax(-1).masked_fill(empty, 0.0)
        ds, dk, dv = torch.zeros_like(p), torch.zeros_like(k), torch.zeros_like(v)
        if grad_o is not None:
            go = grad_o.to(q.dtype)
            dp = torch.zeros_like(p)
            dp[..., :count] = go @ v[self._keys].mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            dv[self._keys] = (p[..., :count].mT @ go).sum(0)
        if grad_lse is not None:
            # Perhaps NaN where a row is empty, of which 0 times is NaN.
            ds = ds + p * grad_lse.to(q.dtype)[..., None].masked_fill(empty, 0.0)
        modifiers, of_values = self._modifiers, []
        if modifiers.sinks is not None:
            of_values.append(ds[..., count:].to(summing_dtype(ds.dtype)).sum((1, 2)))
        if modifiers.bias_table is not None:
            addends = ds[..., :count].to(summing_dtype(ds.dtype)).flatten(1)
            entries = self._entries(s[..., :count], modifiers.bias_table)
            of_table = addends.new_zeros(len(addends), modifiers.bias_table.shape[1])
            of_values.append(of_table.index_add(1, entries.flatten(), addends))
        ds = self._scale * (ds[..., :count] * derivative)
        dk[self._keys] = (ds.mT @ q).sum(0)
        return ds @ k[self._keys], dk, dv, *of_values

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores as the softmax takes them, the rows that have none (theirs are 0), and their derivative by S."""
        modifiers = self._modifiers
        s = self._scale * (q @ k[self._keys].mT)
        derivative = torch.ones_like(s)
        if modifiers.softcap:
            share = torch.tanh(s / modifiers.softcap)
            s, derivative = modifiers.softcap * share, 1.0 - share * share
        if modifiers.alibi_slopes is not None:
            slopes = modifiers.alibi_slopes
            slopes = slopes[self._b] if slopes.dim() == 2 else slopes
            distances = self._past(s, self._end).abs()
            bias = slopes[self._heads, None, None].to(summing_dtype(s.dtype)) * distances
            s = s - bias.to(s.dtype)
        if modifiers.bias_table is not None:
            entries = self._entries(s, modifiers.bias_table)
            s = s + modifiers.bias_table[self._heads][:, entries].to(s.dtype)
        hidden, mask = self._hidden(s), modifiers.attn_mask
        if mask is not None:
            mask = mask[self._b, self._heads, :, self._keys]
            if mask.dtype == torch.bool:
                hidden = hidden | ~mask
            else:
                s = s + mask.to(s.dtype)
                hidden = hidden | (mask == -math.inf)
        empty = hidden.all(-1, keepdim=True)
        s = s.masked_fill(hidden, -math.inf)
        if modifiers.sinks is not None:
            sinks = modifiers.sinks[self._heads].to(s.dtype)
            s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:2], 1)), dim=2)
            empty = torch.zeros_like(empty)
        return s.masked_fill(empty, 0.0), empty, derivative  # 0: no NaN and no gradient

    def _past(self, s: torch.Tensor, end: int) -> torch.Tensor:
        """Distances of keys past the diagonal that ends at a key: ``[seqlen_q, keys]``."""
        rows = torch.arange(s.shape[1], device=s.device)[:, None]
        keys = self._begin + torch.arange(s.shape[2], device=s.device)
        return keys - rows - (end - s.shape[1])

    def _entries(self, s: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Entries of a bias table that scores take: ``[seqlen_q, keys]``."""
        most = table.shape[1] // 2
        return self._past(s, self._end).clamp(-most, most) + most

    def _hidden(self, s: torch.Tensor) -> torch.Tensor:
        """The pairs that take no part: ``[1 or group, seqlen_q, keys]``."""
        past = self._past(s, s.shape[1] if self._top_left else self._end)
        (left, right), prefixes, ids = (
            getattr(self._modifiers, x) for x in ("window_size", *SPANNED)
        )
        keys = self._begin + torch.arange(s.shape[2], device=s.device)
        hidden = torch.zeros_like(past, dtype=torch.bool)
        if self._causal:
            hidden = past > 0
        if prefixes is not None:
            hidden = hidden & (keys >= prefixes[self._b])
        if ids is not None:
            hidden = hidden | (ids[self._b, :, None] != ids[self._b, keys])
        if left >= 0:
            hidden = hidden | (past < -left)
        if right >= 0:
            hidden = hidden | (past > right)
        return hidden[None]
