"""Calls with modified scores that are like one before: the plan of that one serves, beside checks and dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...operations.attention.modified import Modifiers
from ..shared import plain
from . import plan as attention_plan
from .checks import Options


class Replay(NamedTuple):
    """A call without gradients whose tensors are plain.

    Attributes:
        asked: all that its plan depends on beside the tensors.
        tensors: q, k and v, then what bends scores, in the order of :attr:`.Modifiers.tensors`.
    """

    asked: Any
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        three: Sequence[Any],
        bent: Sequence[Any],
        numbers: tuple[Any, Any],
        options: Options,
    ) -> Replay | None:
        """The call, or None where it takes another way.

        Args:
            three: q, k and v, as a caller gave them.
            bent: tensors that bend scores, in the order of :attr:`.Modifiers.tensors`; None for absent ones.
            numbers: the window and the softcap, likewise as given.
            options: of the softmax.
        """
        window, softcap = numbers
        present = tuple(x is not None for x in bent)
        tensors = (*three, *(x for x in bent if x is not None))
        grad = torch.is_grad_enabled()
        for x in tensors:
            if type(x) not in plain.PLAIN_TYPES or (grad and x.requires_grad) or x.is_nested:
                return None
        if (
            type(softcap) is not float
            or type(window) is not tuple
            or [type(x) for x in window] != [int, int]
            or plain.is_watched()
        ):
            return None
        q, k = tensors[:2]
        return cls((q.shape, k.shape, options, window, softcap, present), tensors)

    def run(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """O and LSE, by the plan of an earlier call like it; None without one."""
        plan = attention_plan.FORWARD_REPLAYS.find(self.asked, *self.tensors)
        if plan is None:
            return None
        o, lse = plan.run(*self.tensors)
        return o, lse

    def remember(self, modifiers: Modifiers) -> None:
        """Keep the plan of this call, which has been computed; nothing where tensors are not those of one GPU."""
        memory = attention_plan.FORWARD_REPLAYS
        if not memory.takes(*self.tensors):
            return
        q, k, v, *_ = self.tensors
        options = self.asked[2]
        plan = attention_plan.forward_plan(q, k, v, options, True, modifiers=modifiers)
        memory.remember(self.asked, plan, *self.tensors)
