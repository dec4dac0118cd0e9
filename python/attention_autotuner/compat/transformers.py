"""Attention of Hugging Face transformers: ``attn_implementation="attention_autotuner"``, known once this is imported.

Two functions are registered, for attention and for its masks. A mask is not a tensor of all pairs where it need not be:
where padding, packing or a static cache hide keys, the layers get a few int32 numbers on the device,

- ``[1, 2, 1, batch]``: the first key of every batch entry and the end of its keys, where there are no gradients;
- ``[1, 1, 2, sequences + 1]``: where packed sequences end, ``cu_seqlens`` of queries and keys, of the rows of all batch
  entries one after the other. Padding lies between them and is neither read nor computed.

They have four dimensions because transformers hands such masks on as they are, through ``generate`` and compiled code.
Patterns that no window and no lengths express (chunks, blocks of images, holes) are boolean masks of all pairs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, __version__
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from ..api import flash_attn_func, flash_attn_varlen_func
from ..api.shared import checks
from ..core.operation import require
from ..core.problem import NO_WINDOW
from ..errors import UnsupportedProblemError
from .tensors import autocast_dtype, check_tensor, of_any_dims

if "q_length" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(
        f"{__name__} needs a transformers whose masks take q_length (5.17 does), got {__version__}"
    )

NAME = "attention_autotuner"

Mask = torch.Tensor | None

REFUSED = ("position_bias", "sinks", "indices", "block_indices", "cache", "block_table")
"""Arguments of some models that change the result and are not served: biases, sinks by query, sparse or paged keys."""

_PACKED = "packed_sequence_mask_function"
_BOTH_SIDES = "sliding_window_bidirectional_overlay"
_COMPACT = {
    "and_masks",
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    _BOTH_SIDES,
    "remap_positions_for_packed_sequence",
    _PACKED,
}
"""Functions of transformers whose masks are windows and lengths."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Mask = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Mask = None,
    cu_seq_lens_k: Mask = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    deterministic: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it in each layer.

    Args:
        module: the layer; its ``is_causal`` decides where the argument does not.
        query: ``[batch, heads_q, seqlen_q, dim]``, fp16 or bf16; anything under autocast, which decides then.
        key: ``[batch, heads_kv, seqlen_k, dim]``; need not be repeated for GQA.
        value: ``[batch, heads_kv, seqlen_k, dim_v]``.
        attention_mask: what :func:`make_mask` gives, or the caller's own mask of all pairs, boolean or added, which
            then says all about who sees whom. None hides nothing beyond ``is_causal`` and the window.
        dropout: must be 0.
        scaling: of the scores; ``1 / sqrt(dim)`` when None.
        sliding_window: keys that a query sees, itself among them; as many to either side where it is not causal.
        softcap: of the scaled scores.
        s_aux: ``[heads_q]``, the logit of each head's sink.
        is_causal: the last query sees all keys, the one before it all but one, and so on.
        cu_seq_lens_q: int ``[sequences + 1]``: the batch's rows are packed sequences, whatever ``attention_mask`` says.
        cu_seq_lens_k: the same of keys; None is ``cu_seq_lens_q``.
        max_length_q: the greatest length of queries, from which a kernel is chosen; read where it is a number.
        max_length_k: the same of keys.
        deterministic: True for gradients that are the same every time; else torch's setting decides.
        **options: anything else is of no consequence here, or must be off.

    Returns:
        ``[batch, seqlen_q, heads_q, dim_v]``, with 0 for queries between packed sequences, and None in the place of
        attention weights.

    Raises:
        UnsupportedProblemError: the layer needs what the kernels cannot do.
    """
    require(dropout == 0.0, f"{NAME}: attention dropout must be 0, got {dropout}")
    for name in REFUSED:
        option = options.get(name)
        if option is not None:
            raise UnsupportedProblemError(
                f"{NAME}: {name} must be None, got {checks.shown(option)}"
            )
    if options.get("output_attentions"):
        raise UnsupportedProblemError(f"{NAME}: output_attentions must be False, got True")
    tensors = {"attention_mask": attention_mask, "s_aux": s_aux}
    tensors |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    for name, x in tensors.items():
        if x is not None:
            check_tensor(f"{NAME}: {name}", x)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    dtype = autocast_dtype(query.device.type)
    if dtype is not None:  # rotary embeddings leave query and key in fp32 then
        query, key, value = (x.to(dtype) for x in (query, key, value))
    side = None if sliding_window is None else sliding_window - 1
    named: dict[str, Any] = {
        "causal": causal,
        "window_size": NO_WINDOW if side is None else (side, side),
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
        "deterministic": deterministic or None,
    }
    if cu_seq_lens_q is not None:
        cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        attention_mask = packed_mask(cu_seq_lens_q, cu_seq_lens_k)
    form: tuple[int, ...] = ()
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        fine = len(shape) == 4
        require(fine, f"{NAME}: attention_mask must have 4 dimensions, got {shape}")
        form = shape[:3] if attention_mask.dtype == torch.int32 else ()
    if attention_mask is not None and form == (1, 1, 2):
        ends_q, ends_k = attention_mask[0, 0]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        named |= {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
        named["max_seqlen_q"] = _length(max_length_q, query)
        named["max_seqlen_k"] = _length(max_length_k, key)
        o = of_any_dims(flash_attn_varlen_func, 3, q, k, v, scaling, **named)
        return o.unflatten(0, (query.shape[0], query.shape[2])), None
    if attention_mask is not None and form == (1, 2, 1):
        named |= {"starts_k": attention_mask[0, 0, 0], "seqlens_k": attention_mask[0, 1, 0]}
    elif attention_mask is not None:
        named |= {"attn_mask": attention_mask, "causal": False, "window_size": NO_WINDOW}
    o = of_any_dims(flash_attn_func, 4, query, key, value, scaling, **named)
    # The output lies in memory as the query does: for a transposed view this copies nothing.
    return o.transpose(1, 2).contiguous(), None


def _length(length: Any, x: torch.Tensor) -> Any:
    """A greatest length that the host knows; reading a tensor would wait for the GPU."""
    return length if isinstance(length, (int, torch.SymInt)) else x.shape[2]


def packed_mask(cu_seqlens_q: torch.Tensor, cu_seqlens_k: Mask = None) -> torch.Tensor:
    """The ``attention_mask`` of packed sequences, for a model's call.

    Given ahead, no mask has to be looked at during the forward pass: it then compiles without a graph break. A batch of
    full rows is packed, too: ``torch.arange(0, batch * seqlen + 1, seqlen)``.

    Args:
        cu_seqlens_q: int ``[sequences + 1]``, where sequences end among the rows of all batch entries, from 0.
        cu_seqlens_k: the same of keys; None is ``cu_seqlens_q``.

    Returns:
        int32 ``[1, 1, 2, sequences + 1]``.
    """
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return _stacked(cu_seqlens_q, cu_seqlens_k)[None, None]


def make_mask(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Mask = None,
    **sizes: Any,
) -> Mask:
    """A mask as transformers asks for it once a forward pass.

    Where tokens may be padding or packed, or there is a window, values decide the form of the mask, and the host waits
    for a GPU to have them; compiled code has a graph break there.

    Args:
        mask_function: transformers' own name of the pattern.
        attention_mask: bool ``[batch, tokens]``, False where a token is padding.
        **sizes: ``batch_size``, ``q_length`` and ``kv_length``, those of the cache included; ``q_offset`` and
            ``kv_offset``, positions of the first query, a tensor where the cache is static, and of the first key;
            ``device``; ``use_vmap`` for a pattern of the caller's. Others are of no consequence.

    Returns:
        None where only the causal mask and the window hide keys, int32 numbers as the module says, or a boolean mask
        ``[batch, 1, q_length, kv_length]``.
    """
    if attention_mask is None and mask_function is bidirectional_mask_function:
        return None
    if attention_mask is None and mask_function is causal_mask_function:
        end = sizes.get("q_offset", 0) + sizes["q_length"] - sizes.get("kv_offset", 0)
        starts = torch.zeros(sizes["batch_size"], dtype=torch.int64, device=sizes.get("device"))
        if isinstance(end, torch.Tensor) or end < sizes["kv_length"]:
            return _bounds(starts, end)
        if end == sizes["kv_length"]:
            return None
    mask: Mask = _inspected_mask(
        mask_function=mask_function, attention_mask=attention_mask, **sizes
    )
    return mask


@torch.compiler.disable(reason="attention_mask=packed_mask(...) avoids it")  # type: ignore[no-untyped-call, untyped-decorator]  # torch's own
def _inspected_mask(
    *, mask_function: Callable[..., Any], attention_mask: Mask, **sizes: Any
) -> Mask:
    """The mask of any pattern; arguments and results are those of :func:`make_mask`."""
    batch, q_length, kv_length = (sizes[x] for x in ("batch_size", "q_length", "kv_length"))
    kv_offset, device = sizes.get("kv_offset", 0), sizes.get("device")
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense: Callable[[], Mask] = functools.partial(
        sdpa_mask, mask_function=mask_function, attention_mask=attention_mask, **(sizes | skips)
    )
    names = _names(mask_function)
    diagonal = mask_function is not bidirectional_mask_function
    end = int(sizes.get("q_offset", 0)) + q_length - kv_offset if diagonal else kv_length
    square, both_sides = q_length == kv_length == end, _BOTH_SIDES in names
    if (
        sizes.get("use_vmap")
        or not names <= _COMPACT
        or end > kv_length
        or (both_sides and not square)
    ):
        return dense()
    if _PACKED in names:
        return _of_neighbors(mask_function, batch, q_length, device)
    # Gradients of bounds copy tensors that do not lie as rows; without any, the faster kernels of more GPUs have them.
    packed = both_sides or (torch.is_grad_enabled() and (square or not diagonal))
    starts, ends = [0] * batch, [end] * batch
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + kv_length]
        until = (seen.shape[1] - seen.flip(-1).int().argmax(-1)) * seen.any(-1)
        counts, starts, until = torch.stack((seen.sum(-1), seen.int().argmax(-1), until)).tolist()
        if any(count != z - a for count, a, z in zip(counts, starts, until, strict=True)):
            return dense()
        # Causal, keys that are padding at the end are seen by queries that are padding alone.
        ends = until if packed or not diagonal else ends
    # Compiled steps of a static cache ask for a mask always: they would look for one of their own.
    needed = diagonal and not sizes.get("allow_is_causal_skip", True)
    if max(starts) == 0 and min(ends) == kv_length and not needed:
        return None
    if not packed:
        return _bounds(torch.tensor(starts, device=device), torch.tensor(ends, device=device))
    # Three sequences for an entry: queries without keys, then keys without queries, which are padding, then the rest.
    ends_q, ends_k = [0], [0]
    for entry, (a, z) in enumerate(zip(starts, ends, strict=True)):
        key = entry * kv_length
        first, last = (key + a, key + z) if diagonal else (entry * q_length, (entry + 1) * q_length)
        ends_q += [first, first, last]
        ends_k += [ends_k[-1], key + a, key + z]
    return packed_mask(*torch.tensor([ends_q, ends_k], device=device))


def _names(mask_function: Any) -> set[str]:
    """Names of the functions that a mask's pattern is made of."""
    names = {getattr(mask_function, "__qualname__", repr(mask_function)).partition(".")[0]}
    for cell in getattr(mask_function, "__closure__", None) or ():
        content = cell.cell_contents
        for inner in content if isinstance(content, tuple) else (content,):
            if callable(inner):
                names |= _names(inner)
    return names


def _of_neighbors(mask_function: Callable[..., Any], batch: int, length: int, device: Any) -> Mask:
    """The mask of sequences that begin where a token does not see the one before it."""
    entries = torch.arange(batch, device=device)[:, None]
    tokens = torch.arange(1, length, device=device)
    begins = torch.ones(batch, length, dtype=torch.bool, device=device)
    begins[:, 1:] = ~mask_function(entries, entries, tokens, tokens - 1)
    rows = begins.flatten().nonzero().flatten()
    if len(rows) == batch:
        return None
    return packed_mask(torch.nn.functional.pad(rows, (0, 1), value=batch * length))


def _bounds(starts: torch.Tensor, ends: Any) -> torch.Tensor:
    """First keys and ends ``[batch]``, or one end for all, as int32 ``[1, 2, 1, batch]``."""
    ends = torch.zeros_like(starts) + ends
    return _stacked(starts, ends)[None, :, None]


def _stacked(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two vectors as int32 ``[2, n]``, each at a multiple of 16 bytes, as calls that are replayed have them."""
    both = torch.stack((first, second)).to(torch.int32)
    if torch.compiler.is_compiling():
        return both  # without a condition on its length
    length = both.shape[1]
    return torch.nn.functional.pad(both, (0, -length % 4))[:, :length]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, make_mask)
