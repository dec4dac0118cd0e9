"""The ``torch.library`` ops of retention; :mod:`.autograd` differentiates them.

A call has logarithms of decays, or decays as numbers, or, with neither, the usual decays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.problem import Form
from ...operations.retention.reference import (
    default_log2_gamma,
    retention_chunkwise,
    retention_parallel,
    retention_recurrent,
)
from ...operations.retention.reference_backward import retention_backward
from ..shared import checks, gammas
from ..shared.plain import notice
from ..shared.torch_library import LIBRARY, define
from . import checks as retention_checks
from . import plan as retention_plan

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? log2_gamma, float[]? gamma"
FORWARD = (
    f"retention_forward({_INPUTS}, Tensor? initial_state, str form, str device_type, bool return_state) "
    "-> (Tensor, Tensor)"
)
FORWARD_IN_PLACE = (
    f"retention_forward_({_INPUTS}, Tensor(a!) state, str form, str device_type) -> Tensor"
)
BACKWARD = (
    f"retention_backward(Tensor? grad_o, Tensor? grad_state, {_INPUTS}, Tensor? initial_state, str device_type, "
    "bool need_state, bool need_gamma) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
REFERENCE: dict[Form, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "auto": retention_chunkwise,
    "parallel": retention_parallel,
    "chunkwise": retention_chunkwise,
    "recurrent": retention_recurrent,
}
"""What stands for each form on the CPU."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _decays(
    log2_gamma: torch.Tensor | None, gamma: Sequence[float] | None
) -> retention_plan.Decays:
    return log2_gamma, None if gamma is None else tuple(gamma)


def _nothing(q: torch.Tensor) -> torch.Tensor:
    """What stands in a schema's place for what is not wanted."""
    return q.new_empty(0, dtype=torch.float32)


def _forward_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    initial_state: torch.Tensor | None,
    form: Form,
    device_type: str,
    return_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, state = retention_plan.retention_forward(
        q, k, v, _decays(log2_gamma, gamma), initial_state, form, device_type, return_state
    )
    return o, _nothing(q) if state is None else state


def _forward_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    initial_state: torch.Tensor | None,
    form: Form,
    device_type: str,
    return_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, state = _forward_fake(
        q, k, v, log2_gamma, gamma, initial_state, form, device_type, return_state
    )
    notice("tensors on the CPU: retention is computed by the PyTorch reference, not by a kernel")
    if o.numel() > 0:
        decays = gammas.of_reference(log2_gamma, gamma)
        found_o, found_state = REFERENCE[form](q, k, v, decays, initial_state=initial_state)
        o.copy_(found_o)
        if return_state:
            state.copy_(found_state)
    return o, state


def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    initial_state: torch.Tensor | None,
    form: Form,
    device_type: str,
    return_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    retention_checks.check_call(q, k, v, log2_gamma, gamma, initial_state, form)
    o = checks.empty_output(q, v)
    if not return_state:
        return o, _nothing(q)
    return o, q.new_empty(retention_checks.state_shape(q, v), dtype=torch.float32)


def _in_place_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    state: torch.Tensor,
    form: Form,
    device_type: str,
) -> torch.Tensor:
    decays = _decays(log2_gamma, gamma)
    o, _ = retention_plan.retention_forward(
        q, k, v, decays, state, form, device_type, False, in_place=True
    )
    return o


def _in_place_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    state: torch.Tensor,
    form: Form,
    device_type: str,
) -> torch.Tensor:
    retention_checks.check_in_place(state)
    o, final = _forward_cpu(q, k, v, log2_gamma, gamma, state, form, device_type, True)
    state.copy_(final)
    return o


def _in_place_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    state: torch.Tensor,
    form: Form,
    device_type: str,
) -> torch.Tensor:
    retention_checks.check_in_place(state)
    return _forward_fake(q, k, v, log2_gamma, gamma, state, form, device_type, False)[0]


def _in_place_counted(keyset: Any, *arguments: Any) -> Any:
    """The op, after which autograd knows that the state has changed."""
    torch.autograd.graph.increment_version(arguments[5])
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return IN_PLACE_OP.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)


def _backward_cuda(
    grad_o: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    initial_state: torch.Tensor | None,
    device_type: str,
    need_state: bool,
    need_gamma: bool,
) -> Gradients:
    dq, dk, dv, dstate, dgamma = retention_plan.retention_backward(
        grad_o,
        grad_state,
        q,
        k,
        v,
        _decays(log2_gamma, gamma),
        initial_state,
        device_type,
        need_state,
        need_gamma,
    )
    return (
        dq,
        dk,
        dv,
        _nothing(q) if dstate is None else dstate,
        _nothing(q) if dgamma is None else dgamma,
    )


def _backward_cpu(
    grad_o: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    initial_state: torch.Tensor | None,
    device_type: str,
    need_state: bool,
    need_gamma: bool,
) -> Gradients:
    results = _backward_fake(
        grad_o,
        grad_state,
        q,
        k,
        v,
        log2_gamma,
        gamma,
        initial_state,
        device_type,
        need_state,
        need_gamma,
    )
    dq, dk, dv, dstate, dlog2 = results
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dstate.zero_(), dlog2.zero_()
    decays = gammas.of_reference(log2_gamma, gamma)
    if decays is None:
        decays = default_log2_gamma(q.shape[1]).exp2()
    *found, dinitial, dgamma = retention_backward(
        grad_o,
        grad_state,
        q,
        k,
        v,
        decays,
        initial_state=initial_state,
        need_dgamma=need_gamma,
    )
    for result, gradient in zip((dq, dk, dv), found, strict=True):
        result.copy_(gradient)
    if need_state:
        dstate.copy_(dinitial)
    if dgamma is not None:
        dlog2.copy_(dgamma * decays * math.log(2))
    return results


def _backward_fake(
    grad_o: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    initial_state: torch.Tensor | None,
    device_type: str,
    need_state: bool,
    need_gamma: bool,
) -> Gradients:
    retention_checks.check_call(q, k, v, log2_gamma, gamma, initial_state)
    retention_checks.check_gradients(grad_o, grad_state, q, v)
    dq, dk, dv = map(checks.empty_gradient, (q, k, v))
    shape = retention_checks.state_shape(q, v)
    dstate = q.new_empty(shape, dtype=torch.float32) if need_state else _nothing(q)
    dlog2 = q.new_empty(q.shape[1], dtype=torch.float32) if need_gamma else _nothing(q)
    return dq, dk, dv, dstate, dlog2


FORWARD_OP = define(FORWARD, cuda=_forward_cuda, cpu=_forward_cpu, fake=_forward_fake)
IN_PLACE_OP = define(FORWARD_IN_PLACE, cuda=_in_place_cuda, cpu=_in_place_cpu, fake=_in_place_fake)
LIBRARY.impl(IN_PLACE_OP._opname, _in_place_counted, "ADInplaceOrView", with_keyset=True)
BACKWARD_OP = define(BACKWARD, cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
