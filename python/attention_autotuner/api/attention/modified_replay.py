"""Calls with modified scores or key bounds like one before: its plan serves, beside checks and dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...core.problem import NO_WINDOW, bucket_seqlen, is_pair
from ...operations.attention.modified import Modifiers
from ..shared import plain
from ..shared.launch import ReferencePlan
from ..shared.replay import key_of
from . import checks as attention_checks
from . import plan as attention_plan
from .checks import Options
from .modified import Backward, Tensors, gradients_by_kernel, plan_of_backward
from .plan import AnyPlan
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
        from_caller: the window and the causal mask as they were asked for, as was the softcap.
        softcap: see from_caller.
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
    from_caller: tuple[tuple[int, int], bool]
    softcap: float
    differentiable: bool
    longest: tuple[int, int] | None = None
    view: View | None = None

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The inputs that are there, by which calls are compared."""
        return _compared([x for x in self.inputs if x is not None], self.longest is not None)

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
        differentiable = _is_differentiable(inputs, named["alibi_slopes"])
        if (
            differentiable is None
            or (differentiable and bounds)
            or type(softcap) is not float
            or type(window) is not tuple
            or [type(x) for x in window] != [int, int]
        ):
            return None
        q, k, v = three
        valid = is_pair(window, -1) and q.dim() == k.dim() == v.dim() == 4
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
        hides, hidden = attention_checks.canonical_window(
            window, causal, top_left, q.shape[axis], k.shape[axis]
        )
        options = (scale, hidden, top_left, device_type)
        of_call = (asked, inputs, bounds, named, options, hides, (window, causal), softcap)
        return cls(*of_call, differentiable, view=view)

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
        differentiable = _is_differentiable(inputs, named["alibi_slopes"])
        if differentiable is None or type(softcap) is not float:
            return None
        q, k, v = three
        if not q.dim() == k.dim() == v.dim() == 3:
            return None
        present = tuple(name for name, x in named.items() if x is not None)
        ends = named["cu_seqlens_q"]
        shapes = (q.shape, k.shape, ends.shape, ends is named["cu_seqlens_k"])
        most = tuple(map(bucket_seqlen, longest))
        asked = (*shapes, options, window, softcap, present, most, differentiable)
        from_caller, no_bounds = (window, options[1]), dict[str, Any]()
        of_call = (asked, inputs, no_bounds, named, options, window, from_caller, softcap)
        return cls(*of_call, differentiable, longest, ROWS)

    @property
    def bends_nothing(self) -> bool:
        """True where a window is all that might have bent its scores, and hides no key."""
        return self.window == NO_WINDOW and self.softcap == 0.0 and len(self.inputs) == 3

    def plan(self) -> AnyPlan | None:
        """The plan of an earlier call like it, or its own, checked and kept; None where it takes another way.

        That may depend on nothing but its tensors: recomputed, as by activation checkpointing, it has to keep for its
        gradients what it kept before. The plan leaves O and LSE.

        Raises:
            UnsupportedProblemError: the tensors name no problem that can be solved here.
            NotWarmError: a graph is being captured and the kernel is not ready.
        """
        memory, tensors = attention_plan.FORWARD_REPLAYS, self.tensors
        plan: AnyPlan | None = memory.find(self.asked, *tensors)
        if plan is None and memory.takes(*tensors):
            key = key_of(self.asked, tensors[0])
            plan = self._made()
            if isinstance(plan, ReferencePlan):
                return None  # it takes tensors as kernels do
            memory.remember(key, plan, *tensors)
        return plan

    def _made(self) -> AnyPlan:
        q, k, v = as_kernels_take(self.view, *self.inputs[:3])
        named: dict[str, Any] = {name: x for name, x in self.named.items() if x is not None}
        attention_checks.check_spans(named, (q.shape[2], k.shape[2]), *self.from_caller)
        if "attn_mask" in named:
            shape = (*q.shape[:3], k.shape[2])
            mask = attention_checks.mask_of_pairs(named["attn_mask"], shape)
            named["attn_mask"] = mask.expand(shape)
        modifiers = None
        if named or self.softcap or self.window != NO_WINDOW:
            modifiers = Modifiers(
                window_size=self.window,
                softcap=self.softcap,
                max_seqlens=self.longest or (0, 0),
                **named,
            )
            assert [*modifiers.tensors] == [*named]
            attention_checks.check_modifiers(q, modifiers)
        return attention_plan.forward_plan(q, k, v, self.options, True, self.bounds, modifiers)

    def run(self, plan: AnyPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE."""
        o, lse = plan.run(*self.inputs)
        if self.view is not None:
            o = self.view.back_in_place(o)
        return o, lse if self.longest is None else lse.squeeze_(0)


def _compared(tensors: Sequence[torch.Tensor], packed: bool) -> Sequence[torch.Tensor]:
    """Tensors by which calls are compared: of packed sequences without ``cu_seqlens_k`` where it is that of queries.

    To torch's comparison no call equals one that takes a tensor twice.
    """
    return tensors[:-1] if packed and tensors[-1] is tensors[-2] else tensors


def _is_differentiable(inputs: Sequence[Any], slopes: torch.Tensor | None) -> bool | None:
    """True where a gradient of a call may be asked for; None where a tensor is not plain, or something looks on.

    Args:
        inputs: q, k and v, then others, of which some may be None.
        slopes: of ALiBi, which are among them.
    """
    differentiable = False
    for place, x in enumerate(inputs):
        if x is None and place >= 3:
            continue
        if type(x) not in plain.PLAIN_TYPES or x.is_nested:
            return None
        differentiable = differentiable or x.requires_grad
    if plain.is_watched():
        return None
    if differentiable:
        differentiable = torch.is_grad_enabled()
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
        values: what bends scores, in the order of :attr:`.Modifiers.tensors`; ``cu_seqlens_k`` is the last.
        make_call: makes the arguments of the backward op, of a call that is like none before.
        view: how the tensors but LSE stand; None as kernels take them.
    """
    memory = attention_plan.BACKWARD_REPLAYS
    present = [x for x in values if x is not None]
    compared = _compared((*tensors, *present), values[-1] is not None)
    plan = memory.find(asked, *compared)
    if plan is None:
        key, call = key_of(asked, tensors[0]), make_call()
        plan_of_call = plan_of_backward(call)
        if view is None or plan_of_call.reads_in_place:
            memory.remember(key, plan_of_call, *compared)
        return gradients_by_kernel(call)
    grad_o, q, k, v, o, lse = tensors
    return tuple(plan.run(q, k, v, o, grad_o, lse, None, *present))
