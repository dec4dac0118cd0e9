"""Views of calls whose q, k, v and O do not stand as ``[batch, heads, seqlen, dim]``, as kernels take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Function = Callable[[torch.Tensor], torch.Tensor]


class View(NamedTuple):
    """Views there and back.

    Attributes:
        to_kernel: of a tensor of the call, as kernels take it.
        back: the reverse.
        back_in_place: the reverse, of a tensor that nobody else has: what autograd's functions return is to be no view.
    """

    to_kernel: Function
    back: Function
    back_in_place: Function


ROWS = View(
    lambda x: x.transpose(0, 1).unsqueeze(0),
    lambda x: x.squeeze(0).transpose(0, 1),
    lambda x: x.squeeze_(0).transpose_(0, 1),
)
"""``[rows of all sequences, heads, dim]``, one batch entry to kernels."""
BSHD = View(lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2), lambda x: x.transpose_(1, 2))
"""``[batch, seqlen, heads, dim]``."""


def as_kernels_take(view: View | None, *tensors: Any) -> list[Any]:
    """Tensors of a call as kernels take them; None stays."""
    if view is None:
        return [*tensors]
    return [None if x is None else view.to_kernel(x) for x in tensors]
