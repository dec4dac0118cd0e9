"""Calls with modified scores that are like one before: the plan of that one serves, beside checks and dispatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...core.problem import NO_WINDOW, is_pair
from ...operations.attention.modified import Modifiers
from ..shared import plain
from ..shared.launch import Plan
from . import plan as attention_plan
from .checks import Options, canonical_window
from .modified import Backward, Tensors, gradients_by_kernel, plan_of_backward


class Replay(NamedTuple):
    """A call whose tensors are plain.

    Attributes:
        asked: all that its plan depends on beside the tensors.
        inputs: of the plan: q, k and v, key bounds where there are any, of which one may be None, and what bends
            scores, in the order of :attr:`.Modifiers.tensors`.
        bounds: the key bounds by their names.
        named: what bends scores by its names, None for absent tensors.
        options: of the softmax, with the causal mask that is part of a window.
        window: without bounds that hide nothing.
        softcap: as it was asked for.
        differentiable: a gradient may be asked for.
    """

    asked: Any
    inputs: tuple[torch.Tensor | None, ...]
    bounds: Mapping[str, torch.Tensor | None]
    named: Mapping[str, torch.Tensor | None]
    options: Options
    window: tuple[int, int]
    softcap: float
    differentiable: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The inputs that are there."""
        return tuple(x for x in self.inputs if x is not None)

    @classmethod
    def of(
        cls,
        three: Sequence[Any],
        named: Mapping[str, Any],
        bounds: Mapping[str, Any],
        numbers: tuple[Any, Any],
        options: Options,
    ) -> Replay | None:
        """The call, or None where it takes another way.

        Args:
            three: q, k and v, as a caller gave them.
            named: tensors that bend scores, in the order of :attr:`.Modifiers.tensors`; None for absent ones.
            bounds: ``seqlens_k`` and ``starts_k``, or nothing.
            numbers: the window and the softcap, likewise as given.
            options: of the softmax.
        """
        window, softcap = numbers
        present = tuple(name for name, x in named.items() if x is not None)
        inputs = (*three, *bounds.values(), *(x for x in named.values() if x is not None))
        differentiable = False
        for x in inputs:
            if x is None:
                continue
            if type(x) not in plain.PLAIN_TYPES or x.is_nested:
                return None
            differentiable = differentiable or x.requires_grad
        if differentiable:
            differentiable = torch.is_grad_enabled()
            slopes = named["alibi_slopes"]  # whose gradient is refused
            if (differentiable and bounds) or (slopes is not None and slopes.requires_grad):
                return None
        if (
            type(softcap) is not float
            or type(window) is not tuple
            or [type(x) for x in window] != [int, int]
            or plain.is_watched()
        ):
            return None
        q, k = inputs[:2]
        valid = is_pair(window, -1) and q.dim() == k.dim() == 4
        if not valid:
            return None
        limits = tuple(name for name, x in bounds.items() if x is not None)
        mask = named["attn_mask"]
        shapes = (q.shape, k.shape, None if mask is None else mask.shape)
        asked = (*shapes, options, window, softcap, present, limits, differentiable)
        scale, causal, top_left, device_type = options
        hides, causal = canonical_window(window, causal, top_left, q.shape[2], k.shape[2])
        options = (scale, causal, top_left, device_type)
        return cls(asked, inputs, bounds, named, options, hides, softcap, differentiable)

    @property
    def bends_nothing(self) -> bool:
        """True where a window is all that might have bent its scores, and hides no key."""
        return self.window == NO_WINDOW and self.softcap == 0.0 and len(self.inputs) == 3

    def find(self) -> Plan | None:
        """The plan of an earlier call like it; None without one. It leaves O and LSE."""
        return attention_plan.FORWARD_REPLAYS.find(self.asked, *self.tensors)

    def remember(self, modifiers: Modifiers) -> None:
        """Keep the plan of this call, which has been computed; nothing where tensors are not those of one GPU."""
        memory, tensors = attention_plan.FORWARD_REPLAYS, self.tensors
        if not memory.takes(*tensors):
            return
        assert [*modifiers.tensors] == [name for name, x in self.named.items() if x is not None]
        q, k, v = tensors[:3]
        plan = attention_plan.forward_plan(q, k, v, self.options, True, self.bounds, modifiers)
        memory.remember(self.asked, plan, *tensors)


def replayed_backward(asked: Any, call: Backward) -> Tensors:
    """Gradients as :func:`.gradients_by_kernel` has them, of plain tensors and that of O alone, by an earlier plan.

    Args:
        asked: all that the plan depends on beside the tensors.
        call: without packed sequences.
    """
    memory = attention_plan.BACKWARD_REPLAYS
    assert call.grad_o is not None
    tensors = (call.grad_o, call.q, call.k, call.v, call.o, call.lse)
    # In the order of Modifiers.tensors.
    first = (call.alibi_slopes, call.bias_table, call.attn_mask, call.sinks)
    values = [x for x in (*first, call.prefix_lens, call.document_ids) if x is not None]
    plan = memory.find(asked, *tensors, *values)
    if plan is None:
        memory.remember(asked, plan_of_backward(call), *tensors, *values)
        return gradients_by_kernel(call)
    grad_o, q, k, v, o, lse = tensors
    return tuple(plan.run(q, k, v, o, grad_o, lse, None, *values))
