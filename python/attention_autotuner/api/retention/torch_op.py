"""The ``torch.library`` ops of retention; :mod:`.autograd` differentiates them.

A call has logarithms of decays, or decays as numbers, or, with neither, the usual decays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...core.problem import Form
from ...operations.retention import reference
from ...operations.retention.packed import retention_packed, retention_packed_backward
from ..shared import checks, gammas
from ..shared.torch_library import LIBRARY, define, nothing
from . import checks as retention_checks
from . import plan as retention_plan
from .checks import Backward, Forward, InPlace

REFERENCE: dict[Form, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "auto": reference.retention_chunkwise,
    "parallel": reference.retention_parallel,
    "chunkwise": reference.retention_chunkwise,
    "recurrent": reference.retention_recurrent,
}
"""Form -> the reference that serves it on the CPU."""


def _forward_cuda(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    o, state = retention_plan.retention_forward(gammas.hashable(call))
    return o, nothing(call.q) if state is None else state


def _forward_cpu(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    o, state = _forward_fake(call)
    if call.cu_seqlens is not None:
        checks.check_ends("cu_seqlens", call.cu_seqlens, call.q.shape[2])
    checks.notice_exchanged(call.q, call.k)
    if call.q.shape[1] > 0:
        reference_o, final = retention_packed(
            REFERENCE[call.form],
            *call[:3],
            gammas.of_reference(call.log2_gamma, call.gamma),
            scale=call.scale,
            initial_state=call.initial_state,
            cu_seqlens=call.cu_seqlens,
        )
        o.copy_(reference_o)
        if call.return_state:
            state.copy_(final)
    return o, state


def _forward_fake(call: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    q = call.q
    retention_checks.check_call(call)
    o = checks.empty_output(q, call.v)
    if not call.return_state:
        return o, nothing(q)
    return o, q.new_empty(retention_checks.state_shape(call), dtype=torch.float32)


def _in_place_cuda(call: InPlace) -> torch.Tensor:
    forward = gammas.hashable(call.forward)
    return retention_plan.retention_forward(forward, in_place=True)[0]


def _in_place_cpu(call: InPlace) -> torch.Tensor:
    retention_checks.check_in_place(call.state)
    o, final = _forward_cpu(call.forward._replace(return_state=True))
    call.state.copy_(final)
    return o


def _in_place_fake(call: InPlace) -> torch.Tensor:
    retention_checks.check_in_place(call.state)
    return _forward_fake(call.forward)[0]


def _in_place_counted(keyset: Any, *arguments: Any) -> Any:
    """The op, after which autograd knows that the state has changed."""
    torch.autograd.graph.increment_version(InPlace(*arguments).state)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return IN_PLACE_OP.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)


def _backward_cuda(call: Backward) -> tuple[torch.Tensor, ...]:
    gradients = retention_plan.retention_backward(gammas.hashable(call))
    return tuple(nothing(call.q) if x is None else x for x in gradients)


def _backward_cpu(call: Backward) -> tuple[torch.Tensor, ...]:
    results = _backward_fake(call)
    dq, dk, dv, dstate, dlog2 = results
    heads = call.q.shape[1]
    if heads == 0:
        return dq, dk.zero_(), dv.zero_(), dstate, dlog2
    decays = gammas.of_reference(call.log2_gamma, call.gamma)
    if decays is None:
        decays = reference.default_log2_gamma(heads).exp2()
    *gradients, dinitial, dgamma = retention_packed_backward(
        *call[:5],
        decays,
        scale=call.scale,
        initial_state=call.initial_state,
        need_dgamma=call.need_gamma,
        cu_seqlens=call.cu_seqlens,
    )
    for result, gradient in zip((dq, dk, dv), gradients, strict=True):
        result.copy_(gradient)
    if call.need_state:
        dstate.copy_(dinitial)
    if dgamma is not None:
        dlog2.copy_(dgamma * decays * math.log(2))
    return results


def _backward_fake(call: Backward) -> tuple[torch.Tensor, ...]:
    q, v = call.q, call.v
    retention_checks.check_call(call)
    retention_checks.check_gradients(call)
    shape = retention_checks.state_shape(call)
    return (
        *map(checks.empty_gradient, (q, call.k, v)),
        q.new_empty(shape, dtype=torch.float32) if call.need_state else nothing(q),
        q.new_empty(q.shape[1], dtype=torch.float32) if call.need_gamma else nothing(q),
    )


FORWARD_OP = define(
    "retention_forward", Forward, _forward_cuda, _forward_cpu, _forward_fake, results=2
)
IN_PLACE_OP = define(
    "retention_forward_",
    InPlace,
    _in_place_cuda,
    _in_place_cpu,
    _in_place_fake,
    results=1,
    mutates="state",
)
LIBRARY.impl(IN_PLACE_OP._opname, _in_place_counted, "ADInplaceOrView", with_keyset=True)
BACKWARD_OP = define(
    "retention_backward", Backward, _backward_cuda, _backward_cpu, _backward_fake, results=5
)
