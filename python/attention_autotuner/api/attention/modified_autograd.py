"""Attention with modified scores beside the dispatcher, for plain eager tensors of calls that are like one before."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core.modifications import SPANNED
from ...operations.attention.modified import Modifiers
from ..shared.launch import Plan
from ..shared.plain import Gradient, applier, are_plain, refuse_tangents, settings_of
from . import plan as attention_plan
from .checks import Options
from .modified import BACKWARD_OP, UNPACKED, canonical_window
from .modified_replay import Replay


class _Call(NamedTuple):
    """All that a call has beside the tensors that gradients are of, with a window that hides something."""

    plan: Plan
    replay: Replay | None  # None once it has been computed
    options: Options
    window: tuple[int, int]
    softcap: float
    deterministic: bool
    return_lse: bool


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
    (scale, causal, top_left, device_type), window, softcap = replay.asked[2:5]
    window, causal = canonical_window(window, causal, top_left, q.shape[2], k.shape[2])
    options = (scale, causal, top_left, device_type)
    call = _Call(plan, replay, options, window, softcap, deterministic, return_lse)
    results: Any = _apply(q, k, v, replay.named["sinks"], replay.named["bias_table"], call)
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
        call: _Call,
    ) -> Any:
        """Launch the kernel and keep what gradients need.

        Args:
            ctx: torch's.
            q: as :func:`flash_attn_func` takes it, as are k, v, sinks and the bias table.
            k: see q.
            v: see q.
            sinks: see q.
            table: see q.
            call: all else.
        """
        assert call.replay is not None
        o, lse = call.plan.run(*call.replay.inputs)
        named = call.replay.named
        others = (named["alibi_slopes"], named["attn_mask"], *map(named.get, SPANNED))
        ctx.save_for_backward(q, k, v, o, lse, sinks, table, *others)
        ctx.set_materialize_grads(False)
        # Tensors are kept by torch, which says where they were overwritten.
        ctx.call = call._replace(replay=None)
        return (o, lse) if call.return_lse else o

    @staticmethod
    def backward(ctx: Any, grad_o: Gradient, grad_lse: Gradient = None) -> tuple[Gradient, ...]:
        """Gradients of q, k, v, the sinks and the bias table."""
        if grad_o is None and grad_lse is None:
            return (None,) * 6
        *saved, sinks, table, slopes, mask, prefixes, ids = ctx.saved_tensors
        plan, _, options, window, softcap, deterministic, _ = ctx.call
        wanted = ctx.needs_input_grad[4]
        with settings_of(plan):
            tensors = (grad_o, grad_lse, *saved)
            bent = (sinks, table, slopes, mask, prefixes, ids)
            if torch.is_grad_enabled() or not are_plain(*tensors, *bent):
                refuse_tangents(*tensors, op="attention")
                values = (*window, softcap, slopes, mask, sinks, *UNPACKED, table, wanted)
                call = (*options, deterministic, *values, prefixes, ids)
                *three, of_sinks, of_table = BACKWARD_OP(*tensors, *call)
            else:
                if mask is not None:
                    mask = mask.expand(*saved[0].shape[:3], saved[1].shape[2])
                modifiers = Modifiers(
                    window_size=window,
                    softcap=softcap,
                    alibi_slopes=slopes,
                    bias_table=table,
                    attn_mask=mask,
                    prefix_lens=prefixes,
                    document_ids=ids,
                    sinks=sinks,
                )
                *three, of_sinks, of_table = _beside_dispatcher(
                    tensors, options, deterministic, modifiers, wanted
                )
        return (*three, of_sinks if sinks is not None else None, of_table if wanted else None, None)


def _beside_dispatcher(
    tensors: Any, options: Options, deterministic: bool, modifiers: Modifiers, wanted: bool
) -> tuple[Gradient, ...]:
    """Gradients of q, k, v, the sinks and the bias table; None of what is absent or not wanted."""
    grad_o, grad_lse, *saved = tensors
    q, k, v, o, lse = saved
    dq, dk, dv, *of_values = attention_plan.attention_backward(
        *(grad_o, grad_lse, q, k, v, o, lse),
        options,
        deterministic,
        modifiers,
        bias_gradient=wanted,
    )
    present = (modifiers.sinks is not None, wanted)
    return dq, dk, dv, *(of_values.pop(0) if is_there else None for is_there in present)


_apply = applier(ModifiedFunction)
