"""``flash_attn_func``: attention on torch tensors and on arrays that speak DLPack."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..arch import Policy, naming
from ..codegen.problem import CausalAlignment
from . import checks, interop, plan
from .autograd import PLAIN_TYPES, AttentionFunction, refuse_tangents
from .library import FORWARD_OP

SUPPORTED_DEVICES = ("cuda", "cpu", "meta")
_MAX_SCALE = checks.MAX_SCALE
_CHOICES = (bool, type(None))


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    causal_alignment: CausalAlignment = "bottom_right",
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Any:
    """Exact attention, ``softmax(softmax_scale * q k^T) v``, by the fastest kernel known for this problem.

    Runs on torch's current stream of the tensors' device and never synchronises. Without any tuning the architecture's
    default kernel serves; it is built on the first call that needs it (``attention-autotuner warmup`` builds ahead).
    Under CUDA-graph capture the kernel must have run, or have been warmed up, before. Tensors on the CPU are served by
    the PyTorch reference.

    Gradients of q, k and v are exact, through o and through lse, and come from kernels chosen and tuned like the
    forward's (a problem of their own: ``direction="backward"``). Where one may be asked for, the call keeps q, k, v, o
    and lse, so memory stays linear in the sequence lengths; changing any of them in place before the backward is
    torch's usual error. Gradients can be differentiated again, by the PyTorch reference. There is no forward-mode
    derivative.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]``, fp16 or bf16, unit stride in the last dim, any strides elsewhere (a
            transposed ``[batch, seqlen, heads, dim]`` costs no copy). A torch tensor, or a CuPy or other array that
            offers ``__dlpack__``; q, k and v of one kind.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``; heads_q must be a multiple of heads_kv.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        device_type: whose search space and tuned picks to use: a policy, its class, a name such as ``"A100"``, or None
            for the GPU that q is on.
        causal: query row i sees keys ``j <= i + offset`` only; a row that sees none gives 0.
        softmax_scale: any finite number, negative and 0 included; None is ``1 / sqrt(dim_qk)``.
        causal_alignment: offset is ``seqlen_k - seqlen_q`` for ``"bottom_right"``, 0 for ``"top_left"``.
        return_lse: return ``(o, lse)``, with lse the natural logarithm of the softmax's denominator,
            ``[batch, heads_q, seqlen_q]`` in fp32, -inf for a row that sees no key. Both carry gradients.
        deterministic: whether two equal backward calls must agree bit for bit, which rules out kernels that add in no
            fixed order; None follows ``torch.are_deterministic_algorithms_enabled()`` as it stands at this call. o and
            lse agree either way.

    Returns:
        o ``[batch, heads_q, seqlen_q, dim_v]`` in q's dtype, with q's order of dimensions in memory, dense; an array of
        q's own library if q is not a tensor. Empty batch or heads give empty results.

    Raises:
        UnsupportedProblemError: an argument is outside what the kernels support; the message names it.
        UnsupportedArchitectureError: ``device_type`` is unknown, or its kernels cannot run on the GPU of q.
        NotWarmError: a CUDA graph is being captured and the kernel is not ready.
        ToolchainError, BuildError: the kernel had to be built and could not be.
    """
    top_left = causal_alignment != "bottom_right"
    # What is plainly right needs no call of the check that knows what is wrong.
    if (
        (
            softmax_scale is not None
            and not (type(softmax_scale) is float and -_MAX_SCALE <= softmax_scale <= _MAX_SCALE)
        )
        or (top_left and causal_alignment != "top_left")
        or type(deterministic) not in _CHOICES
        or type(causal) is not bool  # type: ignore[redundant-expr]  # untyped callers
        or type(return_lse) is not bool
    ):
        checks.check_options(causal, softmax_scale, causal_alignment, return_lse, deterministic)
    addresses = None if torch.compiler.is_compiling() else _plain_addresses(q, k, v)
    if addresses is None or not (q.is_cuda and k.is_cuda and v.is_cuda):
        return _through_dispatcher(
            q, k, v, device_type, softmax_scale, causal, top_left, return_lse, deterministic
        )
    name = "" if device_type is None else naming.policy_name(device_type)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return AttentionFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
            q,
            k,
            v,
            softmax_scale,
            causal,
            top_left,
            name,
            return_lse,
            torch.are_deterministic_algorithms_enabled()
            if deterministic is None
            else deterministic,
        )
    o, lse = plan.attention_forward(
        q, k, v, softmax_scale, causal, top_left, name, return_lse, addresses
    )
    return (o, lse) if return_lse else o


def _plain_addresses(q: Any, k: Any, v: Any) -> tuple[int, int, int] | None:
    """Where q, k and v lie, if the dispatcher would do no more than call our kernel, so that it can be left out.

    It would cost a call 11 us without grad and 39 us with it (benchmarks/host_overhead.py on an H200: 20.7 and 60.3 us
    through it, 10.2 and 21.3 beside it). None for anything unusual: subclasses, fake tensors, modes, functorch's
    transforms, tracing, and tensors whose values are not what lies in strided memory. Asking for their dispatch keys
    would say the same of those at three times the price.
    """
    if (
        type(q) not in PLAIN_TYPES
        or type(k) not in PLAIN_TYPES
        or type(v) not in PLAIN_TYPES
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
        or q.is_nested
        or k.is_nested
        or v.is_nested
    ):
        return None
    try:
        addresses = q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError:
        return None  # sparse, or a wrapper that a finished transform left behind
    # Tensors known to be zero, functional wrappers and empty tensors lie nowhere.
    return addresses if q_address and k_address and v_address else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's own
def _policy_name(device_type: str | Policy | type[Policy]) -> str:
    return naming.policy_name(device_type)


def _through_dispatcher(
    q: Any,
    k: Any,
    v: Any,
    device_type: str | Policy | type[Policy] | None,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    return_lse: bool,
    deterministic: bool | None,
) -> Any:
    tensors = [isinstance(x, torch.Tensor) for x in (q, k, v)]
    if not all(tensors):
        kinds = [type(x).__name__ for x in (q, k, v)]
        checks.fail_unless(
            not any(tensors), f"q, k and v must be arrays of one library, got {', '.join(kinds)}"
        )
        q_tensor, k_tensor, v_tensor = (
            interop.to_torch(name, x) for name, x in (("q", q), ("k", k), ("v", v))
        )
        give_back = interop.importer(q)
        found = _through_dispatcher(
            q_tensor,
            k_tensor,
            v_tensor,
            device_type,
            softmax_scale,
            causal,
            top_left,
            return_lse,
            deterministic,
        )
        return tuple(map(give_back, found)) if return_lse else give_back(found)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.fail_unless(
            x.device.type in SUPPORTED_DEVICES,
            f"{name} must be on one of {SUPPORTED_DEVICES}, got {x.device}",
        )
        checks.check_layout(name, x)  # the dispatcher has no kernel to hand other layouts to
    refuse_tangents(q, k, v)
    policy = "" if device_type is None else _policy_name(device_type)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    # The gradient needs LSE: computed now it costs next to nothing, later another run of the kernel.
    differentiable = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    o, lse = FORWARD_OP(
        q,
        k,
        v,
        softmax_scale,
        causal,
        top_left,
        policy,
        return_lse or differentiable,
        deterministic,
    )
    return (o, lse) if return_lse else o
