"""The ``torch.library`` ops of attention: arguments, kernels, fakes; :mod:`.autograd` differentiates them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...core.problem import CausalAlignment
from ...operations.attention.reference import attention_backward, attention_bounded
from ..shared import checks
from ..shared.torch_library import define, nothing
from . import checks as attention_checks
from . import plan as attention_plan
from .plan import Gradients


class Forward(NamedTuple):
    """Arguments of the forward op; ``deterministic`` is for its gradients, as its results always are."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float | None
    causal: bool
    top_left: bool
    device_type: str
    return_lse: bool
    deterministic: bool
    seqlens_k: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None


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


def options_of(call: Any) -> dict[str, Any]:
    """The options of a call of any of attention's ops, as the reference takes them."""
    alignment: CausalAlignment = "top_left" if call.top_left else "bottom_right"
    return {
        "softmax_scale": call.softmax_scale,
        "causal": call.causal,
        "causal_alignment": alignment,
    }


def _forward_cuda(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE through a kernel; an empty tensor stands for an LSE that is not wanted."""
    bounds = call[9:]
    o, lse = attention_plan.attention_forward(*call[:3], call[3:7], call.return_lse, *bounds)
    return o, nothing(call.q) if lse is None else lse


def _forward_replayed(*fields: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Results of the kernel, for plain tensors."""
    q, k, v, scale, causal, top_left, device_type, return_lse, _, seqlens_k, starts_k = fields
    if type(q) is not torch.Tensor or type(k) is not torch.Tensor:
        return None
    if seqlens_k is not None or starts_k is not None:
        return None
    options = (scale, causal, top_left, device_type)
    plan = attention_plan.replayed_plan("graph", q, k, v, options, return_lse)
    if plan is None:
        return None
    results = plan.run(q, k, v)
    return results[0], results[1] if return_lse else nothing(q)


def _forward_cpu(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _forward_fake(call)
    checks.notice_exchanged(call.q, call.k)
    if checks.is_empty(call.q, call.k):
        return o.zero_(), lse.fill_(-math.inf)
    reference_o, reference_lse = attention_bounded(
        *call[:3], seqlens_k=call.seqlens_k, starts_k=call.starts_k, **options_of(call)
    )
    o.copy_(reference_o)
    if call.return_lse:
        lse.copy_(reference_lse)
    return o, lse


def _forward_fake(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    q = call.q
    checks.check_tensors(q, call.k, call.v)
    attention_checks.check_bounds(q, seqlens_k=call.seqlens_k, starts_k=call.starts_k)
    checks.check_scale(call.softmax_scale, attention_checks.SCALE)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if call.return_lse else nothing(q)
    return checks.empty_output(q, call.v), lse


def _backward_cuda(call: Backward) -> Gradients:
    return attention_plan.attention_backward(*call[:7], call[7:11], call.deterministic)


def _backward_replayed(*fields: Any) -> Gradients | None:
    """Results of the kernel, for plain tensors."""
    grad_o, grad_lse, q, k = fields[:4]
    if type(q) is not torch.Tensor or type(k) is not torch.Tensor:
        return None
    if grad_o is None or grad_lse is not None:
        return None
    tensors = (grad_o, *fields[2:7])
    return attention_plan.replayed_backward("graph", tensors, fields[7:11], fields[11])


def _backward_cpu(call: Backward) -> Gradients:
    results = _backward_fake(call)
    if checks.is_empty(call.q, call.k):
        return tuple(x.zero_() for x in results)
    gradients = attention_backward(*call[:5], **options_of(call))
    for result, gradient in zip(results, gradients, strict=True):
        result.copy_(gradient)
    return results


def _backward_fake(call: Backward) -> Gradients:
    q, k, v = call.q, call.k, call.v
    checks.check_tensors(q, k, v)
    attention_checks.check_gradients(call.grad_o, call.grad_lse, q, v, call.o, call.lse)
    checks.check_scale(call.softmax_scale, attention_checks.SCALE)
    dq, dk, dv = map(checks.empty_gradient, (q, k, v))
    return dq, dk, dv


FORWARD_OP = define(
    "attention_forward",
    Forward,
    _forward_cuda,
    _forward_cpu,
    _forward_fake,
    results=2,
    replay=_forward_replayed,
)
BACKWARD_OP = define(
    "attention_backward",
    Backward,
    _backward_cuda,
    _backward_cpu,
    _backward_fake,
    results=3,
    replay=_backward_replayed,
)
