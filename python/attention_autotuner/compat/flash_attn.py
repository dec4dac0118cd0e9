"""The functions of the package ``flash_attn``, release 2: names, ``[batch, seqlen, heads, dim]``, defaults, results.

``sys.modules["flash_attn"] = attention_autotuner.compat.flash_attn`` makes ``from flash_attn import ...`` find them.
Options that no kernel here has are an ``UnsupportedArgumentError``, unless at the value that leaves them off.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..api.attention.checks import SCALE, check_modifiers, check_window
from ..api.shared import checks
from ..api.shared.options import ATTENTION, Off, as_float, refuse_others
from ..core.operation import require
from ..errors import UnsupportedProblemError
from ..operations.attention.modified import Modifiers
from .key_cache import append, check_caches, lengths_of
from .tensors import check_rank, check_tensor, of_any_dims

__version__ = "2.8.3"  # whose interface this is: callers ask it for what they may pass

_CACHE = {
    **ATTENTION,
    "cache_batch_idx": Off(hint="order the cache as the batch, or index it before the call"),
    "num_splits": Off(0, "the search chooses how many CTAs share the keys"),
    "rotary_cos": Off(hint="rotate q and k before the call"),
    "rotary_sin": Off(hint="rotate q and k before the call"),
}


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention, with gradients.

    Args:
        q: ``[batch, seqlen_q, heads_q, dim]``, fp16 or bf16; head dims up to 256 that are no multiple of 8 are padded.
        k: ``[batch, seqlen_k, heads_kv, dim]``; heads_q must be a multiple of heads_kv.
        v: ``[batch, seqlen_k, heads_kv, dim_v]``.
        dropout_p: must be 0.
        softmax_scale: None is ``1 / sqrt(dim)``.
        causal: the last query sees all keys.
        window_size: keys before and after the diagonal that a query sees; negative for all.
        softcap: c of ``c tanh(scores / c)``; 0 for none.
        alibi_slopes: fp32 ``[heads_q]`` or ``[batch, heads_q]``, or None.
        deterministic: whether equal backward calls agree bit for bit; False follows torch's setting.
        return_attn_probs: return ``(o, lse, p)``, with lse ``[batch, heads_q, seqlen_q]`` in fp32 and p empty, as it is
            there without dropout.

    Returns:
        o ``[batch, seqlen_q, heads_q, dim_v]``.

    Raises:
        UnsupportedArgumentError: an option is not what it must be.
        UnsupportedProblemError: the tensors are outside what the kernels support.
    """
    refuse_others(flash_attn_func, {"dropout_p": dropout_p}, ATTENTION)
    checks.check_flags(return_attn_probs=return_attn_probs)
    check_tensor("q", q)
    check_rank("q", q, 4)
    named = _bent(q, window_size, softcap, alibi_slopes)
    named |= {"layout": "bshd", "causal": causal, "return_lse": return_attn_probs}
    named["deterministic"] = None if deterministic is False else deterministic
    result = of_any_dims(api.flash_attn_func, 4, q, k, v, softmax_scale, **named)
    return (*result, q.new_empty(0)) if return_attn_probs else result


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *options: Any, **named: Any) -> Any:
    """:func:`flash_attn_func` of q, k and v in one tensor ``[batch, seqlen, 3, heads, dim]``, without a copy."""
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *options: Any, **named: Any) -> Any:
    """:func:`flash_attn_func` of k and v in one tensor ``[batch, seqlen_k, 2, heads_kv, dim]``, without a copy."""
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to the valid part of a cache, after new keys and values are written behind it; without gradients.

    Args:
        q: ``[batch, seqlen_q, heads_q, dim]``.
        k_cache: ``[batch, seqlen_cache, heads_kv, dim]``, as is v_cache.
        v_cache: see k_cache.
        k: ``[batch, seqlen_new, heads_kv, dim]``, copied into k_cache from ``cache_seqlens`` on, where it must fit; v
            likewise. The caches must then share no memory among their elements, as expanded ones do.
        v: see k.
        rotary_cos: must be None.
        rotary_sin: must be None.
        cache_seqlens: how many keys the cache has, without the new ones: a number, int32 ``[batch]`` on q's device, or
            None for all, which leaves no space for new ones.
        cache_batch_idx: must be None.
        cache_leftpad: first keys, int32 ``[batch]`` on q's device; None is 0.
        block_table: must be None.
        softmax_scale: None is ``1 / sqrt(dim)``.
        causal: the last query sees all valid keys of its batch entry, new ones included.
        window_size: as of :func:`flash_attn_func`, as are softcap and alibi_slopes.
        softcap: see window_size.
        rotary_interleaved: of rotary_cos, without meaning where that is None.
        alibi_slopes: see window_size.
        num_splits: must be 0.
        return_softmax_lse: return ``(o, lse)``.

    Raises:
        UnsupportedArgumentError: an option is not what it must be.
        UnsupportedProblemError: the tensors are outside what the kernels support, or the new keys do not fit.
    """
    refuse_others(
        flash_attn_with_kvcache,
        {
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "cache_batch_idx": cache_batch_idx,
            "block_table": block_table,
            "num_splits": num_splits,
        },
        _CACHE,
    )
    # A call that is refused must leave the caches as they were, so all checks come before the first write.
    checks.check_flags(causal=causal, return_softmax_lse=return_softmax_lse)
    if softmax_scale is not None:
        softmax_scale = as_float(SCALE, softmax_scale, " or None")
        checks.check_scale(softmax_scale, SCALE)
    check_caches(q, k_cache, v_cache, k, v, cache_seqlens, cache_leftpad)
    named = _bent(q, window_size, softcap, alibi_slopes)
    lengths = lengths_of(q, cache_seqlens, 0 if k is None else k.shape[1], k_cache.shape[1])
    if k is not None and v is not None and lengths is not None:
        append(lengths, (k_cache, k), (v_cache, v))
        lengths = lengths + k.shape[1]
    named |= {"layout": "bshd", "causal": causal, "return_lse": return_softmax_lse}
    named |= {"seqlens_k": lengths, "starts_k": cache_leftpad}
    with torch.no_grad():  # or it would be packed, which has a gradient and takes longer
        results = of_any_dims(api.flash_attn_func, 4, q, k_cache, v_cache, softmax_scale, **named)
    inputs = [x for x in (q, k_cache, v_cache, k, v) if x is not None]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return results
    o, *others = results if return_softmax_lse else (results,)
    o = _NoGradient.apply(o, *inputs)  # type: ignore[no-untyped-call]  # torch's own
    return (o, *others) if return_softmax_lse else o


class _NoGradient(torch.autograd.Function):
    """Says so where a gradient of a result is asked for."""

    @staticmethod
    def forward(_: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the result as a function of the inputs."""
        return result.view_as(result)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        """Refuse.

        Raises:
            UnsupportedProblemError: always.
        """
        raise UnsupportedProblemError(
            "flash_attn_with_kvcache has no backward: call it under torch.no_grad()"
        )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Any:
    """Attention of packed sequences, with gradients.

    Args:
        q: ``[total_q, heads_q, dim]``, the sequences one after the other; see :func:`flash_attn_func`.
        k: ``[total_k, heads_kv, dim]``.
        v: ``[total_k, heads_kv, dim_v]``.
        cu_seqlens_q: int32 ``[sequences + 1]`` on q's device, from 0: where each sequence ends.
        cu_seqlens_k: the same of keys.
        max_seqlen_q: the greatest length, as is max_seqlen_k.
        max_seqlen_k: see max_seqlen_q.
        dropout_p: as of :func:`flash_attn_func`, as are the options that follow.
        softmax_scale: see dropout_p.
        causal: the last query of a sequence sees all of its keys.
        window_size: see dropout_p.
        softcap: see dropout_p.
        alibi_slopes: fp32 ``[heads_q]`` or ``[sequences, heads_q]``, or None.
        deterministic: see dropout_p.
        return_attn_probs: return ``(o, lse, p)``, with lse ``[heads_q, total_q]``.
        block_table: must be None.

    Returns:
        o ``[total_q, heads_q, dim_v]``.

    Raises:
        UnsupportedArgumentError: an option is not what it must be.
        UnsupportedProblemError: the tensors are outside what the kernels support.
    """
    off = {"dropout_p": dropout_p, "block_table": block_table}
    refuse_others(flash_attn_varlen_func, off, ATTENTION)
    checks.check_flags(return_attn_probs=return_attn_probs)
    result = of_any_dims(
        api.flash_attn_varlen_func,
        3,
        *(q, k, v, softmax_scale),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window_size=_window(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=None if deterministic is False else deterministic,
        return_lse=return_attn_probs,
    )
    return (*result, q.new_empty(0)) if return_attn_probs else result


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    """:func:`flash_attn_varlen_func` of q, k and v in one tensor ``[total, 3, heads, dim]``, without a copy."""
    q, k, v = _unpacked("qkv", qkv, 3, 1)
    lengths: Any = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *lengths, *options, **named)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *options: Any, **named: Any
) -> Any:
    """:func:`flash_attn_varlen_func` of k and v in one tensor ``[total_k, 2, heads_kv, dim]``, without a copy."""
    k, v = _unpacked("kv", kv, 2, 1)
    return flash_attn_varlen_func(q, k, v, *options, **named)


def _window(window: Any) -> Any:
    """A window whose negative sides are no bound."""
    if isinstance(window, (list, tuple)):
        sides = map(checks.whole, window)
        return tuple(max(x, -1) if isinstance(x, int) else x for x in sides)
    return window


def _bent(q: torch.Tensor, window: Any, softcap: Any, slopes: Any) -> dict[str, Any]:
    """The options of ``flash_attn_func`` that bend scores, checked against q; negative sides of a window are no bound.

    Raises:
        UnsupportedProblemError: one is out of range, or no fp32 tensor of the right shape.
    """
    window, softcap = check_window(_window(window)), as_float("softcap", softcap)
    if slopes is not None:
        check_tensor("alibi_slopes", slopes)
    if slopes is not None or softcap:
        modifiers = Modifiers(window_size=window, softcap=softcap, alibi_slopes=slopes)
        check_modifiers(q.transpose(1, 2), modifiers)
    return {"window_size": window, "softcap": softcap, "alibi_slopes": slopes}


def _unpacked(name: str, x: torch.Tensor, count: int, axis: int = 2) -> tuple[torch.Tensor, ...]:
    check_tensor(name, x)
    rows = "batch, seqlen" if axis == 2 else "rows"
    require(
        x.dim() == axis + 3 and x.shape[axis] == count,
        f"{name} must be [{rows}, {count}, heads, dim], got {list(x.shape)}",
    )
    return x.unbind(axis)
