"""Retention by the names of the package ``fla``: ``[batch, seqlen, heads, dim]``, its arguments and defaults.

``sys.modules["fla.ops.retention"] = attention_autotuner.compat.fla`` makes ``from fla.ops.retention import ...`` find
them. All are :func:`attention_autotuner.retention_func` with the decays of RetNet: the name does not choose the form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..api import retention_func
from ..api.shared.options import RETENTION, Off, refuse_others
from ..core.operation import require
from .tensors import check_tensor, readable

_OFF = {
    **RETENTION,
    "head_first": Off(False, "transpose q, k, v and o to [batch, seqlen, heads, dim]"),
    "output_attentions": Off(False),
    "reverse": Off(False, "flip q, k, v and o in time"),
    "transpose_state_layout": Off(False, "transpose the states"),
}


def chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention and its final state, with gradients.

    Args:
        q: ``[batch, seqlen, heads, dim_qk]``, fp16 or bf16.
        k: ``[batch, seqlen, heads, dim_qk]``.
        v: ``[batch, seqlen, heads, dim_v]``.
        scale: None is ``1 / sqrt(dim_qk)``.
        initial_state: ``[batch, heads, dim_qk, dim_v]``, computed with in fp32; None is zeros. With ``cu_seqlens``
            there is one for each sequence.
        output_final_state: whether the final state is returned; else None is.
        cu_seqlens: int32 or int64 ``[sequences + 1]`` on q's device, from 0: where the sequences of batch entry 0 end.
        head_first: must be False.

    Returns:
        o ``[batch, seqlen, heads, dim_v]``, and the state in fp32 or None.

    Raises:
        UnsupportedArgumentError: an option is not what it must be.
        UnsupportedProblemError: the tensors are outside what the kernels support.
    """
    off, states = {"head_first": head_first}, (initial_state, output_final_state)
    return _retention(chunk_retention, off, q, k, v, scale, cu_seqlens, *states)


fused_chunk_retention = chunk_retention


def fused_recurrent_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    transpose_state_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`chunk_retention` with other options, all of which must be off."""
    off = {"reverse": reverse, "transpose_state_layout": transpose_state_layout}
    states = (initial_state, output_final_state)
    return _retention(fused_recurrent_retention, off, q, k, v, scale, cu_seqlens, *states)


def parallel_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
) -> tuple[torch.Tensor, None]:
    """:func:`chunk_retention` without states; ``output_attentions`` must be False, and the second result is None."""
    off = {"head_first": head_first, "output_attentions": output_attentions}
    return _retention(parallel_retention, off, q, k, v, scale, cu_seqlens)[0], None


def _retention(
    function: Callable[..., Any],
    off: Mapping[str, Any],
    q: Any,
    k: Any,
    v: Any,
    scale: float | None,
    cu_seqlens: Any = None,
    state: Any = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention, after a check that a function's options are off."""
    refuse_others(function, off, _OFF)
    optional = {"initial_state": state, "cu_seqlens": cu_seqlens}
    for name, x in {"q": q, "k": k, "v": v, **optional}.items():
        if x is not None or name not in optional:
            check_tensor(name, x)
    if cu_seqlens is not None:  # numbers of other dtypes would be cut off
        dtype = cu_seqlens.dtype
        integers = (torch.int32, torch.int64)
        require(dtype in integers, f"cu_seqlens must be one of {integers}, got {dtype}")
    q, k, v = (readable(x) for x in (q, k, v))
    options = {"layout": "bshd", "scale": scale, "output_final_state": output_final_state}
    initial = None if state is None else state.float()
    ends = None if cu_seqlens is None else cu_seqlens.to(torch.int32)
    return retention_func(q, k, v, initial_state=initial, cu_seqlens=ends, **options)  # type: ignore[arg-type]
