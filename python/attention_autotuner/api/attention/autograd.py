"""Derivatives of attention: of the ``torch.library`` ops, and beside the dispatcher for plain eager tensors.

The forward keeps q, k, v, O and LSE, and the backward recomputes the probabilities from them: memory is linear in the
sequence lengths. The gradients can be differentiated again, by the reference formula and as often as is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import settings
from ...operations.attention.second_order import attention_double_backward
from ..shared import checks
from ..shared.plain import Gradient, applier, are_plain, of_arguments, refuse_tangents, settings_of
from ..shared.second_order import notice_reference, zeros_like
from ..shared.torch_library import differentiate_by
from . import plan as attention_plan
from .checks import Options, refuse_bounded
from .plan import AnyPlan, Gradients
from .torch_op import BACKWARD_OP, FORWARD_OP, Backward, Forward, options_of
from .views import View, as_kernels_take


def save_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Keep what :func:`differentiate` needs of a call of the forward op."""
    call = Forward(*inputs)
    ctx.save_for_backward(*call[:3], *output)
    ctx.options, ctx.deterministic = call[3:7], call.deterministic
    ctx.settings = settings.current()
    ctx.set_materialize_grads(False)
    ctx.return_lse = call.return_lse
    ctx.bounded = call.seqlens_k is not None or call.starts_k is not None


def differentiate(ctx: Any, grad_o: Gradient, grad_lse: Gradient) -> tuple[Gradient, ...]:
    """Gradients of the forward op's arguments."""
    refuse_bounded(ctx.bounded)
    q, k, v, o, lse = ctx.saved_tensors
    if not ctx.return_lse:
        grad_lse = None
    if grad_o is None and grad_lse is None:
        return of_arguments(Forward)
    with settings_of(ctx):
        if not ctx.return_lse:
            # The op was called for O alone, as flash_attn_func never does where a gradient may be asked for. The
            # kernel is the same with LSE and without, so running it again gives the LSE that belongs to this O.
            _, lse = FORWARD_OP(q, k, v, *ctx.options, True, ctx.deterministic)
        saved = (q, k, v, o, lse)
        gradients = _through_dispatcher(grad_o, grad_lse, saved, ctx.options, ctx.deterministic)
        return of_arguments(Forward, *gradients)


def _through_dispatcher(
    grad_o: Gradient,
    grad_lse: Gradient,
    saved: Sequence[torch.Tensor],
    options: Options,
    deterministic: bool,
) -> Gradients:
    checks.check_layouts({"the gradient of o": grad_o, "the gradient of lse": grad_lse})
    refuse_tangents(grad_o, grad_lse, *saved, op="attention")
    gradients: Gradients = BACKWARD_OP(grad_o, grad_lse, *saved, *options, deterministic)
    return gradients


def save_for_double_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what :func:`differentiate_twice` needs of a call of the backward op."""
    call = Backward(*inputs)
    ctx.save_for_backward(*call[:5])
    ctx.options = options_of(call)


def differentiate_twice(ctx: Any, *gradients: torch.Tensor) -> tuple[Gradient, ...]:
    """Gradients of the backward op's arguments.

    O and LSE are functions of q, k and v: what they contribute is counted there, and they get none.
    """
    kept = ctx.saved_tensors
    grad_o, grad_lse, q, k, v = kept
    notice_reference("attention", q)
    if checks.is_empty(q, k):
        results: tuple[Gradient, ...] = zeros_like(kept)
    else:
        dq, dk, dv = gradients
        results = attention_double_backward((dq, dk, dv), grad_o, grad_lse, q, k, v, **ctx.options)
    return of_arguments(Backward, *results)


class AttentionFunction(torch.autograd.Function):
    """The same derivative without the dispatcher, for plain eager tensors: a quarter of the host time.

    Returns O alone when no LSE is wanted, else the pair.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: tuple[AnyPlan, Options, bool, bool, View | None],
    ) -> Any:
        """Launch the kernel and keep what the gradient needs, LSE among it.

        Args:
            ctx: torch's.
            q: as :func:`flash_attn_func` takes it, as are k and v.
            k: see q.
            v: see q.
            call: the plan, which gives LSE, the options, whether the caller wants LSE, whether the gradients must be
                deterministic, and how q, k, v and O stand, None as kernels take them.
        """
        o, lse = call[0].run(q, k, v)
        if call[4] is not None:
            o = call[4].back_in_place(o)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return (o, lse) if call[2] else o

    @staticmethod
    def backward(ctx: Any, grad_o: Gradient, grad_lse: Gradient = None) -> tuple[Gradient, ...]:
        """Gradients of q, k and v."""
        if grad_o is None and grad_lse is None:
            return (None, None, None, None)
        saved = ctx.saved_tensors
        plan, options, _, deterministic, view = ctx.call
        back = None if view is None else view.back_in_place
        # Someone may differentiate the gradients, trace or batch them, or have saved the tensors in some other form.
        with settings_of(plan):
            recorded = torch.is_grad_enabled() or not are_plain(grad_o, grad_lse, *saved)
            if not recorded and grad_o is not None and grad_lse is None:
                tensors = (grad_o, *saved)
                gradients = attention_plan.plain_backward(tensors, options, deterministic, view)
            else:
                of_o, *four = as_kernels_take(view, grad_o, *saved[:4])
                five = (*four, saved[4])
                if recorded:
                    gradients = _through_dispatcher(of_o, grad_lse, five, options, deterministic)
                    back = None if view is None else view.back  # with a derivative
                else:
                    arguments: Any = (of_o, grad_lse, *five, options, deterministic)
                    gradients = attention_plan.attention_backward(*arguments)
        if back is not None:
            gradients = tuple(map(back, gradients))
        return (*gradients, None)


apply_attention = applier(AttentionFunction)


def differentiable_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    return_lse: bool,
    deterministic: bool,
) -> Any:
    """O, and LSE where it is wanted, of plain tensors whose plan has not been looked for."""
    plan = attention_plan.forward_plan(q, k, v, options, True)
    return apply_attention(q, k, v, (plan, options, return_lse, deterministic, None))


differentiate_by(FORWARD_OP, differentiate, setup_context=save_for_backward)
differentiate_by(BACKWARD_OP, differentiate_twice, setup_context=save_for_double_backward)
