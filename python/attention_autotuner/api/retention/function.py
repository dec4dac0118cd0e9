"""``retention_func``: retention with a decay per head, in every form, from and to a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...arch import Policy, naming
from ...core.problem import FORMS, Form
from ...serving.pinning import Config
from ..shared import checks, gammas, interop, options, plain
from ..shared.options import TensorLayout
from . import checks as retention_checks
from . import plan as retention_plan
from .autograd import apply_retention
from .checks import Forward
from .torch_op import FORWARD_OP, IN_PLACE_OP


def retention_func(
    q: Any,
    k: Any,
    v: Any,
    gamma: Any = None,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    layout: TensorLayout = "bhsd",
    form: Form = "auto",
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = True,
    inplace_state: bool = False,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    config: Config | Sequence[Config] | None = None,
    **others: Any,
) -> tuple[Any, Any]:
    """Retention with decay by the fastest kernel known for this problem, and the state that it leaves.

    ``S_t = gamma S_{t-1} + k_t^T v_t`` and ``o_t = scale q_t S_t``, from ``S_{-1} = initial_state``;
    states are not scaled. Kernels are chosen, built and launched as :func:`flash_attn_func`'s are, and tensors on the
    CPU are served by the PyTorch reference. With one token and its state in place a call may be captured in a CUDA
    graph and replayed.

    With ``cu_seqlens``, batch entry 0 holds sequences that lie one after the other, each with a state of its own. Their
    lengths are read when the kernel runs: nothing waits for them, nothing is built when they change, and a captured
    graph follows them as long as the tensors' shapes hold.

    q, k, v, gamma and the initial state have gradients, through o and through the final state, by kernels too. They are
    computed by chunks whichever form this call takes, and are the same bits every time. Gradients can be differentiated
    again, by the PyTorch reference. There is no forward-mode derivative.

    Args:
        q: ``[batch, heads_q, seqlen, dim_qk]``, fp16 or bf16, unit stride in the last dim, any strides elsewhere. A
            torch tensor, or a CuPy or other array that offers ``__dlpack__``; q, k, v and the state of one kind.
        k: ``[batch, heads_kv, seqlen, dim_qk]``; heads_q must be a multiple of heads_kv.
        v: ``[batch, heads_kv, seqlen, dim_v]``.
        gamma: the decay of each query head, in (0, 1]: None for ``1 - 2^(-5-h)``, a number for all heads, a sequence of
            numbers, or floats ``[heads_q]`` in a tensor, which may require a gradient. One on the GPU is not checked,
            as that would make the host wait.
        device_type: whose search space and tuned picks to use: a policy, its class, a name such as ``"A100"``, or None
            for the GPU that q is on.
        layout: ``"bshd"`` where q, k, v and o are ``[batch, seqlen, heads, dim]``, as fla has them; it costs no copy.
            States are ``[batch, heads_q, dim_qk, dim_v]`` either way. A call that looks like one of the other layout
            is warned of once.
        form: ``"parallel"``, ``"chunkwise"`` or ``"recurrent"``, the kind of kernel that computes it; ``"auto"`` for
            the fastest known of any kind.
        scale: any positive number, NumPy's too; None is ``1 / sqrt(dim_qk)``.
        initial_state: ``[batch, heads_q, dim_qk, dim_v]`` in fp32, any strides; None for zeros. With ``cu_seqlens``
            an entry for each sequence takes the place of the batch.
        output_final_state: whether the state is returned.
        inplace_state: whether the final state overwrites the initial one, which must be contiguous, and is what is
            returned. Without gradients.
        cu_seqlens: int32 ``[sequences + 1]`` on q's device, from 0, ascending, as fla has it: sequence b has the rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]`` of batch entry 0, perhaps none. Rows behind the last sequence
            give o = 0, and their gradients are 0. Values on a GPU are not read here, and so not checked.
        max_seqlen: the greatest length of these sequences, from which a kernel is chosen; it bounds nothing. None is as
            many as there are rows.
        config: the candidate that serves, whatever was tuned: its name or its ``config``, as ``candidates --json`` has
            them; or two, for the forward and the backward. Nothing else serves in its place. None leaves it to tuning.
        others: options of fla at the value that leaves them off: ``head_first=False``.

    Returns:
        o ``[batch, heads_q, seqlen, dim_v]`` in q's dtype, with q's order of dimensions in memory, dense, and the final
        state or None; arrays of q's own library if q is not a tensor. Empty batch or heads give empty results; from an
        empty sequence the initial state comes back, or zeros.

    Raises:
        UnsupportedArgumentError: another option, or another value of one.
        UnsupportedProblemError: an argument is outside what the kernels support; the message names it.
        UnsupportedArchitectureError: ``device_type`` is unknown, or its kernels cannot run on the GPU of q.
        NotWarmError: a CUDA graph is being captured and the kernel, or the decays, are not ready.
        UnknownCandidateError: ``config`` is no candidate of this problem; the message lists names near it.
        ToolchainError, BuildError, NoCandidateError: the kernel had to be built and could not be, and ``config`` names
            it or ``ATTENTION_AUTOTUNER_STRICT_KERNELS`` is on. Else the PyTorch reference serves, with one warning.
    """
    if others:
        options.refuse_others(retention_func, others, options.RETENTION)
    if config is not None:
        device_type = plain.pinned_name(device_type, config)
    # What is plainly right needs no call of the check that knows what is wrong.
    if (
        not isinstance(form, str)  # type: ignore[redundant-expr]  # untyped callers
        or form not in FORMS
        or scale is not None
        or type(output_final_state) is not bool  # type: ignore[redundant-expr]  # untyped callers
        or type(inplace_state) is not bool  # type: ignore[redundant-expr]  # as above
        or max_seqlen is not None
    ):
        max_seqlen = checks.whole(max_seqlen)
        checks.check_longest("max_seqlen", max_seqlen, optional=True)
        scale = retention_checks.check_types(scale, form, output_final_state, inplace_state)
    if layout is not options.BHSD or not (
        isinstance(q, torch.Tensor)
        and isinstance(k, torch.Tensor)
        and isinstance(v, torch.Tensor)
        and (initial_state is None or isinstance(initial_state, torch.Tensor))
        and (cu_seqlens is None or isinstance(cu_seqlens, torch.Tensor))
    ):
        if inplace_state:
            interop.check_writable("initial_state", initial_state)
        optional = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
        o, state = options.call_with_views(
            retention_func,
            layout,
            {"q": q, "k": k, "v": v} | {name: x for name, x in optional.items() if x is not None},
            gamma=gamma,
            device_type=device_type,
            form=form,
            scale=scale,
            output_final_state=output_final_state,
            inplace_state=inplace_state,
            max_seqlen=max_seqlen,
        )
        return o, initial_state if inplace_state and state is not None else state
    log2_gamma, numbers = (None, None) if gamma is None else gammas.read(gamma, q)
    if inplace_state:
        retention_checks.refuse_gradients(q, k, v, log2_gamma, initial_state)
        initial_state = retention_checks.check_in_place(initial_state)
    inputs = (q, k, v, log2_gamma, numbers, initial_state, scale, form)
    packing: tuple[Any, ...] = (cu_seqlens, max_seqlen)
    if (
        torch.compiler.is_compiling()
        or not (q.is_cuda and k.is_cuda and v.is_cuda)
        or (initial_state is not None and not initial_state.is_cuda)
        or (cu_seqlens is not None and not cu_seqlens.is_cuda)
        or plain.addresses(q, k, v, log2_gamma, initial_state) is None
    ):
        checks.check_places(q=q, k=k, v=v, initial_state=initial_state, cu_seqlens=cu_seqlens)
        plain.refuse_tangents(q, k, v, log2_gamma, initial_state, op="retention")
        policy = "" if device_type is None else plain.policy_name(device_type)
        if inplace_state:
            o = IN_PLACE_OP(*inputs, policy, *packing)
            return o, initial_state if output_final_state else None
        o, final = FORWARD_OP(*inputs, policy, output_final_state, *packing)
        return o, final if output_final_state else None
    name = "" if device_type is None else naming.policy_name(device_type)
    if inplace_state:
        o, _ = retention_plan.retention_forward(
            Forward(*inputs, name, False, *packing), in_place=True
        )
        if not initial_state.is_inference():
            torch.autograd.graph.increment_version(initial_state)
        return o, initial_state if output_final_state else None
    call = Forward(*inputs, name, output_final_state, *packing)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (log2_gamma is not None and log2_gamma.requires_grad)
        or (initial_state is not None and initial_state.requires_grad)
    ):
        pair = apply_retention(*call)
        return pair if output_final_state else (pair, None)
    return retention_plan.retention_forward(call)
