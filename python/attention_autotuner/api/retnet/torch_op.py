"""The ``torch.library`` ops of retnet; :mod:`.autograd` differentiates them.

A call has a mask, or logarithms of decays, or decays as numbers, or, with none of them, the usual decays.
"""

from __future__ import annotations

from typing import Any

import torch

from ...operations.retention.reference import decay_mask
from ...operations.retnet.reference import retnet_attention, retnet_attention_backward
from ..shared import checks, gammas
from ..shared.plain import Gradient
from ..shared.torch_library import define, nothing
from . import checks as retnet_checks
from . import plan as retnet_plan
from .checks import Backward, Call, Forward, Rules, rules_of


def _forward_cuda(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    o, r = retnet_plan.retnet_forward(gammas.hashable(call))
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
    retnet_checks.check_call(call)
    r = q.new_empty(q.shape[:3], dtype=torch.float32) if call.return_r else nothing(q)
    return checks.empty_output(q, call.v), r


def _backward_cuda(call: Backward) -> tuple[torch.Tensor, ...]:
    *gradients, dmask = retnet_plan.retnet_backward(gammas.hashable(call))
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
    q, mask = call.q, call.mask
    retnet_checks.check_call(call)
    retnet_checks.check_gradients(call)
    dmask = nothing(q, q.dtype)
    if call.need_dmask and mask is not None:
        dmask = mask.new_empty(mask.shape)
    return (*map(checks.empty_gradient, (q, call.k, call.v)), dmask)


def _mask(call: Call) -> torch.Tensor:
    return mask_of(call.q, call.k, call.mask, call.log2_gamma, call.gamma)


def mask_of(
    q: torch.Tensor, k: torch.Tensor, mask: Gradient, log2_gamma: Gradient, gamma: Any
) -> torch.Tensor:
    """The mask, or the decay as one, for the reference."""
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
