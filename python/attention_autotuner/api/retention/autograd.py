"""Derivatives of retention: of the ``torch.library`` ops, and beside the dispatcher for plain eager tensors.

The forward keeps its inputs and nothing else; the backward recomputes the states, by chunks whichever form the forward
took. Gradients can be differentiated again, by the reference and as often as is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import settings
from ...operations.retention.packed import retention_packed
from ..shared import checks, gammas
from ..shared.plain import Gradient, applier, are_plain, of_arguments, refuse_tangents, settings_of
from ..shared.second_order import differentiate_again, notice_reference, zeros_like
from ..shared.torch_library import differentiate_by
from . import plan as retention_plan
from .checks import Backward, Forward
from .torch_op import BACKWARD_OP, FORWARD_OP, REFERENCE

_LOG2_GAMMA, _STATE = Forward._fields.index("log2_gamma"), Forward._fields.index("initial_state")


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what :func:`differentiate` needs of a call of the forward op."""
    call = Forward(*inputs)
    ctx.save_for_backward(*call[:4], call.initial_state, call.cu_seqlens)
    ctx.gamma, ctx.scale, ctx.device_type = call.gamma, call.scale, call.device_type
    ctx.max_seqlen = call.max_seqlen
    ctx.return_state = call.return_state
    ctx.settings = settings.current()
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, grad_o: Gradient, grad_state: Gradient) -> tuple[Gradient, ...]:
    """Gradients of the forward op's arguments."""
    if not ctx.return_state:
        grad_state = None
    if grad_o is None and grad_state is None:
        return of_arguments(Forward)
    with settings_of(ctx):
        return _through_dispatcher(_backward_call(ctx, grad_o, grad_state, *ctx.saved_tensors))


def _backward_call(ctx: Any, *tensors: Gradient) -> Backward:
    *most, initial_state, cu_seqlens = tensors
    needs = ctx.needs_input_grad
    wanted = (needs[_STATE], needs[_LOG2_GAMMA])
    options = (ctx.scale, ctx.device_type, *wanted, cu_seqlens, ctx.max_seqlen)
    return Backward._make((*most, ctx.gamma, initial_state, *options))


def _through_dispatcher(call: Backward) -> tuple[Gradient, ...]:
    gradients = {
        "the gradient of o": call.grad_o,
        "the gradient of the final state": call.grad_state,
    }
    checks.check_layouts(gradients)
    refuse_tangents(*call[:6], call.initial_state, op="retention")
    return _of_arguments(call, *BACKWARD_OP(*call))


def _of_arguments(
    call: Backward, dq: Gradient, dk: Gradient, dv: Gradient, dstate: Gradient, dlog2: Gradient
) -> tuple[Gradient, ...]:
    decays, state = dlog2 if call.need_gamma else None, dstate if call.need_state else None
    return of_arguments(Forward, dq, dk, dv, decays, None, state)


def save_for_double_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what :func:`differentiate_twice` needs of a call of the backward op."""
    call = Backward(*inputs)
    ctx.save_for_backward(*call[:6], call.initial_state, call.cu_seqlens)
    ctx.gamma, ctx.scale = call.gamma, call.scale
    ctx.need_state, ctx.need_gamma = call.need_state, call.need_gamma


def differentiate_twice(ctx: Any, *directions: torch.Tensor) -> tuple[Gradient, ...]:
    """Gradients of the backward op's arguments."""
    grad_o, grad_state, q, k, v, log2_gamma, initial_state, cu_seqlens = ctx.saved_tensors
    notice_reference("retention", q)
    inputs, gradients = (q, k, v, log2_gamma, initial_state), (grad_o, grad_state)
    dq, dk, dv, dstate, dlog2 = directions
    by_inputs: Sequence[Gradient]
    by_gradients: Sequence[Gradient]
    if q.shape[1] == 0:
        by_inputs, by_gradients = zeros_like(inputs), zeros_like(gradients)
    else:

        def function(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log2: Gradient, state: Gradient
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """The operation in fp32."""
            decays = gammas.of_reference(log2, ctx.gamma)
            named = {"scale": ctx.scale, "initial_state": state, "cu_seqlens": cu_seqlens}
            return retention_packed(REFERENCE["chunkwise"], q, k, v, decays, **named)

        by_inputs, by_gradients = differentiate_again(
            function,
            inputs,
            gradients,
            (dq, dk, dv, dlog2 if ctx.need_gamma else None, dstate if ctx.need_state else None),
        )
    first = (*by_gradients, *by_inputs[:4], None, by_inputs[4])
    return (*first, *[None] * (len(Backward._fields) - len(first)))


class RetentionFunction(torch.autograd.Function):
    """The same derivative without the dispatcher, for plain eager tensors.

    Returns o alone when no state is wanted, else the pair.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Launch the kernel and keep what the gradient needs; arguments are those of :class:`Forward`."""
        o, state = retention_plan.retention_forward(Forward(*arguments))
        save_for_backward(ctx, arguments, o)
        return o if state is None else (o, state)

    @staticmethod
    def backward(ctx: Any, grad_o: Gradient, grad_state: Gradient = None) -> tuple[Gradient, ...]:
        """Gradients of q, k, v, the logarithms of decays and the initial state."""
        if grad_o is None and grad_state is None:
            return of_arguments(Forward)
        tensors = (grad_o, grad_state, *ctx.saved_tensors)
        call = _backward_call(ctx, *tensors)
        # Someone may differentiate the gradients, trace or batch them, or have saved the tensors in some other form.
        with settings_of(ctx):
            if torch.is_grad_enabled() or not are_plain(*tensors):
                return _through_dispatcher(call)
            return _of_arguments(call, *retention_plan.retention_backward(call))


apply_retention = applier(RetentionFunction)

differentiate_by(FORWARD_OP, differentiate, setup_context=save_for_backward)
differentiate_by(BACKWARD_OP, differentiate_twice, setup_context=save_for_double_backward)
