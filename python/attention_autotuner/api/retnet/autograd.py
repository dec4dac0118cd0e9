"""Derivatives of retnet: of the ``torch.library`` ops, and beside the dispatcher for plain eager tensors.

The forward keeps q, k, v and the mask or the decays, r where rows are divided by it, and o where gradients flow through
r; the backward recomputes the factors of v. Gradients can be differentiated again, by the reference and as often as is
wanted, with r a constant there too unless gradients flow through it.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import settings
from ...operations.retnet.reference import retnet_attention
from ..shared import checks
from ..shared.plain import Gradient, applier, are_plain, of_arguments, refuse_tangents, settings_of
from ..shared.second_order import differentiate_again, notice_reference, zeros_like
from ..shared.torch_library import differentiate_by
from . import plan as retnet_plan
from .checks import Backward, Forward, rules_of
from .torch_op import BACKWARD_OP, FORWARD_OP, mask_of, options_of

_MASK = Forward._fields.index("mask")


def _keep(ctx: Any, call: Forward, o: torch.Tensor, r: Gradient) -> None:
    kept = (o if call.r_grad else None, r if call.normalize else None)
    ctx.save_for_backward(*call[:5], *kept)
    ctx.gamma, ctx.rules, ctx.return_r = call.gamma, rules_of(call), call.return_r
    ctx.device_type, ctx.deterministic = call.device_type, call.deterministic
    ctx.settings = settings.current()
    ctx.set_materialize_grads(False)


def save_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Keep what :func:`differentiate` needs of a call of the forward op."""
    ctx.mark_non_differentiable(output[1])
    _keep(ctx, Forward(*inputs), *output)


def differentiate(ctx: Any, grad_o: Gradient, _: Gradient) -> tuple[Gradient, ...]:
    """Gradients of the forward op's arguments."""
    if grad_o is None:
        return of_arguments(Forward)
    *tensors, o, r = ctx.saved_tensors
    with settings_of(ctx):
        if ctx.rules.normalize and not ctx.return_r:
            # The op was called for o alone, as retnet_attn_func never does where a gradient may be asked for.
            _, r = FORWARD_OP(
                *tensors, ctx.gamma, *ctx.rules, ctx.device_type, True, ctx.deterministic
            )
        return _through_dispatcher(_backward_call(ctx, grad_o, *tensors, o, r))


def _backward_call(ctx: Any, grad_o: torch.Tensor, *kept: Any) -> Backward:
    *tensors, o, r = kept
    rest: tuple[Any, ...] = (ctx.device_type, ctx.needs_input_grad[_MASK], ctx.deterministic)
    arguments = (grad_o, *tensors, ctx.gamma, o, r, *ctx.rules, *rest)
    return Backward(*arguments)


def _through_dispatcher(call: Backward) -> tuple[Gradient, ...]:
    checks.check_layout("the gradient of o", call.grad_o)
    refuse_tangents(*call[:6], op="retnet")
    *gradients, dmask = BACKWARD_OP(*call)
    return of_arguments(Forward, *gradients, dmask if call.need_dmask else None)


def save_for_double_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what :func:`differentiate_twice` needs of a call of the backward op."""
    call = Backward(*inputs)
    ctx.save_for_backward(*call[:6])
    ctx.gamma, ctx.rules, ctx.need_dmask = call.gamma, rules_of(call), call.need_dmask


def differentiate_twice(ctx: Any, *directions: torch.Tensor) -> tuple[Gradient, ...]:
    """Gradients of the backward op's arguments.

    o and r are functions of q, k, v and the mask: what they contribute is counted there, and they get none.
    """
    grad_o, q, k, v, mask, log2_gamma = ctx.saved_tensors
    notice_reference("retnet", q)
    if checks.is_empty(q, k):
        results = zeros_like((grad_o, q, k, v, mask))
    else:

        def function(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, leaf: Gradient
        ) -> tuple[torch.Tensor]:
            """The operation in fp32."""
            factors = mask_of(q, k, leaf, log2_gamma, ctx.gamma)
            return (retnet_attention(q, k, v, factors, **options_of(ctx.rules, mask))[0],)

        dq, dk, dv, dmask = directions
        by_inputs, by_gradients = differentiate_again(
            function, (q, k, v, mask), (grad_o,), (dq, dk, dv, dmask if ctx.need_dmask else None)
        )
        results = (*by_gradients, *by_inputs)
    return of_arguments(Backward, *results)


class RetNetFunction(torch.autograd.Function):
    """The same derivative without the dispatcher, for plain eager tensors.

    Returns o alone when no r is wanted, else the pair.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Launch the kernel and keep what the gradient needs, r among it."""
        call = Forward(*arguments)
        o, r = retnet_plan.retnet_forward(call._replace(return_r=call.return_r or call.normalize))
        _keep(ctx, call, o, r)
        if not call.return_r:
            return o
        ctx.mark_non_differentiable(r)
        return o, r

    @staticmethod
    def backward(ctx: Any, grad_o: Gradient, _: Gradient = None) -> tuple[Gradient, ...]:
        """Gradients of q, k, v and the mask."""
        if grad_o is None:
            return of_arguments(Forward)
        # Someone may differentiate the gradients, trace or batch them, or have saved the tensors in some other form.
        kept = ctx.saved_tensors
        call = _backward_call(ctx, grad_o, *kept)
        with settings_of(ctx):
            if torch.is_grad_enabled() or not are_plain(grad_o, *kept):
                return _through_dispatcher(call)
            return of_arguments(Forward, *retnet_plan.retnet_backward(call))


apply_retnet = applier(RetNetFunction)

differentiate_by(FORWARD_OP, differentiate, setup_context=save_for_backward)
differentiate_by(BACKWARD_OP, differentiate_twice, setup_context=save_for_double_backward)
