"""The definition of attention with modified scores, in plain PyTorch: windows and what else bends scores.

``S = scale Q K^T``; then, in this order, each where it is asked for: softcap, additive terms, masks (causal, window and
key bounds), the sink in the softmax's denominator. Some K/V heads at a time, with their whole score matrices: on a CPU
one, whose scores stay in its caches, and on a GPU as many as it takes to employ it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from ...core.modifications import SPANNED, VALUED
from ...core.problem import NO_WINDOW, CausalAlignment
from ..shared.blocks import full_precision, summing_dtype, zeros
from .reference import Bounds, key_range

MASK_DTYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16)
"""Of ``attn_mask``, in the order of the C ABI's ``attn_mask_kind``."""
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
BLOCK_SCORES = {"cuda": 2**24, "cpu": 1}
"""Scores that are taken at a time, at least those of a K/V head: on a GPU 128 MiB in fp64."""
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
        mask_gradient: the shape of the gradient of ``attn_mask`` that a backward gives, each axis as long as the mask's
            or 1 for its sum; None where it gives none.
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
    mask_gradient: tuple[int, ...] | None = None

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
            if self.mask_gradient is not None:
                summed = (x != y for x, y in zip(self.mask_gradient, mask.shape, strict=True))
                scalars["attn_mask_summed"] = sum(1 << axis for axis, x in enumerate(summed) if x)
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
    of_entries = []
    with full_precision():
        for entries, of_heads in cuts(q, k, options):
            blocks = [Block(q, k, (entries, heads), modifiers, **options) for heads in of_heads]
            results = [block.attend(*block.tensors(q, k, v, dtype)) for block in blocks]
            of_entries.append([torch.cat(part, dim=1) for part in zip(*results, strict=True)])
    o, lse = (torch.cat(part) for part in zip(*of_entries, strict=True))
    return o, lse


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

    Then that of a mask, in fp32 at least, where ``modifiers`` asks for it.

    Arguments are those of :func:`attention_modified`, and gradients of its results, which may be None for zero.
    """
    dq, dk, dv = map(zeros, (q, k, v))
    of_values = [zeros(x) for x in (modifiers.sinks, modifiers.bias_table) if x is not None]
    of_mask = None
    if modifiers.mask_gradient is not None:
        of_mask = torch.zeros(modifiers.mask_gradient, dtype=summing_dtype(dtype), device=q.device)
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
        for entries, of_heads in cuts(q, k, options):
            for heads in of_heads:
                block = Block(q, k, (entries, heads), modifiers, **options)
                of_o, of_lse = (
                    None if x is None else block.of_queries(x) for x in (grad_o, grad_lse)
                )
                three = block.tensors(q, k, v, dtype)
                *of_three, ds = block.differentiate(of_o, of_lse, *three)
                dq[entries, block.queries], dk[entries, heads], dv[entries, heads] = of_three[:3]
                for total, addend in zip(of_values, of_three[3:], strict=True):
                    total[block.queries] += addend
                if of_mask is not None:
                    _add(of_mask, ds, (entries, block.queries))
    if of_mask is not None:
        of_values.append(of_mask)
    return dq, dk, dv, *of_values


def _add(total: torch.Tensor, addend: torch.Tensor, place: tuple[slice, slice]) -> None:
    """Add gradients of scores ``[entries, heads, seqlen_q, seqlen_k]`` to those of a mask, which may be broadcast."""
    single = [axis for axis, size in enumerate(total.shape) if size == 1]
    kept = (slice(None) if axis in single else where for axis, where in enumerate(place))
    total[tuple(kept)] += addend.sum(single, keepdim=True, dtype=total.dtype) if single else addend


def cuts(
    q: torch.Tensor, k: torch.Tensor, options: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[slice, list[slice]]]:
    """Batch entries that are taken at a time, one where there are key bounds, and the K/V heads of each such block."""
    batch, heads_kv, seqlen_k = k.shape[:3]
    pairs = max(1, q.shape[1] // heads_kv * q.shape[2] * seqlen_k)
    most = BLOCK_SCORES.get(q.device.type, 1)
    bounded = any(options.get(name) is not None for name in ("seqlens_k", "starts_k"))
    at_once = 1 if bounded else max(1, most // (pairs * heads_kv))
    of_heads = _slices(heads_kv, max(1, most // pairs))
    for entries in _slices(batch, at_once):
        yield entries, of_heads


def _slices(count: int, at_once: int) -> list[slice]:
    return [slice(n, min(n + at_once, count)) for n in range(0, count, at_once)]


class Block:
    """Some batch entries and the query heads of some K/V heads: where their keys begin and end, and which a row sees.

    Scores are ``[entries, K/V heads, group, seqlen_q, keys]``.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        place: tuple[slice, slice],
        modifiers: Modifiers,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        causal_alignment: CausalAlignment = "bottom_right",
        seqlens_k: Bounds = None,
        starts_k: Bounds = None,
    ) -> None:
        self._entries, self._heads = place
        self._modifiers = modifiers
        self._of_group = (k.shape[1], q.shape[1] // k.shape[1])
        self.queries = slice(*(n * self._of_group[1] for n in (place[1].start, place[1].stop)))
        self._begin, self._end = key_range(k, self._entries.start, seqlens_k, starts_k)
        self._keys = slice(self._begin, max(self._begin, self._end))
        self._scale = k.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._causal, self._top_left = causal, causal_alignment == "top_left"

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        """The block's part of a tensor of all query heads, with K/V heads and groups apart."""
        part = x[self._entries, self.queries]
        heads = self._heads.stop - self._heads.start
        return part.reshape(len(part), heads, self._of_group[1], *part.shape[2:])

    def tensors(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
    ) -> Three:
        """The block's part of q, k and v, in a dtype."""
        of_k, of_v = (x[self._entries, self._heads].to(dtype) for x in (k, v))
        return self.of_queries(q).to(dtype), of_k, of_v

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """O ``[entries, query heads, seqlen_q, dim_v]`` and LSE ``[entries, query heads, seqlen_q]``."""
        s, empty, _ = self._scores(q, k)
        lse = s.to(torch.promote_types(s.dtype, summing_dtype(s.dtype))).logsumexp(-1)
        value = self._seen(v)
        p = s.softmax(-1).masked_fill(empty, 0.0)[..., : value.shape[3]]
        lse = lse.masked_fill(empty[..., 0], -math.inf)
        return (p @ value).flatten(1, 2), lse.flatten(1, 2)

    def differentiate(
        self,
        grad_o: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k, v and, where there are any, of the sink and of the bias of every head; last of scores.

        ``dS = P (dP - rowsum(P dP) + dLSE)`` after what bends scores, times the derivative of that before it; a sink is
        one more score, whose value is zero.
        """
        s, empty, derivative = self._scores(q, k)
        key, value = self._seen(k), self._seen(v)
        count = value.shape[3]
        p = s.softmax(-1).masked_fill(empty, 0.0)
        ds, dk, dv = torch.zeros_like(p), torch.zeros_like(k), torch.zeros_like(v)
        if grad_o is not None:
            go = grad_o.to(q.dtype)
            dp = torch.zeros_like(p)
            dp[..., :count] = go @ value.mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            dv[:, :, self._keys] = (p[..., :count].mT @ go).sum(2)
        if grad_lse is not None:
            # Perhaps NaN where a row is empty, of which 0 times is NaN.
            ds = ds + p * grad_lse.to(q.dtype)[..., None].masked_fill(empty, 0.0)
        modifiers, of_values = self._modifiers, []
        if modifiers.sinks is not None:
            of_values.append(
                ds[..., count:].to(summing_dtype(ds.dtype)).sum((3, 4)).sum(0).flatten()
            )
        if modifiers.bias_table is not None:
            addends = ds[..., :count].to(summing_dtype(ds.dtype)).flatten(3).flatten(0, 2)
            entries = self._entries_of(s[..., :count], modifiers.bias_table)
            of_table = addends.new_zeros(len(addends), modifiers.bias_table.shape[1])
            of_table = of_table.index_add(1, entries.flatten(), addends)
            of_values.append(of_table.view(len(q), -1, of_table.shape[1]).sum(0))
        of_scores = ds[..., :count].flatten(1, 2)
        ds = self._scale * (ds[..., :count] * derivative)
        dk[:, :, self._keys] = (ds.mT @ q).sum(2)
        return (ds @ key).flatten(1, 2), dk, dv, *of_values, of_scores

    def _seen(self, x: torch.Tensor) -> torch.Tensor:
        """The keys or values between the bounds: ``[entries, K/V heads, 1, keys, dim]``."""
        return x[:, :, None, self._keys]

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores as the softmax takes them, the rows that have none (theirs are 0), and their derivative by S."""
        modifiers = self._modifiers
        s = self._scale * (q @ self._seen(k).mT)
        derivative = torch.ones_like(s)
        if modifiers.softcap:
            share = torch.tanh(s / modifiers.softcap)
            s, derivative = modifiers.softcap * share, 1.0 - share * share
        for term in self.terms(s):
            s = s + term
        hidden, mask = self.hidden(s), modifiers.attn_mask
        if mask is not None:
            of_pairs = self.of_queries(mask[..., self._keys])
            if of_pairs.dtype == torch.bool:
                hidden = hidden | ~of_pairs
            else:
                s = s + of_pairs.to(s.dtype)
                hidden = hidden | (of_pairs == -math.inf)
        empty = hidden.all(-1, keepdim=True)
        s = s.masked_fill(hidden, -math.inf)
        if modifiers.sinks is not None:
            sinks = modifiers.sinks.reshape(self._of_group)[self._heads].to(s.dtype)
            s = torch.cat((s, sinks[..., None, None].expand(*s.shape[:4], 1)), dim=4)
            empty = torch.zeros_like(empty)
        return s.masked_fill(empty, 0.0), empty, derivative  # 0: no NaN and no gradient

    def terms(self, s: torch.Tensor) -> Iterator[torch.Tensor]:
        """The terms that slopes and a bias table add to scores, in their dtype."""
        modifiers = self._modifiers
        if modifiers.alibi_slopes is not None:
            slopes = modifiers.alibi_slopes.reshape(-1, *self._of_group)
            slopes = (slopes[self._entries] if len(slopes) > 1 else slopes)[:, self._heads]
            distances = self._past(s, self._end).abs()
            yield -(slopes[..., None, None].to(summing_dtype(s.dtype)) * distances).to(s.dtype)
        if modifiers.bias_table is not None:
            entries = self._entries_of(s, modifiers.bias_table)
            table = modifiers.bias_table.reshape(*self._of_group, -1)[self._heads]
            yield table[..., entries].to(s.dtype)

    def _past(self, s: torch.Tensor, end: int) -> torch.Tensor:
        """Distances of keys past the diagonal that ends at a key: ``[seqlen_q, keys]``."""
        rows = torch.arange(s.shape[3], device=s.device)[:, None]
        keys = self._begin + torch.arange(s.shape[4], device=s.device)
        return keys - rows - (end - s.shape[3])

    def _entries_of(self, s: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Entries of a bias table that scores take: ``[seqlen_q, keys]``."""
        most = table.shape[1] // 2
        return self._past(s, self._end).clamp(-most, most) + most

    @property
    def hides(self) -> bool:
        """True where some pairs may take no part, whatever a mask says."""
        modifiers = self._modifiers
        spans = (modifiers.prefix_lens, modifiers.document_ids)
        windowed = modifiers.window_size != NO_WINDOW
        return self._causal or windowed or any(x is not None for x in spans)

    def hidden(self, s: torch.Tensor) -> torch.Tensor:
        """The pairs that take no part but for a mask's: as scores, or broadcast to them."""
        past = self._past(s, s.shape[3] if self._top_left else self._end)
        (left, right), prefixes, ids = (
            getattr(self._modifiers, x) for x in ("window_size", *SPANNED)
        )
        keys = self._begin + torch.arange(s.shape[4], device=s.device)
        hidden = torch.zeros_like(past, dtype=torch.bool)
        if self._causal:
            hidden = past > 0
        if prefixes is not None:
            hidden = hidden & (keys >= prefixes[self._entries, None, None, None, None])
        if ids is not None:
            of_rows = ids[self._entries, None, None]
            hidden = hidden | (of_rows[..., None] != of_rows[..., None, keys])
        if left >= 0:
            hidden = hidden | (past < -left)
        if right >= 0:
            hidden = hidden | (past > right)
        return hidden.expand(*[1] * (5 - hidden.dim()), *hidden.shape)
