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
from ..shared.plain import Gradient, are_plain, of_arguments, refuse_tangents, settings_of
from ..shared.second_order import differentiate_again, notice_reference, zeros_like
from ..shared.torch_library import differentiate_by
from . import plan as retnet_plan
from .checks import Rules
from .torch_op import BACKWARD_OP, FORWARD_OP, Backward, Forward, mask_of, options_of, rules_of

_MASK = Forward._fields.index("mask")
_ARGUMENTS = 10  # of RetNetFunction
_OTHERS = (None,) * (_ARGUMENTS - 4)  # those without a gradient


def _keep(
    ctx: Any,
    tensors: tuple[Gradient, ...],
    gamma: Any,
    rules: Rules,
    rest: tuple[str, bool],
    o: torch.Tensor,
    r: Gradient,
) -> None:
    ctx.save_for_backward(*tensors, o if rules.r_grad else None, r if rules.normalize else None)
    ctx.gamma, ctx.rules = gamma, rules
    ctx.device_type, ctx.deterministic = rest
    ctx.settings = settings.current()
    ctx.set_materialize_grads(False)


def save_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Keep what :func:`differentiate` needs of a call of the forward op."""
    call = Forward(*inputs)
    o, r = output
    ctx.mark_non_differentiable(r)
    rest = (call.device_type, call.deterministic)
    _keep(ctx, call[:5], call.gamma, rules_of(call), rest, o, r)
    ctx.return_r = call.return_r


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
        return _through_dispatcher(ctx, grad_o, tensors, o, r)


def _through_dispatcher(
    ctx: Any, grad_o: torch.Tensor, tensors: list[Any], o: Gradient, r: Gradient
) -> tuple[Gradient, ...]:
    checks.check_layout("the gradient of o", grad_o)
    refuse_tangents(grad_o, *tensors, op="retnet")
    *gradients, dmask = BACKWARD_OP(grad_o, *tensors, ctx.gamma, o, r, *ctx.rules, *_rest(ctx))
    return of_arguments(Forward, *gradients, dmask if ctx.needs_input_grad[_MASK] else None)


def _rest(ctx: Any) -> tuple[str, bool, bool]:
    """Arguments of the backward beside what the forward keeps: for which GPU, dmask, determinism."""
    return ctx.device_type, ctx.needs_input_grad[_MASK], ctx.deterministic


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
            factors = mask_of(q, k, (leaf, log2_gamma, ctx.gamma))
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
        q, k, v, *factors, rules, device_type, return_r, deterministic = arguments
        o, r = retnet_plan.retnet_forward(
            q, k, v, tuple(factors), rules, device_type, return_r or rules.normalize
        )
        _keep(ctx, arguments[:5], factors[2], rules, (device_type, deterministic), o, r)
        if not return_r:
            return o
        ctx.mark_non_differentiable(r)
        return o, r

    @staticmethod
    def backward(ctx: Any, grad_o: Gradient, _: Gradient = None) -> tuple[Gradient, ...]:
        """Gradients of q, k, v and the mask."""
        if grad_o is None:
            return (None,) * _ARGUMENTS
        *tensors, o, r = ctx.saved_tensors
        # Someone may differentiate the gradients, trace or batch them, or have saved the tensors in some other form.
        with settings_of(ctx):
            if torch.is_grad_enabled() or not are_plain(grad_o, *tensors, o, r):
                return _through_dispatcher(ctx, grad_o, tensors, o, r)[:_ARGUMENTS]
            q, k, v, mask, log2_gamma = tensors
            factors = (mask, log2_gamma, ctx.gamma)
            gradients = retnet_plan.retnet_backward(
                grad_o, q, k, v, factors, o, r, ctx.rules, *_rest(ctx)
            )
        return (*gradients, *_OTHERS)


differentiate_by(FORWARD_OP, differentiate, setup_context=save_for_backward)
differentiate_by(BACKWARD_OP, differentiate_twice, setup_context=save_for_double_backward)
