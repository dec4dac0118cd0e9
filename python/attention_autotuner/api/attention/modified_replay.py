"""Calls with modified scores that are like one before: the plan of that one serves, beside checks and dispatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...core.problem import is_pair
from ...operations.attention.modified import Modifiers
from ..shared import plain
from ..shared.launch import Plan
from . import plan as attention_plan
from .checks import Options

_OTHERS = ("alibi_slopes", "attn_mask")  # whose gradients are refused, or come from an op


class Replay(NamedTuple):
    """A call whose tensors are plain.

    Attributes:
        asked: all that its plan depends on beside the tensors.
        tensors: q, k and v, then what bends scores, in the order of :attr:`.Modifiers.tensors`.
        named: the latter by their names, None for absent ones.
        differentiable: a gradient may be asked for.
    """

    asked: Any
    tensors: tuple[torch.Tensor, ...]
    named: Mapping[str, torch.Tensor | None]
    differentiable: bool

    @classmethod
    def of(
        cls,
        three: Sequence[Any],
        named: Mapping[str, Any],
        numbers: tuple[Any, Any],
        options: Options,
    ) -> Replay | None:
        """The call, or None where it takes another way.

        Args:
            three: q, k and v, as a caller gave them.
            named: tensors that bend scores, in the order of :attr:`.Modifiers.tensors`; None for absent ones.
            numbers: the window and the softcap, likewise as given.
            options: of the softmax.
        """
        window, softcap = numbers
        present = tuple(name for name, x in named.items() if x is not None)
        tensors = (*three, *(x for x in named.values() if x is not None))
        differentiable = False
        for x in tensors:
            if type(x) not in plain.PLAIN_TYPES or x.is_nested:
                return None
            differentiable = differentiable or x.requires_grad
        if differentiable:
            differentiable = torch.is_grad_enabled()
            if any(named[name] is not None and named[name].requires_grad for name in _OTHERS):
                return None
        if (
            type(softcap) is not float
            or type(window) is not tuple
            or [type(x) for x in window] != [int, int]
            or plain.is_watched()
        ):
            return None
        q, k = tensors[:2]
        asked = (q.shape, k.shape, options, window, softcap, present, differentiable)
        return cls(asked, tensors, named, differentiable)

    @property
    def is_of_window(self) -> bool:
        """True where a window is all that may bend its scores, and is one that there can be."""
        q, k, *others = self.tensors
        window, softcap = self.asked[3:5]
        return (
            softcap == 0.0 and len(others) == 1 and q.dim() == k.dim() == 4 and is_pair(window, -1)
        )

    def find(self) -> Plan | None:
        """The plan of an earlier call like it; None without one. It leaves O and LSE."""
        return attention_plan.FORWARD_REPLAYS.find(self.asked, *self.tensors)

    def remember(self, options: Options, modifiers: Modifiers) -> None:
        """Keep the plan of this call, which has been computed; nothing where tensors are not those of one GPU.

        Args:
            options: as it was computed, with what is part of its window.
            modifiers: likewise.
        """
        memory = attention_plan.FORWARD_REPLAYS
        if not memory.takes(*self.tensors):
            return
        q, k, v, *_ = self.tensors
        assert [*modifiers.tensors] == [name for name, x in self.named.items() if x is not None]
        plan = attention_plan.forward_plan(q, k, v, options, True, modifiers=modifiers)
        memory.remember(self.asked, plan, *self.tensors)
