"""Attention with modified scores: its arguments, ``torch.library`` ops, kernels and derivatives.

Calls without a modification never come here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from ... import settings
from ...core.modifications import SPANNED
from ...core.problem import NO_WINDOW
from ...operations.attention.modified import (
    CU_SEQLENS,
    Modifiers,
    attention_modified,
    attention_modified_backward,
)
from ..shared import checks
from ..shared.options import as_float
from ..shared.plain import Gradient, of_arguments, refuse_tangents, settings_of
from ..shared.second_order import differentiate_again, notice_reference
from ..shared.torch_library import define, differentiate_by, nothing
from . import checks as attention_checks
from . import plan as attention_plan
from . import torch_op as plain_op

Tensors = tuple[torch.Tensor, ...]


class Forward(NamedTuple):
    """Arguments of the forward op."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float | None
    causal: bool
    top_left: bool
    device_type: str
    deterministic: bool
    window_left: int
    window_right: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    attn_mask: torch.Tensor | None
    sinks: torch.Tensor | None
    seqlens_k: torch.Tensor | None
    starts_k: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: torch.SymInt
    max_seqlen_k: torch.SymInt
    bias_table: torch.Tensor | None
    prefix_lens: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None


class Backward(NamedTuple):
    """Arguments of the backward op."""

    grad_o: torch.Tensor | None
    grad_lse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float | None
    causal: bool
    top_left: bool
    device_type: str
    deterministic: bool
    window_left: int
    window_right: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    attn_mask: torch.Tensor | None
    sinks: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: torch.SymInt
    max_seqlen_k: torch.SymInt
    bias_table: torch.Tensor | None
    bias_gradient: bool
    prefix_lens: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    mask_gradient: bool = False


Call = Forward | Backward
BOUNDS = ("seqlens_k", "starts_k")
_VALUES = ("softcap", "alibi_slopes", "attn_mask", "sinks", "bias_table")  # of calls and Modifiers
UNPACKED = (None, None, 0, 0)  # arguments of both ops before the bias table's


def modifiers_of(call: Call) -> Modifiers:
    """The values of a call's modifications."""
    named = {name: getattr(call, name) for name in (*_VALUES, *CU_SEQLENS, *SPANNED)}
    if call.attn_mask is not None:
        named["attn_mask"] = call.attn_mask.expand(*call.q.shape[:3], call.k.shape[2])
    longest: Any = (call.max_seqlen_q, call.max_seqlen_k)
    window = (call.window_left, call.window_right)
    if call.attn_mask is not None and isinstance(call, Backward) and call.mask_gradient:
        named["mask_gradient"] = tuple(call.attn_mask.shape)
    return Modifiers(window_size=window, max_seqlens=longest, **named)


# --- the ops -----------------------------------------------------------------------------------------


def _forward_cuda(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    if checks.is_empty(call.q, call.k):
        return _forward_empty(call)
    modifiers = modifiers_of(call)
    attention_checks.check_modifiers(call.q, modifiers)
    o, lse = attention_plan.attention_forward(
        *call[:3], call[3:7], True, call.seqlens_k, call.starts_k, modifiers
    )
    assert lse is not None
    return o, lse


def _forward_empty(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE where there is nothing to read."""
    (o, lse), sinks = _forward_fake(call), call.sinks
    return o.zero_(), lse.fill_(-math.inf) if sinks is None else lse.copy_(sinks[:, None])


def _forward_cpu(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _forward_fake(call)
    checks.notice_exchanged(call.q, call.k)
    for name, rows in zip(CU_SEQLENS, (call.q.shape[2], call.k.shape[2]), strict=True):
        ends = getattr(call, name)
        if ends is not None:
            checks.check_ends(name, ends, rows)
    if checks.is_empty(call.q, call.k):
        return _forward_empty(call)
    bounds: dict[str, Any] = {name: getattr(call, name) for name in BOUNDS}
    if call.document_ids is not None:
        attention_checks.check_order(call.document_ids)
    named = {"modifiers": modifiers_of(call), **plain_op.options_of(call), **bounds}
    results = attention_modified(call.q, call.k, call.v, **named)
    return o.copy_(results[0]), lse.copy_(results[1])


def _forward_fake(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    q = call.q
    checks.check_tensors(q, call.k, call.v)
    attention_checks.check_bounds(q, seqlens_k=call.seqlens_k, starts_k=call.starts_k)
    attention_checks.check_modifiers(q, modifiers_of(call))
    checks.check_scale(call.softmax_scale, attention_checks.SCALE)
    return checks.empty_output(q, call.v), q.new_empty(q.shape[:3], dtype=torch.float32)


def gradients_by_kernel(call: Backward) -> Tensors:
    """Gradients of q, k and v, then of the sinks, the bias table and the mask as far as they are wanted."""
    return attention_plan.attention_backward(
        *call[:7],
        call[7:11],
        call.deterministic,
        modifiers_of(call),
        bias_gradient=call.bias_gradient,
    )


def plan_of_backward(call: Backward) -> attention_plan.AnyPlan:
    """The plan of :func:`gradients_by_kernel` for a call with a gradient of O."""
    options = (call[7:11], call.deterministic, modifiers_of(call), call.bias_gradient)
    return attention_plan.backward_plan(call[:7], *options)


def _backward_cuda(call: Backward) -> Tensors:
    if checks.is_empty(call.q, call.k):
        return _backward_empty(call)
    wanted = (call.sinks is not None, call.bias_gradient, call.mask_gradient)
    gradients = by_place(gradients_by_kernel(call), wanted)
    return tuple(nothing(call.q) if x is None else x for x in gradients)


def by_place(gradients: Tensors, wanted: Sequence[bool]) -> tuple[Any, ...]:
    """The op's results, of those of :func:`gradients_by_kernel`: None in the place of what is not wanted."""
    others = iter(gradients[3:])
    return (*gradients[:3], *(next(others) if wants else None for wants in wanted))


def _backward_empty(call: Backward) -> Tensors:
    results = tuple(x.zero_() for x in _backward_fake(call))
    if call.sinks is not None and call.grad_lse is not None:
        results[3].copy_(call.grad_lse.sum((0, 2)))  # LSE is the sink where there are no keys
    return results


def _backward_cpu(call: Backward) -> Tensors:
    if checks.is_empty(call.q, call.k):
        return _backward_empty(call)
    results = _backward_fake(call)
    gradients = attention_modified_backward(
        *call[:5], modifiers=modifiers_of(call), **plain_op.options_of(call)
    )
    values = (call.sinks is not None, call.bias_table is not None, call.mask_gradient)
    present = (True, True, True, *values)
    for result, gradient in zip(compress(results, present), gradients, strict=True):
        if result.shape == gradient.shape:  # else it is not wanted
            result.copy_(gradient)
    return results


def _backward_fake(call: Backward) -> Tensors:
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    checks.check_tensors(q, k, v)
    attention_checks.check_gradients(call.grad_o, call.grad_lse, q, v, call.o, call.lse)
    attention_checks.check_modifiers(q, modifiers_of(call))
    table = call.bias_table if call.bias_gradient else None
    mask = call.attn_mask if call.mask_gradient else None
    of_values = (nothing(q) if x is None else x.new_empty(x.shape) for x in (sinks, table, mask))
    return (*map(checks.empty_gradient, (q, k, v)), *of_values)


FORWARD_OP = define(
    "attention_modified_forward", Forward, _forward_cuda, _forward_cpu, _forward_fake, results=2
)
BACKWARD_OP = define(
    "attention_modified_backward",
    Backward,
    _backward_cuda,
    _backward_cpu,
    _backward_fake,
    results=6,
)

# --- derivatives -------------------------------------------------------------------------------------


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    """Keep what :func:`differentiate` needs of a call of the forward op."""
    call = Forward(*inputs)
    tensors = (call.alibi_slopes, call.attn_mask, call.sinks, *call[16:18], call.bias_table)
    ctx.save_for_backward(*call[:3], *output, *tensors, call.prefix_lens, call.document_ids)
    ctx.others, ctx.longest = call[3:11], call[18:20]
    ctx.bounded = call.seqlens_k is not None or call.starts_k is not None
    ctx.settings = settings.current()
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, grad_o: Gradient, grad_lse: Gradient) -> tuple[Gradient, ...]:
    """Gradients of the forward op's arguments."""
    attention_checks.refuse_bounded(ctx.bounded)
    if grad_o is None and grad_lse is None:
        return of_arguments(Forward)
    *saved, slopes, mask, sinks, ends_q, ends_k, table, prefixes, ids = ctx.saved_tensors
    checks.check_layouts({"the gradient of o": grad_o, "the gradient of lse": grad_lse})
    refuse_tangents(grad_o, grad_lse, *saved, op="attention")
    with settings_of(ctx):
        of_table, of_mask = (
            ctx.needs_input_grad[Forward._fields.index(name)]
            for name in ("bias_table", "attn_mask")
        )
        tensors = (slopes, mask, sinks, ends_q, ends_k, *ctx.longest, table, of_table)
        values = (*ctx.others, *tensors, prefixes, ids, of_mask)
        dq, dk, dv, dsinks, dbias, dmask = BACKWARD_OP(grad_o, grad_lse, *saved, *values)
    gradients: dict[str, Gradient] = {"q": dq, "k": dk, "v": dv}
    gradients["sinks"] = None if sinks is None else dsinks
    gradients["bias_table"] = dbias if of_table else None
    gradients["attn_mask"] = dmask if of_mask else None
    return tuple(gradients.get(name) for name in Forward._fields)


def save_for_double_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what :func:`differentiate_twice` needs of a call of the backward op."""
    call = Backward(*inputs)
    spans = (call.prefix_lens, call.document_ids)
    ctx.save_for_backward(*call[:5], *call[15:20], call.bias_table, *spans)
    nothing_kept: Any = dict.fromkeys(("q", "k", "v", "o", "lse", "grad_o", "grad_lse"))
    ctx.call = call._replace(**nothing_kept)
    ctx.set_materialize_grads(False)


def differentiate_twice(ctx: Any, *directions: Gradient) -> tuple[Gradient, ...]:
    """Gradients of the backward op's arguments, by the reference."""
    grad_o, grad_lse, q, k, v, slopes, mask, sinks, *ends, table, prefixes, ids = ctx.saved_tensors
    notice_reference("attention", q)
    values = dict(zip((*CU_SEQLENS, *SPANNED), (*ends, prefixes, ids), strict=True))
    values |= {"alibi_slopes": slopes}
    call = ctx.call._replace(sinks=None, bias_table=None, attn_mask=None, **values)
    added = mask is not None and mask.is_floating_point()

    def formula(q: Any, k: Any, v: Any, sinks: Any, table: Any, of_pairs: Any) -> Tensors:
        named = {"sinks": sinks, "bias_table": table, "attn_mask": of_pairs if added else mask}
        modifiers = modifiers_of(call._replace(q=q, k=k, **named))
        return attention_modified(q, k, v, modifiers=modifiers, **plain_op.options_of(call))

    inputs, gradients = differentiate_again(
        formula,
        (q, k, v, sinks, table, mask if added else None),
        (grad_o, grad_lse),
        (
            *directions[:3],
            None if sinks is None else directions[3],
            directions[4] if call.bias_gradient else None,
            directions[5] if call.mask_gradient else None,
        ),
    )
    names = ("q", "k", "v", "sinks", "bias_table", "attn_mask")
    by_name = dict(zip(names, inputs, strict=True))
    by_name |= dict(zip(("grad_o", "grad_lse"), gradients, strict=True))
    return tuple(by_name.get(name) for name in Backward._fields)


differentiate_by(FORWARD_OP, differentiate, setup_context=save_for_backward)
differentiate_by(BACKWARD_OP, differentiate_twice, setup_context=save_for_double_backward)


# --- the call ----------------------------------------------------------------------------------------


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: Any,
    softcap: Any,
    tensors: Mapping[str, Any],
    bounds: Mapping[str, torch.Tensor],
    *,
    options: attention_checks.Options,
    return_lse: bool,
    deterministic: bool,
    differentiable: bool,
) -> Any:
    """``flash_attn_func`` of tensors with modifications, its other options checked.

    What changes nothing, such as a window that hides no key, is left out: the call is then an ordinary one.

    Raises:
        UnsupportedProblemError: an argument is outside what the kernels support.
    """
    window = attention_checks.check_window(window_size)
    softcap = as_float("softcap", softcap)
    checks.check_places(q=q, k=k, v=v, **bounds, **tensors)
    refuse_tangents(q, k, v, *tensors.values(), op="attention")
    for name, x in (("q", q), ("k", k)):
        checks.check_layout(name, x)
        checks.check_dims(name, x)
    scale, causal, top_left, device_type = options
    values = dict(tensors)
    attention_checks.check_spans(values, (q.shape[2], k.shape[2]), window, causal)
    window, causal = attention_checks.canonical_window(
        window, causal, top_left, q.shape[2], k.shape[2]
    )
    if "attn_mask" in values:
        shape = (*q.shape[:3], k.shape[2])
        values["attn_mask"] = attention_checks.mask_of_pairs(values["attn_mask"], shape)
    first, last = (q, k, v, scale, causal, top_left, device_type), map(bounds.get, BOUNDS)
    if window == NO_WINDOW and not softcap and not values:
        o, lse = plain_op.FORWARD_OP(*first, return_lse or differentiable, deterministic, *last)
    else:
        *bent, table = map(values.get, _VALUES[1:])
        others = (*UNPACKED, table, *map(values.get, SPANNED))
        o, lse = FORWARD_OP(*first, deterministic, *window, softcap, *bent, *last, *others)
    return (o, lse) if return_lse else o
