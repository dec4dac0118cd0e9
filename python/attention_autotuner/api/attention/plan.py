"""Launch plans of attention, forward and backward: decided once per kind of call, then only replayed.

Outputs and gradients are dense, each with the order of dimensions of the tensor that it belongs to. Q, K and V are read
where they lie; what autograd hands over beside them is copied where a kernel could not read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch

from ... import settings
from ...core.modifications import SPANNED
from ...core.problem import bucket_seqlen
from ...operations.attention.modified import CU_SEQLENS, Modifiers
from ...serving import dispatch
from ..shared import checks, launch, planning
from ..shared.replay import Replays, key_of
from ..shared.torch_library import REFERENCES
from . import checks as attention_checks
from .checks import Options
from .views import View, as_kernels_take

Outputs = tuple[torch.Tensor, "torch.Tensor | None"]
Gradients = tuple[torch.Tensor, ...]  # of q, k and v, of sinks, of a bias table and of a mask
Caller = Literal["eager", "graph"]  # the same tensors may look different to torch in each

AnyPlan = launch.Plan | launch.ReferencePlan

NONE: Mapping[str, Any] = MappingProxyType({})

FORWARD_PLANS = launch.table_of_plans("attention", "forward")
BACKWARD_PLANS = launch.table_of_plans("attention", "backward")
FORWARD_REPLAYS = Replays("attention", "forward")
BACKWARD_REPLAYS = Replays("attention", "backward")


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    return_lse: bool,
    seqlens_k: torch.Tensor | None = None,
    starts_k: torch.Tensor | None = None,
    modifiers: Modifiers | None = None,
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
        modifiers: what bends the scores, checked; nothing where None.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    bounds = {}
    if seqlens_k is not None or starts_k is not None:
        bounds = {"seqlens_k": seqlens_k, "starts_k": starts_k}
    plan = forward_plan(q, k, v, options, return_lse, bounds, modifiers)
    results = plan.run(q, k, v, *bounds.values(), *_values_of(modifiers).values())
    return results[0], results[1] if return_lse else None


def replayed_plan(
    caller: Caller,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    return_lse: bool,
    view: View | None = None,
) -> AnyPlan | None:
    """The forward plan of a call whose tensors need no dispatcher, as an earlier one like it had; None of others."""
    asked = (caller, q.shape, k.shape, q.requires_grad, options, return_lse, view is None)
    plan: AnyPlan | None = FORWARD_REPLAYS.find(asked, q, k, v)
    if plan is None and FORWARD_REPLAYS.takes(q, k, v):
        key = key_of(asked, q)
        of_q, of_k, of_v = as_kernels_take(view, q, k, v)
        plan = forward_plan(of_q, of_k, of_v, options, return_lse)
        if view is not None and not plan.reads_in_place:
            return None
        FORWARD_REPLAYS.remember(key, plan, q, k, v)
    return plan


def forward_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    return_lse: bool,
    bounds: Mapping[str, torch.Tensor | None] = NONE,
    modifiers: Modifiers | None = None,
) -> AnyPlan:
    """The forward plan of a call, as :func:`attention_forward` has it, with the bounds by name."""
    key = (
        launch.signature_of_three(q, k, v),
        *map(launch.signature, bounds.values()),
        *_signature(modifiers),
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
        inputs = {"q": q, "k": k, "v": v, **bounds, **_values_of(modifiers)}
        # Plans outlive their call, whose tensors they are not to hold.
        names, numbers = tuple(inputs), modifiers and modifiers.without_tensors

        def by_reference(*tensors: torch.Tensor | None) -> Sequence[torch.Tensor]:
            named = dict(zip(names, tensors, strict=True))
            call = (*tensors[:3], *options)
            limits = (named.get("seqlens_k"), named.get("starts_k"))
            results: Sequence[torch.Tensor]
            if numbers is None:
                results = REFERENCES["attention_forward"](*call, return_lse, False, *limits)
            else:
                bent, packed = _arguments_of(numbers, named)
                reference = REFERENCES["attention_modified_forward"]
                results = reference(*call, False, *bent, *limits, *packed)
            return results

        plan = _plan_of(
            options, inputs, outputs, by_reference, (), modifiers, key_bounds=bool(bounds)
        )
        FORWARD_PLANS.remember(key, plan)
    return plan


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
    modifiers: Modifiers | None = None,
    *,
    bias_gradient: bool = False,
) -> Gradients:
    """Gradients of q, k and v through a kernel, and of sinks where there are any, then of a bias table and a mask.

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
        modifiers: what bends the scores, checked, and whether the gradient of a mask is wanted; nothing where None.
        bias_gradient: that of the bias table is wanted.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
        torch.OutOfMemoryError: there is no room for the gradients or the workspace.
    """
    if grad_o is None:
        checks.check_some_gradient("lse", grad_lse)
        grad_o = o.new_zeros(o.shape[-1:]).expand(o.shape)
    tensors = (grad_o, grad_lse, q, k, v, o, lse)
    plan = backward_plan(tensors, options, deterministic, modifiers, bias_gradient)
    values = _values_of(modifiers).values()
    return tuple(plan.run(q, k, v, o, grad_o, lse, grad_lse, *values))


def plain_backward(
    tensors: Sequence[torch.Tensor],
    options: Options,
    deterministic: bool,
    view: View | None = None,
) -> Gradients:
    """Gradients as :func:`attention_backward` has them, of tensors that need no dispatcher and without one of LSE.

    ``view`` is how all but LSE stand; the gradients stand as kernels have them.
    """
    gradients = replayed_backward("eager", tensors, options, deterministic, view)
    assert gradients is not None
    return gradients


def replayed_backward(
    caller: Caller,
    tensors: Sequence[torch.Tensor],
    options: Options,
    deterministic: bool,
    view: View | None = None,
) -> Gradients | None:
    """Gradients of q, k and v; None where a call in a compiled graph has tensors that need the dispatcher.

    Args:
        caller: where the call stands.
        tensors: the gradient of O, q, k, v, O and LSE.
        options: as :func:`attention_backward` takes them, as is deterministic.
        deterministic: see options.
        view: as :func:`plain_backward` takes it.
    """
    grad_o, q, k, v, o, lse = tensors
    asked = (caller, q.shape, k.shape, q.requires_grad, options, deterministic, view is None)
    plan: AnyPlan | None = BACKWARD_REPLAYS.find(asked, *tensors)
    if plan is None:
        if caller == "graph" and not BACKWARD_REPLAYS.takes(*tensors):
            return None
        key = key_of(asked, grad_o)
        of_o, *four = as_kernels_take(view, grad_o, q, k, v, o)
        plan = backward_plan((of_o, None, *four, lse), options, deterministic)
        if view is None or plan.reads_in_place:
            BACKWARD_REPLAYS.remember(key, plan, *tensors)
        return tuple(plan.run(*four, of_o, lse, None))
    return tuple(plan.run(q, k, v, o, grad_o, lse, None))


def backward_plan(
    tensors: Sequence[Any],
    options: Options,
    deterministic: bool,
    modifiers: Modifiers | None = None,
    bias_gradient: bool = False,
) -> AnyPlan:
    """The backward plan of a call: of the gradients of O and LSE, q, k, v, O and LSE, as :func:`attention_backward`."""
    grad_o, grad_lse, q, k, v, o, lse = tensors
    key = (
        launch.signature_of_three(q, k, v),
        launch.signature(o),
        launch.signature(lse),
        launch.signature(grad_o),
        launch.signature(grad_lse),
        *_signature(modifiers),
        options,
        deterministic,
        bias_gradient,
        dispatch.generation(),
        id(settings.current()),
    )
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        checks.check_tensors(q, k, v)
        attention_checks.check_gradients(grad_o, grad_lse, q, v, o, lse)
        values = _values_of(modifiers)
        others = {"o": o, "dout": grad_o, "lse": lse, "dlse": grad_lse}
        inputs = {"q": q, "k": k, "v": v, **others, **values}
        outputs, copies = launch.gradients(dq=q, dk=k, dv=v), launch.unreadable(**others)
        if "sinks" in values:
            outputs.append(launch.contiguous("dsinks", q.shape[1:2], torch.float32))
        if bias_gradient:
            shape = values["bias_table"].shape
            outputs.append(launch.contiguous("dbias_table", shape, torch.float32))
        of_mask = None if modifiers is None else modifiers.mask_gradient
        if of_mask is not None:
            outputs.append(launch.contiguous("dattn_mask", of_mask, values["attn_mask"].dtype))
        backward = {"direction": "backward", "deterministic": deterministic}
        names, numbers = tuple(inputs), modifiers and modifiers.without_tensors

        def by_reference(*tensors: torch.Tensor | None) -> Gradients:
            named = dict(zip(names, tensors, strict=True))
            order = ("dout", "dlse", "q", "k", "v", "o", "lse")
            call = (*map(named.get, order), *options, deterministic)
            results: Gradients
            if numbers is None:
                results = REFERENCES["attention_backward"](*call)
            else:
                mask = named.get("attn_mask")
                if mask is not None and of_mask is not None:
                    # As it was before it was broadcast.
                    named["attn_mask"] = mask[tuple(map(slice, of_mask))]
                bent, (*packed, prefixes, ids) = _arguments_of(numbers, named)
                reference = REFERENCES["attention_modified_backward"]
                wanted = (bias_gradient, prefixes, ids, of_mask is not None)
                results = reference(*call, *bent, *packed, *wanted)
                results = tuple(x for x in results if x.numel())  # the others are not wanted
            return results

        plan = _plan_of(options, inputs, outputs, by_reference, copies, modifiers, **backward)
        BACKWARD_PLANS.remember(key, plan)
    return plan


def _plan_of(
    options: Options,
    inputs: Mapping[str, Any],
    outputs: Sequence[launch.Layout],
    reference: Callable[..., Sequence[torch.Tensor]],
    copies: Sequence[str] = (),
    modifiers: Modifiers | None = None,
    **named: Any,
) -> AnyPlan:
    q, k, v = (inputs[name] for name in "qkv")
    softmax_scale, device_type = options[0], options[3]
    checks.check_scale(softmax_scale, attention_checks.SCALE)
    scalars: dict[str, Any] = {}
    if modifiers is not None:
        named |= {"modifications": modifiers.names, "window_size": modifiers.window_size}
        scalars = modifiers.scalars
        ends = modifiers.cu_seqlens_q
        if ends is not None:
            lengths = zip(_greatest(modifiers), (q.shape[2], k.shape[2]), strict=True)
            longest = [max(min(length, rows), 1) for length, rows in lengths]
            named |= {"batch": len(ends) - 1, "seqlen_q": longest[0], "seqlen_k": longest[1]}
            named |= {"packed_rows": (q.shape[2], k.shape[2])}
    return planning.plan_of(
        attention_checks.make_problem(q, k, v, options, **named),
        device_type,
        softmax_scale,
        inputs=inputs,
        outputs=outputs,
        reference=reference,
        copies=copies,
        **scalars,
    )


def _values_of(modifiers: Modifiers | None) -> Mapping[str, torch.Tensor]:
    """The tensors of score modifications, by name."""
    return NONE if modifiers is None else modifiers.tensors


def _arguments_of(
    modifiers: Modifiers, named: Mapping[str, torch.Tensor | None]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Score modifications as the ops of the references take them, and what follows, both with the tensors of a call."""
    bent = map(named.get, ("alibi_slopes", "attn_mask", "sinks"))
    last = (named.get("bias_table"), *map(named.get, SPANNED))
    packed = (*map(named.get, CU_SEQLENS), *modifiers.max_seqlens, *last)
    return (*modifiers.window_size, modifiers.softcap, *bent), packed


def _greatest(modifiers: Modifiers) -> tuple[int, ...]:
    """The greatest lengths as far as a choice of kernels depends on them, so that few plans serve many batches."""
    return tuple(map(bucket_seqlen, modifiers.max_seqlens))


def _signature(modifiers: Modifiers | None) -> tuple[Any, ...]:
    """All that a plan depends on of score modifications."""
    if modifiers is None:
        return ()
    tensors = (launch.signature(x) for x in modifiers.tensors.values())
    return (
        modifiers.names,
        modifiers.window_size,
        modifiers.softcap,
        _greatest(modifiers),
        modifiers.mask_gradient,
        *tensors,
    )
