"""``retention_func``: retention with a decay per head, in every form, from and to a state."""

from __future__ import annotations

from typing import Any

import torch

from ...arch import Policy, naming
from ...core.problem import FORMS, Form
from ..shared import checks, gammas, interop, plain
from . import checks as retention_checks
from . import plan as retention_plan
from .autograd import RetentionFunction
from .torch_op import FORWARD_OP, IN_PLACE_OP


def retention_func(
    q: Any,
    k: Any,
    v: Any,
    gamma: Any = None,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    form: Form = "auto",
    initial_state: Any = None,
    output_final_state: bool = True,
    inplace_state: bool = False,
) -> tuple[Any, Any]:
    """Retention with decay by the fastest kernel known for this problem, and the state that it leaves.

    ``S_t = gamma S_{t-1} + k_t^T v_t`` and ``o_t = q_t S_t / sqrt(dim_qk)``, from ``S_{-1} = initial_state``;
    states are not scaled. Kernels are chosen, built and launched as :func:`flash_attn_func`'s are, and tensors on the
    CPU are served by the PyTorch reference. With one token and its state in place a call may be captured in a CUDA
    graph and replayed.

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
        form: ``"parallel"``, ``"chunkwise"`` or ``"recurrent"``: what kind of kernel must compute it; ``"auto"`` for
            whichever is the fastest known.
        initial_state: ``[batch, heads_q, dim_qk, dim_v]`` in fp32, any strides; None for zeros.
        output_final_state: whether the state is returned.
        inplace_state: whether the final state overwrites the initial one, which must be contiguous, and is what is
            returned. Without gradients.

    Returns:
        o ``[batch, heads_q, seqlen, dim_v]`` in q's dtype, with q's order of dimensions in memory, dense, and the final
        state or None; arrays of q's own library if q is not a tensor. Empty batch or heads give empty results.

    Raises:
        UnsupportedProblemError: an argument is outside what the kernels support; the message names it.
        UnsupportedArchitectureError: ``device_type`` is unknown, or its kernels cannot run on the GPU of q.
        NotWarmError: a CUDA graph is being captured and the kernel, or the decays, are not ready.
        ToolchainError, BuildError: the kernel had to be built and could not be.
    """
    # What is plainly right needs no call of the check that knows what is wrong.
    if (
        form not in FORMS
        or type(output_final_state) is not bool  # type: ignore[redundant-expr]  # untyped callers
        or type(inplace_state) is not bool
    ):
        retention_checks.check_types(form, output_final_state, inplace_state)
    if not (
        isinstance(q, torch.Tensor)
        and isinstance(k, torch.Tensor)
        and isinstance(v, torch.Tensor)
        and (initial_state is None or isinstance(initial_state, torch.Tensor))
    ):
        return _of_arrays(
            q,
            k,
            v,
            gamma,
            device_type,
            form=form,
            initial_state=initial_state,
            output_final_state=output_final_state,
            inplace_state=inplace_state,
        )
    log2_gamma, numbers = (None, None) if gamma is None else gammas.read(gamma, q)
    if inplace_state:
        retention_checks.refuse_gradients(q, k, v, log2_gamma, initial_state)
        initial_state = retention_checks.check_in_place(initial_state)
    if (
        torch.compiler.is_compiling()
        or not (q.is_cuda and k.is_cuda and v.is_cuda)
        or (initial_state is not None and not initial_state.is_cuda)
        or plain.addresses(q, k, v, log2_gamma, initial_state) is None
    ):
        return _through_dispatcher(
            (q, k, v, log2_gamma, initial_state),
            numbers,
            device_type,
            form,
            output_final_state,
            inplace_state,
        )
    name = "" if device_type is None else naming.policy_name(device_type)
    if inplace_state:
        o, _ = retention_plan.retention_forward(
            q, k, v, (log2_gamma, numbers), initial_state, form, name, False, in_place=True
        )
        if not initial_state.is_inference():
            torch.autograd.graph.increment_version(initial_state)
        return o, initial_state if output_final_state else None
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (log2_gamma is not None and log2_gamma.requires_grad)
        or (initial_state is not None and initial_state.requires_grad)
    ):
        found = RetentionFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
            q, k, v, log2_gamma, numbers, initial_state, form, name, output_final_state
        )
        return found if output_final_state else (found, None)
    return retention_plan.retention_forward(
        q, k, v, (log2_gamma, numbers), initial_state, form, name, output_final_state
    )


def _of_arrays(
    q: Any,
    k: Any,
    v: Any,
    gamma: Any,
    device_type: str | Policy | type[Policy] | None,
    *,
    initial_state: Any,
    **options: Any,
) -> tuple[Any, Any]:
    """The same for arrays of another library."""
    given = {"q": q, "k": k, "v": v}
    if initial_state is not None:
        given["initial_state"] = initial_state
    tensors, give_back = interop.all_to_torch(**given)
    o, state = retention_func(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        gamma,
        device_type,
        initial_state=tensors.get("initial_state"),
        **options,
    )
    if options["inplace_state"] and state is not None:
        return give_back(o), initial_state
    return give_back(o), None if state is None else give_back(state)


def _through_dispatcher(
    tensors: tuple[torch.Tensor | None, ...],
    gamma: gammas.Floats | None,
    device_type: str | Policy | type[Policy] | None,
    form: Form,
    output_final_state: bool,
    inplace_state: bool,
) -> tuple[Any, Any]:
    q, k, v, log2_gamma, state = tensors
    checks.check_places(q=q, k=k, v=v, initial_state=state)
    plain.refuse_tangents(*tensors, op="retention")
    policy = "" if device_type is None else plain.policy_name(device_type)
    if inplace_state:
        o = IN_PLACE_OP(q, k, v, log2_gamma, gamma, state, form, policy)
        return o, state if output_final_state else None
    o, final = FORWARD_OP(q, k, v, log2_gamma, gamma, state, form, policy, output_final_state)
    return o, final if output_final_state else None
