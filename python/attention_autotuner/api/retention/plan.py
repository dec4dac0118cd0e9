"""Launch plans of retention, forward and backward: decided once per kind of call, then only replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import settings
from ...core.problem import Form
from ...serving import dispatch
from ..shared import checks, gammas, launch, planning
from ..shared.torch_library import REFERENCES
from . import checks as retention_checks

Decays = tuple["torch.Tensor | None", "gammas.Floats | None"]
"""The logarithms, or numbers, or nothing for the usual decays."""

Gradients = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"
]

_FORWARD_INPUTS = ("q", "k", "v", "log2_gamma", "initial_state", "final_state")
_BACKWARD_INPUTS = (*_FORWARD_INPUTS[:-1], "dout", "dfinal_state")

FORWARD_PLANS = launch.table_of_plans("retention", "forward")
BACKWARD_PLANS = launch.table_of_plans("retention", "backward")


def retention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decays: Decays,
    initial_state: torch.Tensor | None,
    scale: float | None,
    form: Form,
    device_type: str,
    return_state: bool,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention forward through a kernel.

    Args:
        q: ``[batch, heads_q, seqlen, dim_qk]`` on a GPU.
        k: ``[batch, heads_kv, seqlen, dim_qk]``.
        v: ``[batch, heads_kv, seqlen, dim_v]``.
        decays: of every head.
        initial_state: ``[batch, heads_q, dim_qk, dim_v]`` in fp32; None for zeros.
        scale: None is ``1 / sqrt(dim_qk)``.
        form: the way to compute it.
        device_type: a policy's name for :func:`naming.policy_named`; empty is the GPU of q.
        return_state: whether the final state is wanted, in memory of its own.
        in_place: whether the final state overwrites the initial one instead.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel, or the decays, are not ready.
    """
    log2_gamma, gamma = decays
    key = (
        launch.signature_of_three(q, k, v),
        launch.signature(initial_state),
        launch.signature(log2_gamma),
        gamma,
        scale,
        form,
        device_type,
        return_state,
        in_place,
        dispatch.generation(),
        id(settings.current()),
    )
    tensors = (q, k, v, log2_gamma, initial_state, initial_state if in_place else None)
    plan = FORWARD_PLANS.get(key)
    if plan is None:
        retention_checks.check_call(q, k, v, log2_gamma, gamma, initial_state, scale, form)
        checks.notice_exchanged(q, k)
        if in_place:
            retention_checks.check_address(retention_checks.check_in_place(initial_state))
        outputs = [launch.output(q, v)]
        if return_state and not in_place:
            shape = retention_checks.state_shape(q, v)
            outputs.append(launch.contiguous("final_state", shape, torch.float32, "initial_state"))
        problem, keep = None, None
        if not checks.is_empty(q, k):
            problem = retention_checks.make_problem(q, k, v, form=form)
            keep = _decays_to_keep(decays, q)

        def by_reference(*read: torch.Tensor | None) -> Sequence[torch.Tensor]:
            call = (*read[:4], gamma, read[4], scale, form, device_type)
            if in_place:
                return [REFERENCES["retention_forward_"](*call)]
            results: Sequence[torch.Tensor] = REFERENCES["retention_forward"](*call, return_state)
            return results

        plan = planning.plan_of(
            problem,
            device_type,
            _scale(q, scale),
            inputs=dict(zip(_FORWARD_INPUTS, tensors, strict=True)),
            outputs=outputs,
            reference=by_reference,
            copies=[] if in_place else _states_to_copy(initial_state=initial_state),
            keep=keep,
        )
        FORWARD_PLANS.remember(key, plan)
    o, *rest = plan.run(*tensors)
    return o, rest[0] if return_state and not in_place else None


def retention_backward(
    grad_o: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decays: Decays,
    initial_state: torch.Tensor | None,
    scale: float | None,
    device_type: str,
    need_state: bool,
    need_gamma: bool,
) -> Gradients:
    """Gradients of q, k and v, and perhaps of the initial state and of the logarithms of decays, through a kernel.

    Args:
        grad_o: ``[batch, heads_q, seqlen, dim_v]`` in q's dtype, any strides; None for zero.
        grad_state: of the final state, ``[batch, heads_q, dim_qk, dim_v]`` in fp32, any strides; None for zero.
        q: as the forward took it, as are k, v, the decays, the initial state and the scale.
        k: see q.
        v: see q.
        decays: see q.
        initial_state: see q.
        scale: see q.
        device_type: a policy's name for :func:`naming.policy_named`; empty is the GPU of q.
        need_state: whether the gradient of the initial state is wanted.
        need_gamma: whether that of the logarithms is wanted, fp32 ``[heads_q]``.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
        torch.OutOfMemoryError: there is no room for the gradients or the workspace.
    """
    log2_gamma, gamma = decays
    if grad_o is None:
        checks.check_some_gradient("the final state", grad_state)
        grad_o = q.new_zeros(v.shape[-1:]).expand(*q.shape[:3], v.shape[-1])
    key = (
        launch.signature_of_three(q, k, v),
        launch.signature(initial_state),
        launch.signature(log2_gamma),
        launch.signature(grad_o),
        launch.signature(grad_state),
        gamma,
        scale,
        device_type,
        need_state,
        need_gamma,
        dispatch.generation(),
        id(settings.current()),
    )
    tensors = (q, k, v, log2_gamma, initial_state, grad_o, grad_state)
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        retention_checks.check_call(q, k, v, log2_gamma, gamma, initial_state, scale)
        retention_checks.check_gradients(grad_o, grad_state, q, v)
        states = _states_to_copy(initial_state=initial_state, dfinal_state=grad_state)
        outputs = launch.gradients(dq=q, dk=k, dv=v)
        if need_state:
            shape = retention_checks.state_shape(q, v)
            outputs.append(
                launch.contiguous("dinitial_state", shape, torch.float32, "dfinal_state")
            )
        if need_gamma:
            outputs.append(launch.contiguous("dlog2_gamma", q.shape[:2], torch.float32))
        problem, keep = None, None
        if not checks.is_empty(q, k):
            problem = retention_checks.make_problem(q, k, v, direction="backward")
            keep = _decays_to_keep(decays, q)

        def by_reference(*read: torch.Tensor | None) -> Sequence[torch.Tensor]:
            *qkv_log2, state, grad_o, grad_state = read
            *most, dstate, dlog2 = REFERENCES["retention_backward"](
                *(grad_o, grad_state, *qkv_log2, gamma, state),
                *(scale, device_type, need_state, need_gamma),
            )
            return [
                *most,
                *([dstate] if need_state else []),
                *([dlog2[None]] if need_gamma else []),
            ]

        plan = planning.plan_of(
            problem,
            device_type,
            _scale(q, scale),
            inputs=dict(zip(_BACKWARD_INPUTS, tensors, strict=True)),
            outputs=outputs,
            reference=by_reference,
            copies=[*states, *launch.unreadable(dout=grad_o)],
            keep=keep,
        )
        BACKWARD_PLANS.remember(key, plan)
    dq, dk, dv, *rest = plan.run(*tensors)
    # Every sequence's share comes alone, as that costs the kernel least.
    dlog2_gamma = rest[-1].sum(0) if need_gamma else None
    return dq, dk, dv, rest[0] if need_state else None, dlog2_gamma


def _states_to_copy(**states: torch.Tensor | None) -> list[str]:
    """The names of those that kernels cannot read where they lie."""
    return [
        name
        for name, x in states.items()
        if x is not None and not retention_checks.is_readable_state(x)
    ]


def _decays_to_keep(decays: Decays, q: torch.Tensor) -> torch.Tensor | None:
    """The logarithms of decays that are no tensor of the caller's."""
    log2_gamma, gamma = decays
    return None if log2_gamma is not None else gammas.on_device(gamma, q.shape[1], q.device)


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return float(q.shape[3] ** -0.5) if scale is None else scale
