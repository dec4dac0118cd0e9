"""The ``torch.library`` ops of attention: schemas, kernels, fakes; :mod:`.autograd` differentiates them."""

from __future__ import annotations

import torch

from ...core.problem import CausalAlignment
from ...operations.attention.reference import attention, attention_backward
from ..shared import checks
from ..shared.plain import notice
from ..shared.torch_library import define
from . import checks as attention_checks
from . import plan as attention_plan
from .plan import Gradients

# `deterministic` is for the gradients that the forward may be asked for later: its own result always is.
FORWARD = (
    "attention_forward(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, bool top_left, "
    "str device_type, bool return_lse, bool deterministic) -> (Tensor, Tensor)"
)
BACKWARD = (
    "attention_backward(Tensor? grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "float? softmax_scale, bool causal, bool top_left, str device_type, bool deterministic) "
    "-> (Tensor, Tensor, Tensor)"
)


def alignment(top_left: bool) -> CausalAlignment:
    """The public name of where the diagonal begins."""
    return "top_left" if top_left else "bottom_right"


def forward_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE through a kernel; an empty tensor stands for an LSE that is not wanted."""
    o, lse = attention_plan.attention_forward(
        q, k, v, softmax_scale, causal, top_left, device_type, return_lse
    )
    return o, _no_lse(q) if lse is None else lse


def _forward_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _forward_fake(
        q, k, v, softmax_scale, causal, top_left, device_type, return_lse, deterministic
    )
    notice("tensors on the CPU: attention is computed by the PyTorch reference, not by a kernel")
    if o.numel() > 0:
        found_o, found_lse = attention(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            causal_alignment=alignment(top_left),
        )
        o.copy_(found_o)
        if return_lse:
            lse.copy_(found_lse)
    return o, lse


def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_tensors(q, k, v)
    if softmax_scale is not None:
        checks.check_scale(softmax_scale, attention_checks.SCALE)
    o = checks.empty_output(q, v)
    return o, q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else _no_lse(q)


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    """What stands in the schema's second place when no LSE is wanted."""
    return q.new_empty(0, dtype=torch.float32)


def _backward_cpu(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    deterministic: bool,
) -> Gradients:
    results = _backward_fake(
        grad_o,
        grad_lse,
        q,
        k,
        v,
        o,
        lse,
        softmax_scale,
        causal,
        top_left,
        device_type,
        deterministic,
    )
    if q.numel() == 0:
        return results[0], results[1].zero_(), results[2].zero_()
    found = attention_backward(
        grad_o,
        grad_lse,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        causal_alignment=alignment(top_left),
    )
    for result, gradient in zip(results, found, strict=True):
        result.copy_(gradient)
    return results


def _backward_fake(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    deterministic: bool,
) -> Gradients:
    checks.check_tensors(q, k, v)
    attention_checks.check_gradients(grad_o, grad_lse, q, v, o, lse)
    if softmax_scale is not None:
        checks.check_scale(softmax_scale, attention_checks.SCALE)
    dq, dk, dv = map(checks.empty_gradient, (q, k, v))
    return dq, dk, dv


FORWARD_OP = define(FORWARD, cuda=forward_cuda, cpu=_forward_cpu, fake=_forward_fake)
BACKWARD_OP = define(
    BACKWARD, cuda=attention_plan.attention_backward, cpu=_backward_cpu, fake=_backward_fake
)
