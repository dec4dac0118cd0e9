"""The ``torch.library`` ops of retnet; :mod:`.autograd` differentiates them.

A call has a mask, or logarithms of decays, or decays as numbers, or, with none of them, the usual decays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...operations.retention.reference import decay_mask
from ...operations.retnet.reference import retnet_attention, retnet_attention_backward
from ..shared import checks, gammas
from ..shared.plain import notice
from ..shared.torch_library import define
from . import checks as retnet_checks
from . import plan as retnet_plan
from .checks import Rules

_WEIGHTS = "Tensor? mask, Tensor? log2_gamma, float[]? gamma"
_RULES = "float scale, bool causal, bool normalize, float? r_clamp_max, bool r_grad"
# `r_grad` and `deterministic` are for the gradients that the forward may be asked for later.
FORWARD = (
    f"retnet_forward(Tensor q, Tensor k, Tensor v, {_WEIGHTS}, {_RULES}, str device_type, bool return_r, "
    "bool deterministic) -> (Tensor, Tensor)"
)
BACKWARD = (
    f"retnet_backward(Tensor grad_o, Tensor q, Tensor k, Tensor v, {_WEIGHTS}, Tensor? o, Tensor? r, {_RULES}, "
    "str device_type, bool need_dmask, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor)"
)

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _weights(
    mask: torch.Tensor | None, log2_gamma: torch.Tensor | None, gamma: Sequence[float] | None
) -> retnet_plan.Weights:
    return mask, log2_gamma, None if gamma is None else tuple(gamma)


def _nothing(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What stands in a schema's place for what is not wanted."""
    return like.new_empty(0, dtype=dtype)


def _forward_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    scale: float,
    causal: bool,
    normalize: bool,
    r_clamp_max: float | None,
    r_grad: bool,
    device_type: str,
    return_r: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rules = Rules(scale, causal, normalize, r_clamp_max, r_grad)
    weights = _weights(mask, log2_gamma, gamma)
    o, r = retnet_plan.retnet_forward(q, k, v, weights, rules, device_type, return_r)
    return o, _nothing(q, torch.float32) if r is None else r


def _forward_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    scale: float,
    causal: bool,
    normalize: bool,
    r_clamp_max: float | None,
    r_grad: bool,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    rules = Rules(scale, causal, normalize, r_clamp_max, r_grad)
    o, r = _forward_fake(q, k, v, mask, log2_gamma, gamma, *rules, *rest)
    notice("tensors on the CPU: retnet is computed by the PyTorch reference, not by a kernel")
    if o.numel() > 0:
        found_o, found_r = retnet_attention(
            q, k, v, mask_of(q, k, mask, log2_gamma, gamma), **options_of(rules, mask)
        )
        o.copy_(found_o)
        if r.numel() > 0:
            r.copy_(found_r)
    return o, r


def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    scale: float,
    causal: bool,
    normalize: bool,
    r_clamp_max: float | None,
    r_grad: bool,
    device_type: str,
    return_r: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rules = Rules(scale, causal, normalize, r_clamp_max, r_grad)
    retnet_checks.check_call(q, k, v, mask, log2_gamma, gamma, rules)
    o = checks.empty_output(q, v)
    r = q.new_empty(q.shape[:3], dtype=torch.float32) if return_r else _nothing(q, torch.float32)
    return o, r


def _backward_cuda(
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    o: torch.Tensor | None,
    r: torch.Tensor | None,
    scale: float,
    causal: bool,
    normalize: bool,
    r_clamp_max: float | None,
    r_grad: bool,
    device_type: str,
    need_dmask: bool,
    deterministic: bool,
) -> Gradients:
    rules = Rules(scale, causal, normalize, r_clamp_max, r_grad)
    weights = _weights(mask, log2_gamma, gamma)
    dq, dk, dv, dmask = retnet_plan.retnet_backward(
        grad_o, q, k, v, weights, o, r, rules, device_type, need_dmask, deterministic
    )
    return dq, dk, dv, _nothing(q, q.dtype) if dmask is None else dmask


def _backward_cpu(
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    o: torch.Tensor | None,
    r: torch.Tensor | None,
    scale: float,
    causal: bool,
    normalize: bool,
    r_clamp_max: float | None,
    r_grad: bool,
    *rest: Any,
) -> Gradients:
    rules = Rules(scale, causal, normalize, r_clamp_max, r_grad)
    results = _backward_fake(grad_o, q, k, v, mask, log2_gamma, gamma, o, r, *rules, *rest)
    if q.numel() == 0:
        dq, dk, dv, dmask = results
        return dq, dk.zero_(), dv.zero_(), dmask.zero_()
    found = retnet_attention_backward(
        grad_o,
        q,
        k,
        v,
        mask_of(q, k, mask, log2_gamma, gamma),
        need_dmask=results[3].numel() > 0,
        **options_of(rules, mask),
    )
    for result, gradient in zip(results, found, strict=True):
        if gradient is not None:
            result.copy_(gradient)
    return results


def _backward_fake(
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    o: torch.Tensor | None,
    r: torch.Tensor | None,
    scale: float,
    causal: bool,
    normalize: bool,
    r_clamp_max: float | None,
    r_grad: bool,
    device_type: str,
    need_dmask: bool,
    deterministic: bool,
) -> Gradients:
    rules = Rules(scale, causal, normalize, r_clamp_max, r_grad)
    retnet_checks.check_call(q, k, v, mask, log2_gamma, gamma, rules)
    retnet_checks.check_gradients(grad_o, o, r, q, v, rules)
    dq, dk, dv = map(checks.empty_gradient, (q, k, v))
    if need_dmask and mask is not None:
        return dq, dk, dv, mask.new_empty(mask.shape)
    return dq, dk, dv, _nothing(q, q.dtype)


def mask_of(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
) -> torch.Tensor:
    """The mask, or what the decay would be as one, for the reference."""
    if mask is not None:
        return mask
    decays = gammas.of_reference(log2_gamma, gamma)
    return decay_mask(decays, q.shape[1], q.shape[2], k.shape[2], q.device)


def options_of(rules: Rules, mask: torch.Tensor | None) -> dict[str, Any]:
    """The rules as the reference takes them."""
    return {**rules._asdict(), "causal": rules.causal or mask is None}


FORWARD_OP = define(FORWARD, cuda=_forward_cuda, cpu=_forward_cpu, fake=_forward_fake)
BACKWARD_OP = define(BACKWARD, cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
