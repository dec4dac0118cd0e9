"""Launch plans of attention, forward and backward: decided once per kind of call, then only replayed.

Outputs and gradients are dense, each with the order of dimensions of the tensor that it belongs to. Q, K and V are read
where they lie; what autograd hands over beside them is copied where a kernel could not read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ... import settings
from ...serving import dispatch
from ..shared import checks, launch, planning
from ..shared.torch_library import REFERENCES
from . import checks as attention_checks
from .checks import Options

Outputs = tuple[torch.Tensor, "torch.Tensor | None"]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

FORWARD_PLANS = launch.table_of_plans("attention", "forward")
BACKWARD_PLANS = launch.table_of_plans("attention", "backward")


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    return_lse: bool,
    seqlens_k: torch.Tensor | None = None,
    starts_k: torch.Tensor | None = None,
) -> Outputs:
    """Attention forward through a kernel.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]`` on a GPU.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        options: of the softmax, and for which GPU.
        return_lse: whether LSE is wanted.
        seqlens_k: ends of the keys, int32 ``[batch]``, read when the kernel runs; ``seqlen_k`` where None.
        starts_k: first keys, likewise; 0 where None.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    bounds = {}
    if seqlens_k is not None or starts_k is not None:
        bounds = {"seqlens_k": seqlens_k, "starts_k": starts_k}
    key = (
        launch.signature_of_three(q, k, v),
        *map(launch.signature, bounds.values()),
        options,
        return_lse,
        dispatch.generation(),
        id(settings.current()),
    )
    plan = FORWARD_PLANS.get(key)
    if plan is None:
        checks.check_tensors(q, k, v)
        attention_checks.check_bounds(q, **bounds)
        checks.notice_exchanged(q, k)
        outputs = [launch.output(q, v)]
        if return_lse:
            outputs.append(launch.contiguous("lse", q.shape[:3], torch.float32, -math.inf))
        inputs = {"q": q, "k": k, "v": v, **bounds}

        def by_reference(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: torch.Tensor | None
        ) -> Sequence[torch.Tensor]:
            results: Sequence[torch.Tensor] = REFERENCES["attention_forward"](
                q, k, v, *options, return_lse, False, *bounds
            )
            return results

        plan = _plan_of(options, inputs, outputs, by_reference, key_bounds=bool(bounds))
        FORWARD_PLANS.remember(key, plan)
    results = plan.run(q, k, v, *bounds.values())
    return results[0], results[1] if return_lse else None


def attention_backward(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    deterministic: bool,
) -> Gradients:
    """Gradients of q, k and v through a kernel.

    Args:
        grad_o: ``[batch, heads_q, seqlen_q, dim_v]`` in q's dtype, any strides; None for zero.
        grad_lse: ``[batch, heads_q, seqlen_q]`` in fp32, any strides; None for zero.
        q: as the forward took it, on a GPU; k and v likewise.
        k: see q.
        v: see q.
        o: what the forward returned.
        lse: what the forward returned.
        options: see q.
        deterministic: only kernels that give equal bits each time may serve.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
        torch.OutOfMemoryError: there is no room for the gradients or the workspace.
    """
    if grad_o is None:
        checks.check_some_gradient("lse", grad_lse)
        grad_o = o.new_zeros(o.shape[-1:]).expand(o.shape)
    key = (
        launch.signature_of_three(q, k, v),
        launch.signature(o),
        launch.signature(lse),
        launch.signature(grad_o),
        launch.signature(grad_lse),
        options,
        deterministic,
        dispatch.generation(),
        id(settings.current()),
    )
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        checks.check_tensors(q, k, v)
        attention_checks.check_gradients(grad_o, grad_lse, q, v, o, lse)
        others = {"o": o, "dout": grad_o, "lse": lse, "dlse": grad_lse}
        inputs = {"q": q, "k": k, "v": v, **others}
        outputs, copies = launch.gradients(dq=q, dk=k, dv=v), launch.unreadable(**others)
        backward = {"direction": "backward", "deterministic": deterministic}

        def by_reference(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            o: torch.Tensor,
            grad_o: torch.Tensor,
            lse: torch.Tensor,
            grad_lse: torch.Tensor | None,
        ) -> Gradients:
            results: Gradients = REFERENCES["attention_backward"](
                grad_o, grad_lse, q, k, v, o, lse, *options, deterministic
            )
            return results

        plan = _plan_of(options, inputs, outputs, by_reference, copies, **backward)
        BACKWARD_PLANS.remember(key, plan)
    dq, dk, dv = plan.run(q, k, v, o, grad_o, lse, grad_lse)
    return dq, dk, dv


def _plan_of(
    options: Options,
    inputs: Mapping[str, Any],
    outputs: Sequence[launch.Layout],
    reference: Callable[..., Sequence[torch.Tensor]],
    copies: Sequence[str] = (),
    **named: Any,
) -> launch.Plan | launch.ReferencePlan:
    q, k, v, softmax_scale, device_type = (
        inputs["q"],
        inputs["k"],
        inputs["v"],
        options[0],
        options[3],
    )
    scale = float(q.shape[3] ** -0.5) if softmax_scale is None else softmax_scale
    checks.check_scale(scale, attention_checks.SCALE)
    problem = None
    if not checks.is_empty(q, k):
        problem = attention_checks.make_problem(q, k, v, options, **named)
    return planning.plan_of(
        problem,
        device_type,
        scale,
        inputs=inputs,
        outputs=outputs,
        reference=reference,
        copies=copies,
    )
