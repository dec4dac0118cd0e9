"""Attention with key bounds where a gradient may be asked for: the batch as packed sequences, which have one.

Every batch entry is three sequences: the keys before its bounds and those behind, which no query sees, and its own keys
with all of its queries. So gradients of keys that are out of bounds are 0, and the bounds stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.operation import require
from ...core.problem import CausalAlignment
from ..shared import checks
from . import checks as attention_checks
from .varlen import flash_attn_varlen_func

_SEQUENCES = 3  # of a batch entry


def attention_by_packing(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    device_type: Any,
    *,
    causal_alignment: CausalAlignment,
    return_lse: bool,
    **options: Any,
) -> Any:
    """Differentiable O, and LSE where it is wanted, as :func:`.flash_attn_func` has them.

    Args:
        q: as :func:`.flash_attn_func` takes it, as are k and v; tensors in the layout ``"bhsd"``.
        k: see q.
        v: see q.
        bounds: ``seqlens_k``, ``starts_k`` or both.
        values: what bends scores, by its argument's name.
        device_type: as :func:`.flash_attn_func` takes it.
        causal_alignment: where diagonals hang.
        return_lse: whether LSE is wanted.
        options: others of :func:`.flash_attn_varlen_func`.

    Raises:
        UnsupportedProblemError: a bound is not int32 ``[batch]``, or packed sequences do not take what is asked for
            beside it.
    """
    checks.check_tensors(q, k, v)
    attention_checks.check_bounds(q, **bounds)
    for name in ("attn_mask", "prefix_lens", "document_ids"):
        require(
            name not in values,
            f"attention with seqlens_k or starts_k has no backward beside {name}: call it under torch.no_grad()",
        )
    require(
        causal_alignment == "bottom_right" or "starts_k" not in bounds,
        "attention with starts_k and causal_alignment='top_left' has no backward: call it under torch.no_grad()",
    )
    batch, _, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    bends: dict[str, Any] = dict(values)
    slopes = values.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        bends["alibi_slopes"] = slopes.repeat_interleave(_SEQUENCES, dim=0)
    cu_seqlens_q, cu_seqlens_k = _cu_seqlens(q, seqlen_k, bounds)
    o, lse = flash_attn_varlen_func(
        _rows(q),
        _rows(k),
        _rows(v),
        cu_seqlens_q,
        cu_seqlens_k,
        seqlen_q,
        seqlen_k,
        device_type,
        causal_alignment=causal_alignment,
        return_lse=True,
        **bends,
        **options,
    )
    o = o.unflatten(0, (batch, seqlen_q)).transpose(1, 2)
    if q.stride(1) > q.stride(2):
        o = o.contiguous()  # in the order of q's dimensions
    return (
        (o, lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1).contiguous()) if return_lse else o
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, seqlen, dim]`` as the rows of all sequences; a copy unless memory has this order."""
    return x.transpose(1, 2).flatten(0, 1)


def _cu_seqlens(
    q: torch.Tensor, seqlen_k: int, bounds: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, _, seqlen_q, _ = q.shape
    entries = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    firsts, ends = (bounds.get(name) for name in ("starts_k", "seqlens_k"))
    nothing = torch.zeros_like(entries[:-1])
    first = nothing if firsts is None else firsts.clamp(0, seqlen_k)
    end = nothing + seqlen_k if ends is None else ends.clamp(0, seqlen_k)
    limits = torch.stack((nothing, first, torch.maximum(first, end)), dim=1)
    keys = (entries[:-1, None] * seqlen_k + limits).flatten()
    rows = entries * seqlen_q
    queries = torch.stack((rows[:-1], rows[:-1], rows[1:]), dim=1).flatten()
    return torch.cat((queries, rows[-1:])), torch.cat((keys, entries[-1:] * seqlen_k))
