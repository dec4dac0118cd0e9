"""The scores of some heads, and their gradients, in plain PyTorch: the part of the reference that is held at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ...core.modifications import SPANNED
from ...core.problem import CausalAlignment
from ..shared.blocks import summing_dtype
from .reference import Bounds, key_range

if TYPE_CHECKING:
    from .modified import Modifiers

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
        for term in self._terms(s):
            s = s + term
        hidden, mask = self._hidden(s), modifiers.attn_mask
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
            sinks = modifiers.sinks.reshape(self._of_group)[self._heads].to(s.dtype)[
                ..., None, None
            ]
            s = torch.cat((s, sinks.expand(*s.shape[:4], 1)), dim=4)
            empty = empty & (sinks == -math.inf)
        return s.masked_fill(empty, 0.0), empty, derivative  # 0: no NaN and no gradient

    def _terms(self, s: torch.Tensor) -> Iterator[torch.Tensor]:
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

    def _hidden(self, s: torch.Tensor) -> torch.Tensor:
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
