"""Tensors as other packages take them: head dims that are no multiple of 8, and any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..api import flash_attn_func
from ..api.shared import checks
from ..api.shared.options import TensorLayout
from ..core.operation import require


def check_tensor(name: str, x: object) -> None:
    """Check that an argument is a tensor.

    Raises:
        UnsupportedProblemError: it is not.
    """
    require(isinstance(x, torch.Tensor), f"{name} must be a tensor, got {checks.shown(x)}")


def readable(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its last dim is dense, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    layout: TensorLayout = "bshd",
    **options: Any,
) -> Any:
    """``flash_attn_func`` of tensors of any strides and head dims; those that need it are copied or padded.

    Args:
        q: ``[batch, seqlen_q, heads_q, dim_qk]``, or as layout says, as are k and v.
        k: see q.
        v: see q.
        softmax_scale: None is ``1 / sqrt(dim_qk)``.
        layout: ``"bshd"`` or ``"bhsd"``.
        options: others of ``flash_attn_func``.

    Raises:
        UnsupportedProblemError: as ``flash_attn_func`` does.
    """
    return of_any_dims(flash_attn_func, 4, q, k, v, softmax_scale, layout=layout, **options)


def of_any_dims(
    function: Callable[..., Any],
    ndim: int,
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    **options: Any,
) -> Any:
    """A function of q, k and v ``[..., dim]``, of ``ndim`` dimensions, of any strides and head dims.

    Raises:
        UnsupportedProblemError: they have other dimensions, or as the function does.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        require(x.dim() == ndim, f"{name} must have {ndim} dimensions, got {list(x.shape)}")
    dim, dim_v = q.shape[-1], v.shape[-1]
    require(dim == k.shape[-1], f"q and k must have the same dim, got {dim} and {k.shape[-1]}")
    if softmax_scale is None and dim % checks.VECTOR_ELEMENTS:
        softmax_scale = dim**-0.5
    q, k, v = (_padded(x) for x in (q, k, v))
    result = function(q=q, k=k, v=v, softmax_scale=softmax_scale, **options)
    if dim_v % checks.VECTOR_ELEMENTS == 0:
        return result
    if isinstance(result, tuple):
        return result[0][..., :dim_v], result[1]
    return result[..., :dim_v]


def _padded(x: torch.Tensor) -> torch.Tensor:
    """A tensor with zeros after its last dim up to a multiple of 8."""
    missing = -x.shape[-1] % checks.VECTOR_ELEMENTS
    return torch.nn.functional.pad(x, (0, missing)) if missing else readable(x)
