"""``retnet_attn_func``: retention with a mask or a decay and a normaliser, in its parallel form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...arch import Policy, naming
from ...errors import UnsupportedProblemError
from ...serving.pinning import Config
from ..shared import checks, gammas, options, plain
from ..shared.gammas import Decay
from ..shared.options import TensorLayout
from . import checks as retnet_checks
from . import plan as retnet_plan
from .autograd import apply_retnet
from .checks import Forward, Rules
from .torch_op import FORWARD_OP

_MAX_SCALE = checks.MAX_SCALE


def retnet_attn_func(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    layout: TensorLayout = "bhsd",
    scale: float = 1.0,
    causal: bool = False,
    normalize: bool = True,
    r_clamp_max: float | None = None,
    r_grad: bool = False,
    return_r: bool = False,
    config: Config | Sequence[Config] | None = None,
    **others: Any,
) -> Any:
    """Retention, ``X = (scale q k^T) * mask``, ``o = (X / r) v``, by the fastest kernel known for this problem.

    ``r = clamp(rowsum(|X|), 1, r_clamp_max)``. Scores are never in memory, masked or not; nor is the mask, if it is a
    :class:`Decay`. Kernels are chosen, built and launched as :func:`flash_attn_func`'s are, and tensors on the CPU are
    served by the PyTorch reference.

    q, k, v and a mask that is a tensor have gradients, by kernels too. r is a constant to them, as RetNet trains it,
    unless ``r_grad``. The gradient of the mask is computed only where the mask requires it: it is the one result of the
    size of the scores. Whether gradients must agree bit for bit between equal calls follows
    ``torch.are_deterministic_algorithms_enabled()`` as it stands at this call; o and r agree either way. Gradients
    can be differentiated again, by the PyTorch reference. There is no forward-mode derivative.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]``, fp16 or bf16, unit stride in the last dim, any strides elsewhere. A
            torch tensor, or a CuPy or other array that offers ``__dlpack__``; q, k, v and the mask of one kind.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``; heads_q must be a multiple of heads_kv.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        mask: ``[heads_q or 1, seqlen_q, seqlen_k]`` in q's dtype with unit stride in the last dim, any values, shared
            by the batch; or a :class:`Decay`, whose gamma has no gradient here.
        device_type: whose search space and tuned picks to use: a policy, its class, a name such as ``"A100"``, or None
            for the GPU that q is on.
        layout: ``"bshd"`` where q, k, v and o are ``[batch, seqlen, heads, dim]``; it costs no copy. The mask and r are
            as they are either way. A call that looks like one of the other layout is warned of once.
        scale: any finite number, negative and 0 included, NumPy's too.
        causal: the promise that the mask is 0 where ``j > i + seqlen_k - seqlen_q``. What stands there is not read, and
            its gradient is 0. A decay is causal whatever is said here.
        normalize: False for r = 1.
        r_clamp_max: the most that r may be, at least 1; None for no limit.
        r_grad: whether gradients flow through r, where it is the row's own sum.
        return_r: return ``(o, r)``, with r ``[batch, heads_q, seqlen_q]`` in fp32 and without a gradient.
        config: the candidate that serves, whatever was tuned: its name or its ``config``, as ``candidates --json`` has
            them; or two, for the forward and the backward. Nothing else serves in its place. None leaves it to tuning.
        others: options of fla at the value that leaves them off: ``cu_seqlens=None``, ``head_first=False``.

    Returns:
        o ``[batch, heads_q, seqlen_q, dim_v]`` in q's dtype, with q's order of dimensions in memory, dense; an array of
        q's own library if q is not a tensor. Empty batch, heads or seqlen_q give empty results, and seqlen_k = 0 gives
        o = 0 and r = 1.

    Raises:
        UnsupportedArgumentError: another option, or another value of one.
        UnsupportedProblemError: an argument is outside what the kernels support; the message names it.
        UnsupportedArchitectureError: ``device_type`` is unknown, or its kernels cannot run on the GPU of q.
        NotWarmError: a CUDA graph is being captured and the kernel, or the decay, is not ready.
        UnknownCandidateError: ``config`` is no candidate of this problem; the message lists names near it.
        ToolchainError, BuildError, NoCandidateError: the kernel had to be built and could not be, and ``config`` names
            it or ``ATTENTION_AUTOTUNER_STRICT_KERNELS`` is on. Else the PyTorch reference serves, with one warning.
    """
    if others:
        options.refuse_others(retnet_attn_func, others, options.RETNET)
    if config is not None:
        device_type = plain.pinned_name(device_type, config)
    rules = Rules(scale, causal, normalize, r_clamp_max, r_grad)
    # What is plainly right needs no call of the check that knows what is wrong.
    if (
        type(scale) is not float
        or not -_MAX_SCALE <= scale <= _MAX_SCALE
        or type(causal) is not bool  # type: ignore[redundant-expr]  # untyped callers
        or normalize is not True
        or r_clamp_max is not None
        or type(r_grad) is not bool  # type: ignore[redundant-expr]  # untyped callers
        or type(return_r) is not bool
    ):
        rules = retnet_checks.check_types(rules, return_r)
    decay, matrix = (mask, None) if isinstance(mask, Decay) else (None, mask)
    if decay is None and not isinstance(matrix, torch.Tensor):
        retnet_checks.check_mask_type(matrix)
    if layout is not options.BHSD or not (
        isinstance(q, torch.Tensor)
        and isinstance(k, torch.Tensor)
        and isinstance(v, torch.Tensor)
        and (matrix is None or isinstance(matrix, torch.Tensor))
    ):
        masks = {"mask": mask}
        return options.call_with_views(
            retnet_attn_func,
            layout,
            {"q": q, "k": k, "v": v, **(masks if decay is None else {})},
            device_type=device_type,
            return_r=return_r,
            **rules._asdict(),
            **({} if decay is None else masks),
        )
    log2_gamma, gamma = None, None
    if decay is not None and decay.gamma is not None:
        log2_gamma, gamma = gammas.read(decay.gamma, q)
        if log2_gamma is not None and log2_gamma.requires_grad and torch.is_grad_enabled():
            raise UnsupportedProblemError(
                "the gamma of a Decay has no gradient in retnet_attn_func, got one with requires_grad=True: "
                "detach it, or use retention_func"
            )
    differentiable = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (matrix is not None and matrix.requires_grad)
    )
    inputs = (q, k, v, matrix, log2_gamma, gamma)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if (
        torch.compiler.is_compiling()
        or not (q.is_cuda and k.is_cuda and v.is_cuda)
        or (matrix is not None and not matrix.is_cuda)
        or plain.addresses(q, k, v, matrix, log2_gamma) is None
    ):
        checks.check_places(q=q, k=k, v=v, mask=matrix)
        plain.refuse_tangents(q, k, v, matrix, log2_gamma, op="retnet")
        policy = "" if device_type is None else plain.policy_name(device_type)
        # The gradient needs r: computed now it costs next to nothing, later another run of the kernel.
        keep_r = return_r or (differentiable and rules.normalize)
        o, r = FORWARD_OP(*inputs, *rules, policy, keep_r, deterministic)
        return (o, r) if return_r else o
    name = "" if device_type is None else naming.policy_name(device_type)
    call = Forward(*inputs, *rules, name, return_r, deterministic)
    if differentiable:
        return apply_retnet(*call)
    o, r = retnet_plan.retnet_forward(call)
    return (o, r) if return_r else o


RetNetAttnFunc = retnet_attn_func
