"""Tensors as other packages take them: head dims that are no multiple of 8, and any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..api.shared import checks
from ..core.operation import MAX_DIM_QK, MAX_DIM_V, require
from ..errors import UnsupportedProblemError


def check_tensor(name: str, x: object) -> None:
    """Check that an argument is a tensor in strided memory: others may have no shape or strides to ask for.

    Raises:
        UnsupportedProblemError: it is not.
    """
    if not isinstance(x, torch.Tensor):  # first, as the message takes longer than the check
        raise UnsupportedProblemError(f"{name} must be a tensor, got {checks.shown(x)}")
    checks.check_layout(name, x)


def check_rank(name: str, x: torch.Tensor, ndim: int) -> None:
    """Check how many dimensions a tensor has.

    Raises:
        UnsupportedProblemError: more, or fewer.
    """
    if x.dim() != ndim:
        raise UnsupportedProblemError(f"{name} must have {ndim} dimensions, got {list(x.shape)}")


def readable(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its last dim is dense, else a copy."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast gives to tensors on a kind of device; None where it is off, or knows no such device."""
    if device_type not in ("cuda", "cpu") or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


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
    check_three(ndim, q, k, v)
    dim, dim_v = q.shape[-1], v.shape[-1]
    if softmax_scale is None and dim % checks.VECTOR_ELEMENTS:
        softmax_scale = dim**-0.5
    q, k, v = (_padded(x) for x in (q, k, v))
    result = function(q=q, k=k, v=v, softmax_scale=softmax_scale, **options)
    if dim_v % checks.VECTOR_ELEMENTS == 0:
        return result
    if isinstance(result, tuple):
        return result[0][..., :dim_v], result[1]
    return result[..., :dim_v]


def check_three(ndim: int, q: Any, k: Any, v: Any) -> None:
    """Check that q, k and v are tensors of ``ndim`` dimensions, and their head dims before these are padded.

    Raises:
        UnsupportedProblemError: they are not, or one is too large.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        check_rank(name, x, ndim)
    dim, dim_v = q.shape[-1], v.shape[-1]
    require(dim == k.shape[-1], f"q and k must have the same dim, got {dim} and {k.shape[-1]}")
    require(dim <= MAX_DIM_QK, f"dim of q and k must be at most {MAX_DIM_QK}, got {dim}")
    require(dim_v <= MAX_DIM_V, f"dim of v must be at most {MAX_DIM_V}, got {dim_v}")


def padded_shape(x: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor whose last dim is padded."""
    return (*x.shape[:-1], x.shape[-1] + -x.shape[-1] % checks.VECTOR_ELEMENTS)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """A tensor with zeros after its last dim up to a multiple of 8."""
    missing = -x.shape[-1] % checks.VECTOR_ELEMENTS
    return torch.nn.functional.pad(x, (0, missing)) if missing else readable(x)
