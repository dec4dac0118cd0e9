"""What is timed of others' gradients below autograd: torch's fused attentions.

Here a backward pass is timed alone, on what its own forward pass saved. The gradient of the output is laid
out as that output is, which is what a training step would hand over; in another layout the operators would copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attention_autotuner.operations.shared.tensors import Inputs, Outputs

Saved = Sequence[Any]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class FusedOps:
    """A fused attention's two operators.

    Attributes:
        forward: of (q, k, v) and whether rows see keys up to their diagonal only: the output first, then what the
            backward needs.
        backward: of the output's gradient, (q, k, v), what was saved, and the mask: the gradients of q, k and v.
    """

    forward: Callable[[Triple, bool], Saved]
    backward: Callable[[torch.Tensor, Triple, Saved, bool], Any]


def _flash_forward(given: Triple, causal: bool) -> Saved:
    saved: Saved = torch.ops.aten._scaled_dot_product_flash_attention.default(
        *given, 0.0, causal, False
    )
    return saved


def _flash_backward(dout: torch.Tensor, given: Triple, saved: Saved, causal: bool) -> Any:
    o, lse, starts_q, starts_k, longest_q, longest_k, seed, offset, _ = saved
    lengths = (starts_q, starts_k, longest_q, longest_k)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        dout, *given, o, lse, *lengths, 0.0, causal, seed, offset
    )


def _cudnn_forward(given: Triple, causal: bool) -> Saved:
    saved: Saved = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        *given, None, True, 0.0, causal, False
    )
    return saved


def _cudnn_backward(dout: torch.Tensor, given: Triple, saved: Saved, causal: bool) -> Any:
    o, lse, starts_q, starts_k, longest_q, longest_k, seed, offset, _ = saved
    lengths = (starts_q, starts_k, longest_q, longest_k)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        dout, *given, o, lse, seed, offset, None, *lengths, 0.0, causal
    )


FLASH = FusedOps(forward=_flash_forward, backward=_flash_backward)
CUDNN = FusedOps(forward=_cudnn_forward, backward=_cudnn_backward)


@dataclass
class FusedBackwardEntry:
    """A peer's backward pass, alone or after its forward pass.

    Attributes:
        name: how it is reported.
        ops: the operators.
        causal: whether rows see keys up to their diagonal only.
        step: whether the forward pass is run, and timed, each time.
    """

    name: str
    ops: FusedOps
    causal: bool
    step: bool
    _runs: list[Callable[[], Any]] = field(default_factory=list, repr=False)

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Run each set's forward pass, keep what it saves, and run one backward pass."""
        self._runs = [self._bind(each) for each in inputs]
        self.run(0)

    def run(self, index: int) -> None:
        """Call the operators."""
        self._runs[index]()

    def _bind(self, each: Inputs) -> Callable[[], Any]:
        given = (each.q, each.k, each.v)
        forward, backward, causal = self.ops.forward, self.ops.backward, self.causal
        saved = forward(given, causal)
        dout = torch.empty_like(saved[0]).copy_(each.tensors["dout"])
        if self.step:
            return lambda: backward(dout, given, forward(given, causal), causal)
        return lambda: backward(dout, given, saved, causal)
