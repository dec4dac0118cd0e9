"""Launch plans of retnet, forward and backward: decided once per kind of call, then only replayed."""

from __future__ import annotations

import math

import torch

from ... import settings
from ...serving import dispatch
from ..shared import checks, gammas, launch, planning
from ..shared.torch_library import REFERENCES
from . import checks as retnet_checks
from .checks import Factors, Rules

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]
_INPUTS = ("q", "k", "v", "mask", "log2_gamma")
_BACKWARD_INPUTS = (*_INPUTS, "dout", "o", "r")

FORWARD_PLANS = launch.table_of_plans("retnet", "forward")
BACKWARD_PLANS = launch.table_of_plans("retnet", "backward")


def retnet_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factors: Factors,
    rules: Rules,
    device_type: str,
    return_r: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retnet forward through a kernel.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]`` on a GPU.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        factors: of the scores.
        rules: how they become the factors of v.
        device_type: a policy's name for :func:`naming.policy_named`; empty is the GPU of q.
        return_r: whether r is wanted.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    mask, log2_gamma, gamma = factors
    key = (
        launch.signature_of_three(q, k, v),
        launch.signature(mask),
        launch.signature(log2_gamma),
        gamma,
        rules,
        device_type,
        return_r,
        dispatch.generation(),
        id(settings.current()),
    )
    plan = FORWARD_PLANS.get(key)
    if plan is None:
        retnet_checks.check_call(q, k, v, factors, rules)
        checks.notice_exchanged(q, k)
        outputs = [launch.output(q, v)]
        if return_r:
            outputs.append(launch.contiguous("r", q.shape[:3], torch.float32, 1.0))
        problem, keep = None, None
        if not checks.is_empty(q, k):
            problem = retnet_checks.make_problem(q, k, v, mask, rules)
            keep = _decays_to_keep(factors, q)
        plan = planning.plan_of(
            problem,
            device_type,
            rules.scale,
            inputs=dict(zip(_INPUTS, (q, k, v, mask, log2_gamma), strict=True)),
            outputs=outputs,
            reference=lambda q, k, v, mask, log2_gamma: REFERENCES["retnet_forward"](
                q, k, v, mask, log2_gamma, gamma, *rules, device_type, return_r, False
            ),
            keep=keep,
            normalize=int(rules.normalize),
            r_clamp_max=_largest_r(rules),
        )
        FORWARD_PLANS.remember(key, plan)
    o, *rest = plan.run(q, k, v, mask, log2_gamma)
    return o, rest[0] if return_r else None


def retnet_backward(
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factors: Factors,
    o: torch.Tensor | None,
    r: torch.Tensor | None,
    rules: Rules,
    device_type: str,
    need_dmask: bool,
    deterministic: bool,
) -> Gradients:
    """Gradients of q, k, v and perhaps the mask through a kernel.

    Args:
        grad_o: ``[batch, heads_q, seqlen_q, dim_v]`` in q's dtype, any strides.
        q: as the forward took it, as are k, v, the factors and the rules.
        k: see q.
        v: see q.
        factors: see q.
        o: what the forward returned, where gradients flow through r.
        r: what the forward returned, where rows were divided by it.
        rules: see q.
        device_type: a policy's name for :func:`naming.policy_named`; empty is the GPU of q.
        need_dmask: whether the gradient of the mask is wanted.
        deterministic: only kernels that give equal bits each time may serve.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
        torch.OutOfMemoryError: there is no room for the gradients or the workspace.
    """
    mask, log2_gamma, gamma = factors
    if mask is not None and need_dmask and mask.shape[0] > 1 and mask.stride(0) == 0:
        # Heads that share their memory would share the sum of their gradients.
        mask = mask.contiguous()
        factors = (mask, None, None)
    key = (
        launch.signature_of_three(q, k, v),
        launch.signature(mask),
        launch.signature(log2_gamma),
        launch.signature(grad_o),
        launch.signature(o),
        launch.signature(r),
        gamma,
        rules,
        device_type,
        need_dmask,
        deterministic,
        dispatch.generation(),
        id(settings.current()),
    )
    tensors = (q, k, v, mask, log2_gamma, grad_o, o, r)
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        retnet_checks.check_call(q, k, v, factors, rules)
        retnet_checks.check_gradients(grad_o, o, r, q, v, rules)
        outputs = launch.gradients(dq=q, dk=k, dv=v)
        if need_dmask and mask is not None:
            outputs.append(launch.contiguous("dmask", mask.shape, mask.dtype))
        problem, keep = None, None
        if not checks.is_empty(q, k):
            backward = {"direction": "backward", "deterministic": deterministic}
            problem = retnet_checks.make_problem(q, k, v, mask, rules, **backward)
            keep = _decays_to_keep(factors, q)
        plan = planning.plan_of(
            problem,
            device_type,
            rules.scale,
            inputs=dict(zip(_BACKWARD_INPUTS, tensors, strict=True)),
            outputs=outputs,
            reference=lambda q, k, v, mask, log2_gamma, grad_o, o, r: REFERENCES["retnet_backward"](
                *(grad_o, q, k, v, mask, log2_gamma, gamma, o, r),
                *(*rules, device_type, need_dmask, deterministic),
            ),
            copies=launch.unreadable(dout=grad_o, o=o, r=r),
            keep=keep,
            r_grad=int(rules.r_grad),
            r_clamp_max=_largest_r(rules),
        )
        BACKWARD_PLANS.remember(key, plan)
    dq, dk, dv, *rest = plan.run(*tensors)
    return dq, dk, dv, rest[0] if need_dmask and mask is not None else None


def _decays_to_keep(factors: Factors, q: torch.Tensor) -> torch.Tensor | None:
    """The logarithms of decays that are no tensor of the caller's."""
    mask, log2_gamma, gamma = factors
    if mask is not None or log2_gamma is not None:
        return None
    return gammas.on_device(gamma, q.shape[1], q.device)


def _largest_r(rules: Rules) -> float:
    return math.inf if rules.r_clamp_max is None else rules.r_clamp_max
