"""Causal attention in several exact forms: the same function of q, k and v, rounded differently.

All take q ``[batch, heads_q, seqlen, dim]`` and k, v ``[batch, heads_kv, seqlen, dim]``, which may be views of any
strides, and return ``[batch, heads_q, seqlen, dim]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_autotuner import flash_attn_func

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def autotuned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This package's attention. GQA needs no argument: the tensors say how many heads each has."""
    return flash_attn_func(q, k, v, causal=True)  # type: ignore[no-any-return]  # or an array


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention, by the backend that PyTorch prefers."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_other(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention by a backend that it does not prefer."""
    backend = SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH
    k, v = _repeated(q, k, v)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention by its FlashAttention-2."""
    return _by(SDPBackend.FLASH_ATTENTION, q, k, v)


def sdpa_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention by cuDNN; by the formula on a CPU, which has no cuDNN."""
    return _by(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH, q, k, v)


def sdpa_fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention with scores and probabilities that are not rounded to q's dtype."""
    with torch.autocast(q.device.type, enabled=False):
        k, v = _repeated(q, k, v)
        o = scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        return o.to(q.dtype)


def _by(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention held to a backend that knows GQA."""
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _repeated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values with as many heads as q, for backends that do not know GQA."""
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
