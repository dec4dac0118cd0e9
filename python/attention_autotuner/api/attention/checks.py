"""Argument checks of attention, each failure naming the constraint and the value.

They read shapes, strides and dtypes only, so that fake tensors pass through them as well as real ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...core.modifications import DOCUMENT_IDS, MAX_BIAS_DISTANCE, PREFIX_LENS, SPANNED
from ...core.operation import require, require_spans
from ...core.problem import CAUSAL_ALIGNMENTS, Problem, is_pair
from ...errors import UnsupportedProblemError
from ...operations.attention.modified import CU_SEQLENS, MASK_DTYPES, Modifiers
from ..shared import checks
from ..shared.options import as_float

SCALE = "softmax_scale"  # in messages

Options = tuple["float | None", bool, bool, str]
"""Arguments of both ops beside tensors: the softmax scale, None for ``1 / sqrt(dim_qk)``; whether rows see keys up to
their diagonal only; whether that begins at the top left; and a policy's name for :func:`naming.policy_named`, empty for
the GPU of q.
"""


def check_options(
    causal: object,
    softmax_scale: object,
    causal_alignment: object,
    return_lse: object,
    deterministic: object,
) -> float | None:
    """Check the arguments that are no tensors.

    Returns:
        The softmax scale as a float, or None.

    Raises:
        UnsupportedProblemError: one is outside its range.
    """
    checks.check_flags(causal=causal, return_lse=return_lse)
    require(
        deterministic is None or isinstance(deterministic, bool),
        f"deterministic must be True, False or None, got {checks.shown(deterministic)}",
    )
    require(
        isinstance(causal_alignment, str) and causal_alignment in CAUSAL_ALIGNMENTS,
        f"causal_alignment must be one of {CAUSAL_ALIGNMENTS}, got {checks.shown(causal_alignment)}",
    )
    if softmax_scale is None:
        return None
    scale = as_float(SCALE, softmax_scale, " or None")
    checks.check_scale(scale, SCALE)
    return scale


def check_window(window: object) -> tuple[int, int]:
    """A window as two integers.

    Raises:
        UnsupportedProblemError: it is anything else, or one is less than -1 or more than 2**30.
    """
    sides = [checks.whole(x) for x in window] if isinstance(window, (tuple, list)) else None
    if not (is_pair(sides, -1) and all(isinstance(x, int) for x in sides)):
        # The text only here: torch.compile traces no repr of a window that it takes for a variable.
        shown = checks.shown(window)
        raise UnsupportedProblemError(
            f"window_size must be two integers from -1 to 2**30, got {shown}"
        )
    left, right = sides
    return left, right


def canonical_window(
    window: tuple[int, int], causal: bool, top_left: bool, seqlen_q: int, seqlen_k: int
) -> tuple[tuple[int, int], bool]:
    """The window without bounds that hide nothing, and the causal mask that is part of it."""
    left, right = window
    causal = causal or right == 0
    if left >= (seqlen_q if top_left else seqlen_k) - 1:
        left = -1
    if causal or right >= (seqlen_k if top_left else seqlen_q) - 1:
        right = -1
    return (left, right), causal


def check_bounds(q: torch.Tensor, **bounds: torch.Tensor | None) -> None:
    """Check the first keys and ends of batch entries, by their names, against a checked q; None is passed over.

    Their values are not looked at: on a GPU that would wait for it.

    Raises:
        UnsupportedProblemError: one is not int32, contiguous, ``[batch]`` and on q's device.
    """
    for name, x in bounds.items():
        if x is not None:
            checks.check_like(name, x, q.shape[:1], torch.int32, q.device)
            require(x.is_contiguous(), f"{name} must be contiguous, got a stride of {x.stride()}")


def check_spans(
    values: Mapping[str, torch.Tensor],
    seqlens: tuple[int, int],
    window: tuple[int, int],
    causal: bool,
) -> None:
    """Check that documents and prefixes, where they are among the values, suit a call.

    Raises:
        UnsupportedProblemError: queries are more or fewer than keys, a prefix has no causal mask to widen or a right
            bound, or there is a table of biases besides.
    """
    for name in (DOCUMENT_IDS, PREFIX_LENS):
        require(
            not (name in values and "bias_table" in values),
            f"{name} takes no bias, got both",
        )
    require_spans(values, seqlens, causal, window)


def check_order(document_ids: torch.Tensor) -> None:
    """Check that ids ``[batch, seqlen]`` on the CPU never decrease.

    Raises:
        UnsupportedProblemError: they do.
    """
    falls = (document_ids.diff(dim=1) < 0).nonzero()
    require(
        not len(falls),
        "document_ids must never decrease along the sequence, got a lesser one after [batch entry, row] "
        f"{falls[:1].tolist()}",
    )


def check_packing(
    q: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor | None, longest: tuple[int, int]
) -> None:
    """Check where packed sequences end against a checked q; values on a GPU are not looked at.

    Raises:
        UnsupportedProblemError: they are no two int32 tensors of one length on q's device, a greatest length is less
            than 0, or tensors have several batch entries.
    """
    require(
        q.shape[0] == 1, f"packed sequences must be one batch entry, got a batch of {q.shape[0]}"
    )
    for name, x in (("cu_seqlens_q", ends_q), ("cu_seqlens_k", ends_k)):
        fine = x is not None and x.dim() == 1 and len(x) >= 2 and len(x) == len(ends_q)
        require(
            fine,
            "cu_seqlens_q and cu_seqlens_k must have one shape [sequences + 1] with at least one sequence, got "
            f"{checks.shown(x)} as {name} beside {checks.shown(ends_q)}",
        )
        assert x is not None
        checks.check_like(name, x, x.shape, torch.int32, q.device)
        require(x.is_contiguous(), f"{name} must be contiguous, got {x.stride()}")
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
        require(length >= 0, f"{name} must be at least 0, got {length}")


def check_entries(table: torch.Tensor) -> int:
    """The entries of a head in a bias table, as many to either side of the diagonal's.

    Raises:
        UnsupportedProblemError: it has not two dimensions, an even number of entries, or too many.
    """
    sizes = tuple(table.shape)
    require(
        len(sizes) == 2 and sizes[1] % 2 == 1,
        f"bias must have the shape (heads_q, 2 * D + 1), got {sizes}",
    )
    require(
        sizes[1] <= 2 * MAX_BIAS_DISTANCE + 1,
        f"bias must have entries for distances of at most {MAX_BIAS_DISTANCE}, got {sizes[1] // 2}",
    )
    return sizes[1]


def mask_of_pairs(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask as a view with the axes of all pairs ``[batch, heads_q, seqlen_q, seqlen_k]``, each as long or 1.

    Raises:
        UnsupportedProblemError: it does not broadcast to them, or has another dtype.
    """
    sizes = tuple(mask.shape)
    fits = len(sizes) <= 4 and all(
        x in (1, y) for x, y in zip(reversed(sizes), reversed(shape), strict=False)
    )
    require(fits, f"attn_mask must broadcast to {shape}, got {sizes}")
    require(mask.dtype in MASK_DTYPES, f"attn_mask must be one of {MASK_DTYPES}, got {mask.dtype}")
    return mask[(None,) * (len(shape) - len(sizes))]


def check_modifiers(q: torch.Tensor, modifiers: Modifiers) -> None:
    """Check the values of modifications against a checked q; those on a GPU are not looked at.

    Raises:
        UnsupportedProblemError: one is out of range, or no tensor of the right shape and dtype on q's device.
    """
    check_window(modifiers.window_size)
    require(
        0 <= modifiers.softcap < math.inf,
        f"softcap must be a finite number, 0 for none, and not negative, got {modifiers.softcap}",
    )
    batch, heads = q.shape[:2]
    ends = modifiers.cu_seqlens_q
    if ends is not None:
        check_packing(q, ends, modifiers.cu_seqlens_k, modifiers.max_seqlens)
        batch = len(ends) - 1
    for name, x in modifiers.tensors.items():
        if name in CU_SEQLENS:
            continue
        if name == "attn_mask":
            device = q.device  # its shape is that of all pairs
            require(x.device == device, f"attn_mask must be on q's device {device}, got {x.device}")
            continue
        shape: tuple[int, ...] = (heads,)
        if name in SPANNED:
            shape = (batch,) if name == PREFIX_LENS else (batch, q.shape[2])
        if name == "alibi_slopes" and x.dim() == 2:
            shape = (batch, heads)
        dtype = torch.int32 if name in SPANNED else torch.float32
        if name == "bias_table":
            name, shape = "bias", (heads, check_entries(x))  # as a caller knows it
        checks.check_like(name, x, shape, dtype, q.device)
        require(x.is_contiguous(), f"{name} must be contiguous, got strides of {x.stride()}")
    slopes = modifiers.alibi_slopes
    require(
        slopes is None or not slopes.requires_grad,
        "alibi_slopes get no gradient: pass them detached, got requires_grad=True",
    )


def refuse_bounded(bounded: bool) -> None:
    """Refuse the gradient of a call with key bounds.

    Raises:
        UnsupportedProblemError: it had them.
    """
    require(
        not bounded,
        "attention with seqlens_k or starts_k has no backward yet: call it under torch.no_grad()",
    )


def check_gradients(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Check the backward's tensors beside q, k and v, which are checked already; strides are free.

    Raises:
        UnsupportedProblemError: one is not what the forward returned, or no gradient of that.
    """
    checks.check_some_gradient("lse", grad_o, grad_lse)
    checks.check_results({"o": o, "the gradient of o": grad_o}, q, v)
    checks.check_results({"lse": lse, "the gradient of lse": grad_lse}, q)


def make_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, **named: Any
) -> Problem | None:
    """The attention that checked tensors name, None of empty ones; ``named`` are its other fields."""
    if checks.is_empty(q, k):
        return None
    _, causal, top_left, _ = options
    return Problem(
        causal=causal,
        causal_alignment="top_left" if top_left else "bottom_right",
        alignment_bytes=checks.alignment_bytes(q, k, v),
        **{**checks.sizes(q, k, v), **named},
    )
