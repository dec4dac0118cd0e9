"""Attention with modified scores beside the dispatcher, for plain eager tensors of calls that are like one before."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch

from ...core.modifications import SPANNED
from ..shared.launch import Plan
from ..shared.plain import Gradient, applier, are_plain, refuse_tangents, settings_of
from .modified import BACKWARD_OP, UNPACKED, Backward, gradients_by_kernel
from .modified_replay import Replay, replayed_backward


def run_modified(
    replay: Replay, plan: Plan, return_lse: bool, deterministic: bool | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """O, or O and LSE, of a call by the plan of one like it; differentiable where that may be asked for."""
    if not replay.differentiable:
        o, lse = plan.run(*replay.inputs)
        return (o, lse) if return_lse else o
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    q, k, v, *_ = replay.tensors
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
        call: tuple[Plan, Replay, bool, bool],
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
        o, lse = plan.run(*replay.inputs)
        named = replay.named
        others = (named["alibi_slopes"], *map(named.get, SPANNED))
        # Tensors are kept by torch, which says where they were overwritten.
        ctx.save_for_backward(q, k, v, o, lse, sinks, table, mask, *others)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.asked = plan, replay.asked
        ctx.others = (*replay.options, deterministic, *replay.window, replay.softcap)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, grad_o: Gradient, grad_lse: Gradient = None) -> tuple[Gradient, ...]:
        """Gradients of q, k, v, the sinks, the bias table and the mask."""
        if grad_o is None and grad_lse is None:
            return (None,) * 7
        *saved, sinks, table, mask, slopes, prefixes, ids = ctx.saved_tensors
        _, _, _, of_sinks, of_table, of_mask, _ = ctx.needs_input_grad
        # With the axes of all pairs.
        pairs = None if mask is None else mask[(None,) * (4 - mask.dim())]
        values: Any = (slopes, pairs, sinks, *UNPACKED, table, of_table, prefixes, ids, of_mask)
        wanted = (sinks is not None, of_table, of_mask)
        call = Backward(grad_o, grad_lse, *saved, *ctx.others, *values)
        with settings_of(ctx.plan):
            if torch.is_grad_enabled() or not are_plain(grad_o, grad_lse, *ctx.saved_tensors):
                refuse_tangents(grad_o, grad_lse, *saved, op="attention")
                results = BACKWARD_OP(*call)
                gradients = (*results[:3], *compress(results[3:], wanted))
            elif grad_o is None or grad_lse is not None:
                gradients = gradients_by_kernel(call)
            else:
                asked = (ctx.asked, call.deterministic, of_table, of_mask)
                gradients = replayed_backward(asked, call)
        dq, dk, dv, *others = gradients
        dsinks, dtable, dmask = (others.pop(0) if wants else None for wants in wanted)
        dmask = None if dmask is None else dmask.view(mask.shape)
        return (dq, dk, dv, dsinks if of_sinks else None, dtable, dmask, None)


_apply = applier(ModifiedFunction)
