"""The ``torch.library`` side of attention: schema, fake kernels, CPU and CUDA kernels, autograd.

``Library.define`` and ``impl`` rather than ``custom_op``: a third of its host time a call. The gradient has no kernel
yet: it is recomputed by the reference formula, exactly and block by block, and a notice says so once.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from ..codegen.problem import CausalAlignment
from ..errors import UnsupportedProblemError
from ..reference import attention, attention_backward
from . import checks, plan

_log = logging.getLogger(__name__)

NAMESPACE = "attention_autotuner"
FORWARD = (
    "attention_forward(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, bool top_left, "
    "str device_type, bool return_lse) -> (Tensor, Tensor)"
)
BACKWARD = (
    "attention_backward(Tensor? grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, float? softmax_scale, "
    "bool causal, bool top_left) -> (Tensor, Tensor, Tensor)"
)

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@functools.cache
def _notice(message: str) -> None:
    """Log a message once a process."""
    _log.warning(message)


def _alignment(top_left: bool) -> CausalAlignment:
    return "top_left" if top_left else "bottom_right"


def _forward_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = plan.attention_forward(
        q, k, v, softmax_scale, causal, top_left, device_type, return_lse
    )
    return o, _no_lse(q) if lse is None else lse


def _forward_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _forward_fake(q, k, v, softmax_scale, causal, top_left, device_type, return_lse)
    _notice("tensors on the CPU: attention is computed by the PyTorch reference, not by a kernel")
    if o.numel() > 0:
        found_o, found_lse = attention(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            causal_alignment=_alignment(top_left),
        )
        o.copy_(found_o)
        if return_lse:
            lse.copy_(found_lse)
    return o, lse


def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_tensors(q, k, v)
    if softmax_scale is not None:
        checks.check_scale(softmax_scale)
    strides = checks.output_strides(q.shape, q.stride(), v.shape[3])
    o = q.new_empty_strided((*q.shape[:3], v.shape[3]), strides)
    return o, q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else _no_lse(q)


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    """What stands in the schema's second place when no LSE is wanted."""
    return q.new_empty(0, dtype=torch.float32)


def _backward(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
) -> Gradients:
    if q.is_cuda:
        _notice(
            "the gradient of attention has no kernel yet: it is recomputed by the PyTorch reference, which is exact "
            "but slow"
        )
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return attention_backward(
        grad_o,
        grad_lse,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        causal_alignment=_alignment(top_left),
    )


def _backward_fake(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, softmax_scale, causal, top_left, _, return_lse = inputs
    ctx.save_for_backward(q, k, v)
    ctx.arguments = (softmax_scale, causal, top_left)
    ctx.return_lse = return_lse
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_o: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    gradients = torch.ops.attention_autotuner.attention_backward.default(
        grad_o, grad_lse if ctx.return_lse else None, *ctx.saved_tensors, *ctx.arguments
    )
    return (*gradients, None, None, None, None, None)


def _refuse_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> None:
    raise UnsupportedProblemError("attention can be differentiated once, not twice")


class AttentionFunction(torch.autograd.Function):
    """The same autograd without the dispatcher, for plain eager tensors: a quarter of the host time.

    Returns O alone when no LSE is wanted, else the pair.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None,
        causal: bool,
        top_left: bool,
        device_type: str,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Launch the kernel and keep what the gradient needs."""
        ctx.save_for_backward(q, k, v)
        ctx.arguments = (softmax_scale, causal, top_left)
        ctx.set_materialize_grads(False)
        o, lse = plan.attention_forward(
            q, k, v, softmax_scale, causal, top_left, device_type, return_lse
        )
        return o if lse is None else (o, lse)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k and v."""
        grad_lse = gradients[1] if len(gradients) > 1 else None
        found = torch.ops.attention_autotuner.attention_backward.default(
            gradients[0], grad_lse, *ctx.saved_tensors, *ctx.arguments
        )
        return (*found, None, None, None, None, None)


def _register() -> torch.library.Library:
    library: Any = torch.library.Library  # untyped in torch
    library = library(NAMESPACE, "DEF")
    library.define(FORWARD)
    library.define(BACKWARD)
    forward, backward = f"{NAMESPACE}::attention_forward", f"{NAMESPACE}::attention_backward"
    for key, implementation in (("CUDA", _forward_cuda), ("CPU", _forward_cpu)):
        library.impl("attention_forward", implementation, key)
        library.impl("attention_backward", _backward, key)
    torch.library.register_fake(forward, _forward_fake, lib=library)
    torch.library.register_fake(backward, _backward_fake, lib=library)
    torch.library.register_autograd(
        forward, _differentiate, setup_context=_save_for_backward, lib=library
    )
    torch.library.register_autograd(backward, _refuse_double_backward, lib=library)
    return library  # type: ignore[no-any-return]  # see above


# Lives as long as the module: the ops vanish with it.
LIBRARY = _register()
FORWARD_OP = torch.ops.attention_autotuner.attention_forward.default
