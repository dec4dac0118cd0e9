"""Launch plans of retention, forward and backward: decided once per kind of call, then only replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import settings
from ...serving import dispatch
from ..shared import checks, launch, planning
from ..shared.torch_library import REFERENCES
from . import checks as retention_checks
from .checks import Backward, Forward

Gradients = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"
]

# Packed sequences have the last; other params have no such field.
_FORWARD_INPUTS = ("q", "k", "v", "log2_gamma", "initial_state", "final_state", "cu_seqlens")
_BACKWARD_INPUTS = (*_FORWARD_INPUTS[:-2], "dout", "dfinal_state", "cu_seqlens")

FORWARD_PLANS = launch.table_of_plans("retention", "forward")
BACKWARD_PLANS = launch.table_of_plans("retention", "backward")


def retention_forward(
    call: Forward, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention forward through a kernel, of tensors on a GPU.

    Args:
        call: ``return_state`` says whether the final state is wanted, in memory of its own.
        in_place: whether the final state overwrites the initial one instead.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel, or the decays, are not ready.
    """
    q, k, v, log2_gamma, gamma, initial_state, *others, cu_seqlens, max_seqlen = call
    key = (
        launch.signature_of_three(q, k, v),
        launch.signature(initial_state),
        launch.signature(log2_gamma),
        gamma,
        *others,
        in_place,
        *_packing_key(call),
        dispatch.generation(),
        id(settings.current()),
    )
    packed = cu_seqlens is not None
    final_state = initial_state if in_place else None
    tensors = (q, k, v, log2_gamma, initial_state, final_state, *(cu_seqlens,) * packed)
    plan = FORWARD_PLANS.get(key)
    if plan is None:
        retention_checks.check_call(call)
        checks.notice_exchanged(q, k)
        if in_place:
            retention_checks.check_address(retention_checks.check_in_place(initial_state))
        outputs = [launch.output(q, v)]
        if call.return_state and not in_place:
            shape = retention_checks.state_shape(call)
            outputs.append(launch.contiguous("final_state", shape, torch.float32, "initial_state"))

        def by_reference(*read: torch.Tensor | None) -> Sequence[torch.Tensor]:
            arguments = (*read[:4], gamma, read[4], *others)
            packing = (read[6], max_seqlen) if packed else ()
            if in_place:
                return [REFERENCES["retention_forward_"](*arguments[:-1], *packing)]
            results: Sequence[torch.Tensor]
            results = REFERENCES["retention_forward"](*arguments, *packing)
            return results

        plan = planning.plan_of(
            retention_checks.make_problem(call, form=call.form),
            call.device_type,
            call.scale,
            inputs=dict(zip(_FORWARD_INPUTS, tensors, strict=False)),
            outputs=outputs,
            reference=by_reference,
            copies=[] if in_place else _states_to_copy(initial_state=initial_state),
            gamma=gamma,
        )
        FORWARD_PLANS.remember(key, plan)
    o, *rest = plan.run(*tensors)
    return o, rest[0] if call.return_state and not in_place else None


def retention_backward(call: Backward) -> Gradients:
    """Gradients of q, k and v, and perhaps of the initial state and of the logarithms of decays, through a kernel.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
        torch.OutOfMemoryError: there is no room for the gradients or the workspace.
    """
    if call.grad_o is None:
        checks.check_some_gradient("the final state", call.grad_state)
        shape = (*call.q.shape[:3], call.v.shape[-1])
        call = call._replace(grad_o=call.q.new_zeros(shape[-1:]).expand(shape))
    grad_o, grad_state, q, k, v, log2_gamma, gamma, initial_state, *others = call[:-2]
    key = (
        launch.signature_of_three(q, k, v),
        *map(launch.signature, (initial_state, log2_gamma, grad_o, grad_state)),
        gamma,
        *others,
        *_packing_key(call),
        dispatch.generation(),
        id(settings.current()),
    )
    # Plans outlive their call, whose tensors they are not to hold.
    packed, max_seqlen = call.cu_seqlens is not None, call.max_seqlen
    need_state, need_gamma = call.need_state, call.need_gamma
    ends = (call.cu_seqlens,) * packed
    tensors = (q, k, v, log2_gamma, initial_state, grad_o, grad_state, *ends)
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        retention_checks.check_call(call)
        retention_checks.check_gradients(call)
        states = _states_to_copy(initial_state=initial_state, dfinal_state=grad_state)
        outputs = launch.gradients(dq=q, dk=k, dv=v)
        if need_state:
            shape = retention_checks.state_shape(call)
            outputs.append(
                launch.contiguous("dinitial_state", shape, torch.float32, "dfinal_state")
            )
        if need_gamma:
            outputs.append(launch.contiguous("dlog2_gamma", q.shape[:2], torch.float32))

        def by_reference(*read: torch.Tensor | None) -> Sequence[torch.Tensor]:
            *qkv_log2, state, grad_o, grad_state = read[:7]
            packing = (read[7], max_seqlen) if packed else ()
            *most, dstate, dlog2 = REFERENCES["retention_backward"](
                grad_o, grad_state, *qkv_log2, gamma, state, *others, *packing
            )
            return [
                *most,
                *([dstate] if need_state else []),
                *([dlog2[None]] if need_gamma else []),
            ]

        plan = planning.plan_of(
            retention_checks.make_problem(call, direction="backward"),
            call.device_type,
            call.scale,
            inputs=dict(zip(_BACKWARD_INPUTS, tensors, strict=False)),
            outputs=outputs,
            reference=by_reference,
            copies=[*states, *launch.unreadable(dout=grad_o)],
            gamma=gamma,
        )
        BACKWARD_PLANS.remember(key, plan)
    dq, dk, dv, *rest = plan.run(*tensors)
    # Every sequence's share comes alone, as that costs the kernel least.
    dlog2_gamma = rest[-1].sum(0) if need_gamma else None
    return dq, dk, dv, rest[0] if need_state else None, dlog2_gamma


def _packing_key(call: Forward | Backward) -> tuple[Any, ...]:
    """All that a plan depends on of packed sequences."""
    if call.cu_seqlens is None and call.max_seqlen is None:
        return ()
    return (launch.signature(call.cu_seqlens), retention_checks.longest_of(call))


def _states_to_copy(**states: torch.Tensor | None) -> list[str]:
    """The names of those that kernels cannot read where they lie."""
    return [
        name
        for name, x in states.items()
        if x is not None and not retention_checks.is_readable_state(x)
    ]
