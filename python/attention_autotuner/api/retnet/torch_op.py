"""The ``torch.library`` ops of retnet; :mod:`.autograd` differentiates them.

A call has a mask, or logarithms of decays, or decays as numbers, or, with none of them, the usual decays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...operations.retention.reference import decay_mask
from ...operations.retnet.reference import retnet_attention, retnet_attention_backward
from ..shared import checks, gammas
from ..shared.torch_library import define, nothing
from . import checks as retnet_checks
from . import plan as retnet_plan
from .checks import Factors, Rules


class Forward(NamedTuple):
    """Arguments of the forward op; ``r_grad`` and ``deterministic`` are for its gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    log2_gamma: torch.Tensor | None
    gamma: tuple[float, ...] | None
    scale: float
    causal: bool
    normalize: bool
    r_clamp_max: float | None
    r_grad: bool
    device_type: str
    return_r: bool
    deterministic: bool


class Backward(NamedTuple):
    """Arguments of the backward op."""

    grad_o: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    log2_gamma: torch.Tensor | None
    gamma: tuple[float, ...] | None
    o: torch.Tensor | None
    r: torch.Tensor | None
    scale: float
    causal: bool
    normalize: bool
    r_clamp_max: float | None
    r_grad: bool
    device_type: str
    need_dmask: bool
    deterministic: bool


Call = Forward | Backward


def rules_of(call: Call) -> Rules:
    """The rules among a call's arguments."""
    return Rules(call.scale, call.causal, call.normalize, call.r_clamp_max, call.r_grad)


def _factors(call: Call) -> Factors:
    return call.mask, call.log2_gamma, None if call.gamma is None else tuple(call.gamma)


def _forward_cuda(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    o, r = retnet_plan.retnet_forward(
        *call[:3], _factors(call), rules_of(call), call.device_type, call.return_r
    )
    return o, nothing(call.q) if r is None else r


def _forward_cpu(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    o, r = _forward_fake(call)
    checks.notice_exchanged(call.q, call.k)
    if checks.is_empty(call.q, call.k):
        return o.zero_(), r.fill_(1.0)
    reference_o, reference_r = retnet_attention(
        *call[:3], _mask(call), **options_of(rules_of(call), call.mask)
    )
    o.copy_(reference_o)
    if call.return_r:
        r.copy_(reference_r)
    return o, r


def _forward_fake(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    q = call.q
    retnet_checks.check_call(*call[:3], _factors(call), rules_of(call))
    r = q.new_empty(q.shape[:3], dtype=torch.float32) if call.return_r else nothing(q)
    return checks.empty_output(q, call.v), r


def _backward_cuda(call: Backward) -> tuple[torch.Tensor, ...]:
    *gradients, dmask = retnet_plan.retnet_backward(
        *call[:4], _factors(call), call.o, call.r, rules_of(call), *call[-3:]
    )
    return (*gradients, nothing(call.q, call.q.dtype) if dmask is None else dmask)


def _backward_cpu(call: Backward) -> tuple[torch.Tensor, ...]:
    results = _backward_fake(call)
    if checks.is_empty(call.q, call.k):
        return tuple(x.zero_() for x in results)
    gradients = retnet_attention_backward(
        *call[:4],
        _mask(call),
        need_dmask=results[3].numel() > 0,
        **options_of(rules_of(call), call.mask),
    )
    for result, gradient in zip(results, gradients, strict=True):
        if gradient is not None:
            result.copy_(gradient)
    return results


def _backward_fake(call: Backward) -> tuple[torch.Tensor, ...]:
    q, k, v, mask, rules = call.q, call.k, call.v, call.mask, rules_of(call)
    retnet_checks.check_call(q, k, v, _factors(call), rules)
    retnet_checks.check_gradients(call.grad_o, call.o, call.r, q, v, rules)
    dmask = nothing(q, q.dtype)
    if call.need_dmask and mask is not None:
        dmask = mask.new_empty(mask.shape)
    return (*map(checks.empty_gradient, (q, k, v)), dmask)


def _mask(call: Call) -> torch.Tensor:
    return mask_of(call.q, call.k, _factors(call))


def mask_of(q: torch.Tensor, k: torch.Tensor, factors: Factors) -> torch.Tensor:
    """The mask, or the decay as one, for the reference."""
    mask, log2_gamma, gamma = factors
    if mask is not None:
        return mask
    decays = gammas.of_reference(log2_gamma, gamma)
    return decay_mask(decays, q.shape[1], q.shape[2], k.shape[2], q.device)


def options_of(rules: Rules, mask: torch.Tensor | None) -> dict[str, Any]:
    """The rules as the reference takes them."""
    return {**rules._asdict(), "causal": rules.causal or mask is None}


FORWARD_OP = define(
    "retnet_forward", Forward, _forward_cuda, _forward_cpu, _forward_fake, results=2
)
BACKWARD_OP = define(
    "retnet_backward", Backward, _backward_cuda, _backward_cpu, _backward_fake, results=4
)
