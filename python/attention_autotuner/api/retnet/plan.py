"""Launch plans of retnet, forward and backward: decided once per kind of call, then only replayed."""

from __future__ import annotations

import math

import torch

from ... import settings
from ...serving import dispatch
from ..shared import checks, launch, planning
from ..shared.torch_library import REFERENCES
from . import checks as retnet_checks
from .checks import Backward, Call, Forward

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]
_INPUTS = ("q", "k", "v", "mask", "log2_gamma")
_BACKWARD_INPUTS = (*_INPUTS, "dout", "o", "r")

FORWARD_PLANS = launch.table_of_plans("retnet", "forward")
BACKWARD_PLANS = launch.table_of_plans("retnet", "backward")


def retnet_forward(call: Forward) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retnet forward through a kernel, of tensors on a GPU; r where it is wanted.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    q, k, v, mask, log2_gamma = tensors = call[:5]
    numbers = call[5:-1]
    key = (
        launch.signature_of_three(q, k, v),
        launch.signature(mask),
        launch.signature(log2_gamma),
        *numbers,
        dispatch.generation(),
        id(settings.current()),
    )
    plan = FORWARD_PLANS.get(key)
    if plan is None:
        retnet_checks.check_call(call)
        checks.notice_exchanged(q, k)
        outputs = [launch.output(q, v)]
        if call.return_r:
            outputs.append(launch.contiguous("r", q.shape[:3], torch.float32, 1.0))
        plan = planning.plan_of(
            retnet_checks.make_problem(call),
            call.device_type,
            call.scale,
            inputs=dict(zip(_INPUTS, tensors, strict=True)),
            outputs=outputs,
            reference=lambda *tensors: REFERENCES["retnet_forward"](*tensors, *numbers, False),
            gamma=call.gamma,
            normalize=int(call.normalize),
            r_clamp_max=_largest_r(call),
        )
        FORWARD_PLANS.remember(key, plan)
    o, *rest = plan.run(*tensors)
    return o, rest[0] if call.return_r else None


def retnet_backward(call: Backward) -> Gradients:
    """Gradients of q, k, v and perhaps the mask through a kernel, of tensors on a GPU.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
        torch.OutOfMemoryError: there is no room for the gradients or the workspace.
    """
    mask = call.mask
    if mask is not None and call.need_dmask and mask.shape[0] > 1 and mask.stride(0) == 0:
        # Heads that share their memory would share the sum of their gradients.
        call = call._replace(mask=mask.contiguous())
    grad_o, q, k, v, mask, log2_gamma, gamma, o, r, *others = call
    key = (
        launch.signature_of_three(q, k, v),
        *map(launch.signature, (mask, log2_gamma, grad_o, o, r)),
        gamma,
        *others,
        dispatch.generation(),
        id(settings.current()),
    )
    tensors = (q, k, v, mask, log2_gamma, grad_o, o, r)
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        retnet_checks.check_call(call)
        retnet_checks.check_gradients(call)
        outputs = launch.gradients(dq=q, dk=k, dv=v)
        if call.need_dmask and mask is not None:
            outputs.append(launch.contiguous("dmask", mask.shape, mask.dtype))
        backward = {"direction": "backward", "deterministic": call.deterministic}
        plan = planning.plan_of(
            retnet_checks.make_problem(call, **backward),
            call.device_type,
            call.scale,
            inputs=dict(zip(_BACKWARD_INPUTS, tensors, strict=True)),
            outputs=outputs,
            reference=lambda q, k, v, mask, log2_gamma, grad_o, o, r: REFERENCES["retnet_backward"](
                grad_o, q, k, v, mask, log2_gamma, gamma, o, r, *others
            ),
            copies=launch.unreadable(dout=grad_o, o=o, r=r),
            gamma=call.gamma,
            r_grad=int(call.r_grad),
            r_clamp_max=_largest_r(call),
        )
        BACKWARD_PLANS.remember(key, plan)
    dq, dk, dv, *rest = plan.run(*tensors)
    return dq, dk, dv, rest[0] if call.need_dmask and mask is not None else None


def _largest_r(call: Call) -> float:
    return math.inf if call.r_clamp_max is None else call.r_clamp_max
