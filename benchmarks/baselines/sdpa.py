"""Torch's scaled_dot_product_attention, held to one backend: FlashAttention-2, cuDNN or the memory-efficient kernels.

Gradients of the fused backends are timed below autograd, by the two operators: a backward pass alone, on what its own
forward pass saved, or both. The gradient of the output is laid out as that output is, which is what a training step
would hand over; in another layout the operators would copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_autotuner.core.modifications import PACKED
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.tuning.entries import Entry

from ..calls import BoundEntry, Function
from ..contenders import STEP
from .base import Baseline, Mode, grouped_heads, misaligned, top_left, two_head_dims

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


def _flash_forward(qkv: Triple, causal: bool) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention.default(*qkv, 0.0, causal, False)


def _flash_backward(dout: torch.Tensor, qkv: Triple, saved: Saved, causal: bool) -> Any:
    o, lse, *lengths, seed, offset, _ = saved
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        dout, *qkv, o, lse, *lengths, 0.0, causal, seed, offset
    )


def _cudnn_forward(qkv: Triple, causal: bool) -> Any:
    return torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        *qkv, None, True, 0.0, causal, False
    )


def _cudnn_backward(dout: torch.Tensor, qkv: Triple, saved: Saved, causal: bool) -> Any:
    o, lse, *lengths, seed, offset, _ = saved
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        dout, *qkv, o, lse, seed, offset, None, *lengths, 0.0, causal
    )


FLASH_OPS = FusedOps(forward=_flash_forward, backward=_flash_backward)
CUDNN_OPS = FusedOps(forward=_cudnn_forward, backward=_cudnn_backward)


@dataclass(kw_only=True)
class FusedBackwardEntry(BoundEntry):
    """A fused backward pass, alone on what one forward pass saved, or after its forward pass.

    Attributes:
        ops: the operators.
        causal: whether rows see keys up to their diagonal only.
        step: whether the forward pass is run, and timed, each time.
    """

    ops: FusedOps
    causal: bool
    step: bool

    def _bind(self, inputs: Inputs) -> Callable[[], Any]:
        qkv = (inputs.q, inputs.k, inputs.v)
        forward, backward, causal = self.ops.forward, self.ops.backward, self.causal
        saved = forward(qkv, causal)
        dout = torch.empty_like(saved[0]).copy_(inputs.tensors["dout"])
        if self.step:
            return lambda: backward(dout, qkv, forward(qkv, causal), causal)
        return lambda: backward(dout, qkv, saved, causal)


class Sdpa(Baseline):
    """SDPA by one backend.

    Attributes:
        backend: the only one that may serve.
        ops: the operators below autograd; None where gradients are timed through autograd.
        lower_right: it takes a causal mask that ends at the bottom right, where queries and keys differ in number.
    """

    backend: SDPBackend
    ops: FusedOps | None = None
    lower_right = False
    modifications = frozenset({PACKED})

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`."""
        return make_sdpa(self.backend, problem, lower_right=self.lower_right)

    def modes(self, modes: Sequence[Mode]) -> list[Mode]:
        """All of a trial's modes, as a step is timed below autograd and through it; see :meth:`Baseline.modes`."""
        return list(modes) if self.ops is not None else super().modes(modes)

    def ours(self, problem: Problem, mode: Mode) -> str:
        """See :meth:`Baseline.ours`."""
        below = self._below_autograd(problem, mode) is not None
        return STEP if below and mode == "step" else super().ours(problem, mode)

    def entry(self, problem: Problem, mode: Mode, name: str) -> Entry:
        """See :meth:`Baseline.entry`."""
        ops = self._below_autograd(problem, mode)
        if ops is None:
            return super().entry(problem, mode, name)
        return FusedBackwardEntry(name=name, ops=ops, causal=problem.causal, step=mode == "step")

    def _below_autograd(self, problem: Problem, mode: Mode) -> FusedOps | None:
        """The operators that time a mode without autograd, where there are some that take the problem."""
        reasons = grouped_heads(problem), misaligned(problem), problem.packed
        if mode not in ("backward", "step") or any(reasons):
            return None
        return self.ops


class SdpaFlash(Sdpa):
    """FlashAttention-2 as torch has it."""

    name = "sdpa_flash"
    title = "FlashAttention-2 (torch SDPA)"
    backend = SDPBackend.FLASH_ATTENTION
    ops = FLASH_OPS
    gradients = "below autograd where it can be"
    lower_right = True
    limits = (two_head_dims, top_left)


class SdpaCudnn(Sdpa):
    """cuDNN's attention."""

    name = "sdpa_cudnn"
    title = "cuDNN (torch SDPA)"
    backend = SDPBackend.CUDNN_ATTENTION
    ops = CUDNN_OPS
    gradients = "below autograd where it can be"
    limits = (misaligned,)


class SdpaEfficient(Sdpa):
    """The memory-efficient kernels."""

    name = "sdpa_efficient"
    title = "memory-efficient (torch SDPA)"
    backend = SDPBackend.EFFICIENT_ATTENTION
    limits = (grouped_heads, misaligned)


def make_sdpa(backend: SDPBackend, problem: Problem, *, lower_right: bool = False) -> Function:
    """SDPA as a function of q, k and v, held to one backend; of packed sequences as nested tensors.

    Args:
        backend: the only one that may serve.
        problem: decides the mask and whether heads are grouped.
        lower_right: see :class:`Sdpa`.
    """
    grouped = problem.heads_q != problem.heads_kv
    bias = None
    if lower_right and problem.causal and problem.causal_offset != 0:
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(problem.seqlen_q, problem.seqlen_k)
    causal = problem.causal and bias is None

    def run_packed(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ends_q: torch.Tensor,
        ends_k: torch.Tensor,
    ) -> torch.Tensor:
        # Tensors are of equal lengths to torch only where they share their offsets.
        ends_k = ends_k if problem.seqlen_q != problem.seqlen_k else ends_q
        longest = (problem.seqlen_q, problem.seqlen_k, problem.seqlen_k)
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(x, ends, max_seqlen=most).transpose(1, 2)
            for x, ends, most in zip((q, k, v), (ends_q, ends_k, ends_k), longest, strict=True)
        )
        with sdpa_kernel(backend):
            o = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return o.transpose(1, 2).values()

    if problem.packed:
        return run_packed

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=grouped
            )

    return run
