"""The definition of attention with modified scores, in plain PyTorch: windows and what else bends scores.

``S = scale Q K^T``; then, in this order, each where it is asked for: softcap, additive terms, masks (causal, window and
key bounds), the sink in the softmax's denominator. Some K/V heads at a time, with their whole score matrices: on a CPU
one, whose scores stay in its caches, and on a GPU as many as it takes to employ it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from ...core.modifications import VALUED
from ...core.problem import NO_WINDOW
from ..shared.blocks import full_precision, summing_dtype, zeros
from .modified_block import Block, Three

MASK_DTYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16)
"""Of ``attn_mask``, in the order of the C ABI's ``attn_mask_kind``."""
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
BLOCK_SCORES = {"cuda": 2**24, "cpu": 1}
"""Scores that are taken at a time, at least those of a K/V head: on a GPU 128 MiB in fp64."""


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

    @property
    def without_tensors(self) -> Modifiers:
        """The same numbers alone, for what outlives a call."""
        absent: dict[str, Any] = dict.fromkeys(self.tensors)
        return replace(self, **absent)

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
