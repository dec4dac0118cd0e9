"""Calls of kinds that were seen before, recognised by one comparison of torch's own, in C++.

The full key of a plan names all that it depends on, tensor after tensor, which takes Python longer than the rest of a
call. Torch compares types, dispatch keys, dtypes, devices, sizes and strides of all tensors of a call at once, for the
guards of compiled code. What equals a call that needed no dispatcher needs none either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import settings
from ...core.memo import Table
from ...core.problem import Direction, Op
from ...serving import dispatch
from .checks import VECTOR_BYTES
from .launch import MAX_PLANS, Plan
from .plain import addresses

KINDS = 4
"""Kinds of call on a GPU that may ask the same; the first are kept.

A graph's first run is one, as torch's state differs.
"""

_guards_of: Callable[..., Any] | None = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class Replays:
    """The plans of an operation's calls whose tensors are plain, on one GPU, and aligned."""

    def __init__(self, op: Op, direction: Direction) -> None:
        """Nothing yet."""
        self._plans: Table[Any, list[tuple[int, Callable[..., bool], Plan]]] = Table(
            f"replays.{op}.{direction}", bound=MAX_PLANS
        )

    def find(self, asked: Any, *tensors: torch.Tensor) -> Plan | None:
        """The plan of a call, or None where it has to be looked for by its full key.

        Args:
            asked: all that the plan depends on beside the tensors and the settings, and so much of the tensors that
                at most :data:`KINDS` kinds of call ask the same.
            tensors: of the call, in one order.
        """
        for count, equals, plan in self._plans.get(key_of(asked, tensors[0]), ()):
            # Torch's comparison raises where there are more or fewer tensors.
            if count == len(tensors) and equals(*tensors):
                bits = 0
                for x in tensors:
                    bits |= x.data_ptr()
                return None if bits % VECTOR_BYTES else plan
        return None

    def takes(self, *tensors: torch.Tensor) -> bool:
        """Return True where calls with such tensors may be replayed."""
        places = addresses(*tensors)
        return (
            places is not None
            and not any(place % VECTOR_BYTES for place in places)
            and tensors[0].is_cuda
            and len({x.get_device() for x in tensors}) == 1
        )

    def remember(self, key: Any, plan: Any, *tensors: torch.Tensor) -> None:
        """Keep a plan for :meth:`find`, unless its call is unusual or :data:`KINDS` others asked the same.

        Args:
            key: :func:`key_of` what was asked and the first tensor, from before the plan was made: what it goes by may
                have changed since.
            plan: what served.
            tensors: as :meth:`find` takes them.
        """
        kinds = self._plans.get(key, [])
        if _guards_of is None or type(plan) is not Plan or len(kinds) >= KINDS:
            return
        if len({id(x) for x in tensors}) < len(tensors):
            return  # to torch's comparison no call equals one that takes a tensor twice
        if self.takes(*tensors):
            guards = _guards_of(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            # The latest kind is looked at first; a new list, as other threads may be reading the old one.
            self._plans.remember(key, [(len(tensors), guards.check, plan), *kinds])


def key_of(asked: Any, first: torch.Tensor) -> tuple[Any, int, int, int]:
    """All that a plan depends on beside the tensors, and the GPU of the first, so that kinds are a GPU's own."""
    return asked, first.get_device(), dispatch.generation(), id(settings.current())
