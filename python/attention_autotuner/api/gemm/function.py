"""``matmul``: the product of two matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...arch import Policy, naming
from ...serving.pinning import Config
from ..shared import checks, interop, plain
from . import plan
from .plan import Call


def matmul(
    a: Any,
    b: Any,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    config: Config | Sequence[Config] | None = None,
) -> Any:
    """The product of two matrices by the fastest kernel known for this problem.

    Sums are fp32. Kernels are chosen, built and launched as :func:`flash_attn_func`'s are, and tensors on the CPU are
    served by PyTorch. Kernels are of family ``sm90``: on other GPUs PyTorch computes the product, with one warning. It
    is differentiable, as often as is wanted; gradients are such products, too.

    Args:
        a: ``[m, k]``, fp16 or bf16, by rows or by columns (unit stride in either dimension), with rows or columns that
            start at multiples of 16 bytes; so m must be a multiple of 8 in ``a`` that lies by columns. A torch tensor,
            or an array that offers ``__dlpack__``; both of one kind.
        b: ``[k, n]`` alike. k and n must be multiples of 8.
        device_type: whose search space and tuned picks to use: a policy, its class, a name such as ``"H100"``, or None
            for the GPU that a is on.
        config: the candidate that serves, whatever was tuned, as ``candidates --json`` has them. None leaves it to
            tuning.

    Returns:
        ``[m, n]`` by rows in a's dtype; an array of a's own library if a is not a tensor. Zeros where k is 0.

    Raises:
        UnsupportedProblemError: an argument is outside what the kernels support; the message names it.
        UnsupportedArchitectureError: ``device_type`` is unknown, or its kernels cannot run on the GPU of a.
        NotWarmError: a CUDA graph is being captured and the kernel is not ready.
        UnknownCandidateError: ``config`` is no candidate of this problem; the message lists names near it.
        ToolchainError, BuildError, NoCandidateError: no kernel can be had, and ``config`` names one or
            ``ATTENTION_AUTOTUNER_STRICT_KERNELS`` is on.
    """
    if config is not None:
        device_type = plain.pinned_name(device_type, config)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return interop.call_with_tensors(matmul, {"a": a, "b": b}, device_type=device_type)
    differentiates = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if (
        differentiates
        or torch.compiler.is_compiling()
        or not (a.is_cuda and b.is_cuda)
        or plain.addresses(a, b) is None
    ):
        checks.check_places(a=a, b=b)
        plain.refuse_tangents(a, b, op="matmul")
        return plan.OP(a, b, "" if device_type is None else plain.policy_name(device_type))
    return plan.product(Call(a, b, "" if device_type is None else naming.policy_name(device_type)))
