"""torch's ``scaled_dot_product_attention``: its arguments, and what they mean there."""

from __future__ import annotations

from typing import Any

import torch

from ..api import flash_attn_func
from ..api.shared import checks
from ..api.shared.options import ATTENTION, as_float, refuse_others
from ..core.operation import require
from ..errors import UnsupportedProblemError
from .tensors import autocast_dtype, check_tensor, of_any_dims


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as torch's function has it, with gradients.

    Args:
        query: ``[..., heads_q, seqlen_q, dim_qk]``, fp16 or bf16, or what autocast makes of it. Leading dims, heads
            among them, are broadcast.
        key: ``[..., heads_kv, seqlen_k, dim_qk]``.
        value: ``[..., heads_kv, seqlen_k, dim_v]``.
        attn_mask: boolean, True where a key takes part, or what is added to scores, fp32, fp16 or bf16; broadcasts to
            ``[..., heads_q, seqlen_q, seqlen_k]``. Not beside ``is_causal``.
        dropout_p: must be 0.
        is_causal: query row i sees the keys ``j <= i``, whatever the lengths.
        scale: None is ``1 / sqrt(dim_qk)``.
        enable_gqa: whether heads_q may be a multiple of heads_kv.

    Returns:
        ``[..., heads_q, seqlen_q, dim_v]``.

    Raises:
        UnsupportedArgumentError: an option is not what it must be.
        UnsupportedProblemError: the tensors are outside what the kernels support, or do not fit together.
    """
    refuse_others(scaled_dot_product_attention, {"dropout_p": dropout_p}, ATTENTION)
    checks.check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask)
        require(
            not is_causal,
            f"attn_mask must be None beside is_causal=True, got {checks.shown(attn_mask)}",
        )
    if scale is not None:
        scale = as_float("scale", scale, " or None")
        checks.check_scale(scale, "scale")
    tensors = [query, key, value]
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        check_tensor(name, x)
        require(x.dim() >= 2, f"{name} must have 2 dimensions or more, got {list(x.shape)}")
    dtype = autocast_dtype(query.device.type)
    if dtype is not None:
        tensors = [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]
    mask: Any = {"causal": is_causal, "causal_alignment": "top_left"}
    # Heads are broadcast like batches, unless they are grouped.
    inner = -3 if enable_gqa else -2
    q, k, v = tensors
    if q.dim() == k.dim() == v.dim() == 4 and q.shape[:inner] == k.shape[:inner] == v.shape[:inner]:
        if attn_mask is not None:
            mask["attn_mask"] = _of_all_pairs(attn_mask, (*q.shape[:3], k.shape[2]))
        result: torch.Tensor = of_any_dims(flash_attn_func, 4, q, k, v, scale, **mask)
        return result
    dims = max(x.dim() for x in tensors)
    rank = max(dims, 4)
    tensors = [x[(None,) * (rank - x.dim())] for x in tensors]
    try:
        outer: Any = torch.broadcast_shapes(*(x.shape[:inner] for x in tensors))  # type: ignore[no-untyped-call]  # torch's own
    except RuntimeError as error:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise UnsupportedProblemError(
            f"query, key and value must fit together, with enable_gqa=True where heads are grouped, got {shapes}"
        ) from error
    q, k, v = (x.expand(*outer, *x.shape[inner:]).flatten(0, -4) for x in tensors)
    if attn_mask is not None:
        heads = q.shape[1:2] if enable_gqa else ()
        mask["attn_mask"] = _of_all_pairs(attn_mask, (*outer, *heads, q.shape[2], k.shape[2]))
    o = of_any_dims(flash_attn_func, 4, q, k, v, scale, **mask)
    shaped: torch.Tensor = o.unflatten(0, outer[: rank - 3])[(0,) * (rank - dims)]
    return shaped


def _of_all_pairs(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask as ``[batch, heads, seqlen_q, seqlen_k]``, a view where at most one dim of ``shape`` is a batch."""
    try:
        expanded = mask.expand(shape).flatten(0, -4)
        return mask if len(shape) == 4 else expanded  # whose gradient is summed where it is made
    except RuntimeError as error:
        raise UnsupportedProblemError(
            f"attn_mask must broadcast to {shape}, got {tuple(mask.shape)}"
        ) from error
