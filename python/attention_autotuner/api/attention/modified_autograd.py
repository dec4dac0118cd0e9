"""Attention with modified scores beside the dispatcher, for plain eager tensors of calls that are like one before."""

from __future__ import annotations

from typing import Any

import torch

from ...core.modifications import SPANNED
from ...operations.attention.modified import CU_SEQLENS
from ..shared import checks
from ..shared.plain import Gradient, applier, are_plain, refuse_tangents, settings_of
from .modified import BACKWARD_OP, Backward, by_place, gradients_by_kernel
from .modified_replay import Replay, replayed_backward
from .plan import AnyPlan
from .views import View, as_kernels_take


def run_modified(
    replay: Replay, plan: AnyPlan, return_lse: bool, deterministic: bool | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """O, or O and LSE, of a call by the plan of one like it; differentiable where that may be asked for."""
    if not replay.differentiable:
        o, lse = replay.run(plan)
        return (o, lse) if return_lse else o
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    q, k, v = replay.inputs[:3]
    call = (plan, replay, deterministic, return_lse)
    values = (replay.named[name] for name in ("sinks", "bias_table", "attn_mask"))
    results: Any = _apply(q, k, v, *values, call)
    return results  # type: ignore[no-any-return]


class ModifiedFunction(torch.autograd.Function):
    """The derivative of :data:`.modified.FORWARD_OP` without the dispatcher, as :class:`.AttentionFunction` is."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        table: torch.Tensor | None,
        mask: torch.Tensor | None,
        call: tuple[AnyPlan, Replay, bool, bool],
    ) -> Any:
        """Launch the kernel and keep what gradients need.

        Args:
            ctx: torch's.
            q: as :func:`flash_attn_func` takes it, as are k, v, sinks, the bias table and the mask.
            k: see q.
            v: see q.
            sinks: see q.
            table: see q.
            mask: see q.
            call: the plan, the call, whether the gradients must be deterministic, and whether LSE is wanted.
        """
        plan, replay, deterministic, return_lse = call
        o, lse = replay.run(plan)
        others = map(replay.named.get, ("alibi_slopes", *SPANNED, *CU_SEQLENS))
        # Tensors are kept by torch, which says where they were overwritten.
        ctx.save_for_backward(q, k, v, o, lse, sinks, table, mask, *others)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.longest, ctx.view = plan, replay.longest, replay.view
        ctx.asked = (replay.asked, deterministic)
        ctx.others = (*replay.options, deterministic, *replay.window, replay.softcap)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, grad_o: Gradient, grad_lse: Gradient = None) -> tuple[Gradient, ...]:
        """Gradients of q, k, v, the sinks, the bias table and the mask."""
        if grad_o is None and grad_lse is None:
            return (None,) * 7
        kept = ctx.saved_tensors  # which hooks may let a function ask for but once
        *saved, sinks, table, mask, slopes, prefixes, ids, ends_q, ends_k = kept
        _, _, _, of_sinks, of_table, of_mask, _ = ctx.needs_input_grad
        # With the axes of all pairs.
        pairs = None if mask is None else mask[(None,) * (4 - mask.dim())]
        view: View | None = ctx.view

        def make_call() -> Backward:
            of_o, *four = as_kernels_take(view, grad_o, *saved[:4])
            of_lse, lse = grad_lse, saved[4]
            if ctx.longest is not None:
                of_lse = None if of_lse is None else of_lse.unsqueeze(0)
                lse = lse.unsqueeze(0)
            longest = ctx.longest or (0, 0)
            values = (slopes, pairs, sinks, ends_q, ends_k, *longest, table, of_table)
            tensors = (of_o, of_lse, *four, lse)
            arguments: Any = (*tensors, *ctx.others, *values, prefixes, ids, of_mask)
            return Backward(*arguments)

        back = None if view is None else view.back_in_place
        with settings_of(ctx.plan):
            if torch.is_grad_enabled() or not are_plain(grad_o, grad_lse, *kept):
                checks.check_layouts({"the gradient of o": grad_o, "the gradient of lse": grad_lse})
                refuse_tangents(grad_o, grad_lse, *saved, op="attention")
                gradients = BACKWARD_OP(*make_call())
                back = None if view is None else view.back  # with a derivative
            else:
                if grad_o is None or grad_lse is not None:
                    gradients = gradients_by_kernel(make_call())
                else:
                    asked = (ctx.asked, of_table, of_mask)
                    values = (slopes, table, pairs, sinks, prefixes, ids, ends_q, ends_k)
                    gradients = replayed_backward(asked, (grad_o, *saved), values, make_call, view)
                gradients = by_place(gradients, (sinks is not None, of_table, of_mask))
        *three, dsinks, dtable, dmask = gradients
        if back is not None:
            three = [*map(back, three)]
        of_values = (
            dsinks if of_sinks else None,
            dtable if of_table else None,
            dmask.view(mask.shape) if of_mask else None,
        )
        return (*three, *of_values, None)


_apply = applier(ModifiedFunction)
