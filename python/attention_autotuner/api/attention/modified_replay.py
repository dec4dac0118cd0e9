"""Calls with modified scores that are like one before: the plan of that one serves, beside checks and dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...core.problem import NO_WINDOW, bucket_seqlen, is_pair
from ...operations.attention.modified import Modifiers
from ..shared import plain
from ..shared.launch import Plan
from . import plan as attention_plan
from .checks import Options, canonical_window
from .modified import Backward, Tensors, gradients_by_kernel, plan_of_backward
from .views import ROWS, View, as_kernels_take

Values = Mapping[str, "torch.Tensor | None"]


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
        longest: the greatest lengths of packed sequences; None of others.
        view: how q, k, v and O stand; None as kernels take them.
    """

    asked: Any
    inputs: tuple[torch.Tensor | None, ...]
    bounds: Values
    named: Values
    options: Options
    window: tuple[int, int]
    softcap: float
    differentiable: bool
    longest: tuple[int, int] | None = None
    view: View | None = None

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The inputs that are there, by which calls are compared."""
        return _compared([x for x in self.inputs if x is not None])

    @classmethod
    def of(
        cls,
        three: Sequence[Any],
        named: Mapping[str, Any],
        bounds: Mapping[str, Any],
        numbers: tuple[Any, Any],
        options: Options,
        view: View | None = None,
    ) -> Replay | None:
        """The call, or None where it takes another way.

        Args:
            three: q, k and v, as a caller gave them.
            named: tensors that bend scores, in the order of :attr:`.Modifiers.tensors`; None for absent ones.
            bounds: ``seqlens_k`` and ``starts_k``, or nothing.
            numbers: the window and the softcap, likewise as given.
            options: of the softmax.
            view: how q, k and v stand; None as kernels take them.
        """
        window, softcap = numbers
        inputs = (*three, *bounds.values(), *(x for x in named.values() if x is not None))
        differentiable = _is_differentiable(inputs, named)
        if (
            differentiable is None
            or (differentiable and bounds)
            or type(softcap) is not float
            or type(window) is not tuple
            or [type(x) for x in window] != [int, int]
        ):
            return None
        q, k = inputs[:2]
        valid = is_pair(window, -1) and q.dim() == k.dim() == 4
        if not valid:
            return None
        present = tuple(name for name, x in named.items() if x is not None)
        limits = tuple(name for name, x in bounds.items() if x is not None)
        mask = named["attn_mask"]
        shapes = (q.shape, k.shape, None if mask is None else mask.shape)
        flags = (differentiable, view is None)
        asked = (*shapes, options, window, softcap, present, limits, flags)
        scale, causal, top_left, device_type = options
        axis = 2 if view is None else 1
        hides, causal = canonical_window(window, causal, top_left, q.shape[axis], k.shape[axis])
        options = (scale, causal, top_left, device_type)
        of_call = (asked, inputs, bounds, named, options, hides, softcap, differentiable)
        return cls(*of_call, view=view)

    @classmethod
    def of_packed(
        cls,
        three: Sequence[Any],
        named: Mapping[str, Any],
        longest: tuple[int, int],
        numbers: tuple[tuple[int, int], Any],
        options: Options,
    ) -> Replay | None:
        """The same of packed sequences: ``longest`` and the window have been checked, ``named`` has cu_seqlens last."""
        window, softcap = numbers
        inputs = (*three, *(x for x in named.values() if x is not None))
        differentiable = _is_differentiable(inputs, named)
        if differentiable is None or type(softcap) is not float:
            return None
        q, k, _ = three
        if q.dim() != 3 or k.dim() != 3:
            return None
        present = tuple(name for name, x in named.items() if x is not None)
        ends = named["cu_seqlens_q"]
        shapes = (q.shape, k.shape, ends.shape, ends is named["cu_seqlens_k"])
        most = tuple(map(bucket_seqlen, longest))
        asked = (*shapes, options, window, softcap, present, most, differentiable)
        return cls(
            *(asked, inputs, {}, named, options, window, softcap, differentiable, longest, ROWS)
        )

    @property
    def bends_nothing(self) -> bool:
        """True where a window is all that might have bent its scores, and hides no key."""
        return self.window == NO_WINDOW and self.softcap == 0.0 and len(self.inputs) == 3

    def find(self) -> Plan | None:
        """The plan of an earlier call like it; None without one. It leaves O and LSE."""
        return attention_plan.FORWARD_REPLAYS.find(self.asked, *self.tensors)

    def run(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE."""
        o, lse = plan.run(*self.inputs)
        if self.view is not None:
            o = self.view.back_in_place(o)
        return o, lse if self.longest is None else lse.squeeze_(0)

    def remember(self) -> None:
        """Keep the plan of this call, which has been computed; nothing where tensors are not those of one GPU."""
        memory, tensors = attention_plan.FORWARD_REPLAYS, self.tensors
        if not memory.takes(*tensors):
            return
        q, k, v = as_kernels_take(self.view, *tensors[:3])
        named: dict[str, Any] = {name: x for name, x in self.named.items() if x is not None}
        if "attn_mask" in named:
            named["attn_mask"] = named["attn_mask"].expand(*q.shape[:3], k.shape[2])
        modifiers = Modifiers(
            window_size=self.window,
            softcap=self.softcap,
            max_seqlens=self.longest or (0, 0),
            **named,
        )
        assert [*modifiers.tensors] == [*named]
        plan = attention_plan.forward_plan(q, k, v, self.options, True, self.bounds, modifiers)
        memory.remember(self.asked, plan, *tensors)


def _compared(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Without the last one where it is the one before, as ``cu_seqlens`` may be: to torch's guards none equals such."""
    return tensors[:-1] if len(tensors) > 1 and tensors[-1] is tensors[-2] else tensors


def _is_differentiable(inputs: Sequence[Any], named: Mapping[str, Any]) -> bool | None:
    """True where a gradient of a call may be asked for; None where a tensor is not plain, or something looks on."""
    differentiable = False
    for x in inputs:
        if x is None:
            continue
        if type(x) not in plain.PLAIN_TYPES or x.is_nested:
            return None
        differentiable = differentiable or x.requires_grad
    if plain.is_watched():
        return None
    if differentiable:
        differentiable = torch.is_grad_enabled()
        slopes = named["alibi_slopes"]
        if slopes is not None and slopes.requires_grad:
            return None  # their gradient is refused
    return differentiable


def replayed_backward(
    asked: Any,
    tensors: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor | None],
    make_call: Callable[[], Backward],
    view: View | None,
) -> Tensors:
    """Gradients as :func:`.gradients_by_kernel` has them, of plain tensors and that of O alone, by an earlier plan.

    Args:
        asked: all that the plan depends on beside the tensors.
        tensors: the gradient of O, q, k, v, O and LSE.
        values: what bends scores, in the order of :attr:`.Modifiers.tensors`.
        make_call: makes the arguments of the backward op, of a call that is like none before.
        view: how the tensors but LSE stand; None as kernels take them.
    """
    memory = attention_plan.BACKWARD_REPLAYS
    present = [x for x in values if x is not None]
    compared = (*tensors, *_compared(present))
    plan = memory.find(asked, *compared)
    if plan is None:
        call = make_call()
        plan_of_call = plan_of_backward(call)
        if view is None or plan_of_call.reads_in_place:
            memory.remember(asked, plan_of_call, *compared)
        return gradients_by_kernel(call)
    grad_o, q, k, v, o, lse = tensors
    return tuple(plan.run(q, k, v, o, grad_o, lse, None, *present))
