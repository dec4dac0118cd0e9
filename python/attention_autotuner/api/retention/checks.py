"""Argument checks of ``retention_func`` beyond attention's own, and the problem that its tensors name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core.operation import require
from ...core.problem import FORMS, Form, Problem, bucket_seqlen
from ...errors import UnsupportedProblemError
from ...operations.retention.problem import PACKED_FORMS
from ..shared import checks, gammas, options

MIN_SCALE = torch.finfo(torch.float32).tiny


class Forward(NamedTuple):
    """Arguments of the forward op."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log2_gamma: torch.Tensor | None
    gamma: tuple[float, ...] | None
    initial_state: torch.Tensor | None
    scale: float | None
    form: Form
    device_type: str
    return_state: bool
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: torch.SymInt | None = None


class InPlace(NamedTuple):
    """Arguments of the forward op that overwrites the state with the final one."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log2_gamma: torch.Tensor | None
    gamma: tuple[float, ...] | None
    state: torch.Tensor
    scale: float | None
    form: Form
    device_type: str
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: torch.SymInt | None = None

    @property
    def forward(self) -> Forward:
        """The same call without a state in memory of its own."""
        return Forward(*self[:9], False, *self[9:])


class Backward(NamedTuple):
    """Arguments of the backward op."""

    grad_o: torch.Tensor | None
    grad_state: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log2_gamma: torch.Tensor | None
    gamma: tuple[float, ...] | None
    initial_state: torch.Tensor | None
    scale: float | None
    device_type: str
    need_state: bool
    need_gamma: bool
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: torch.SymInt | None = None


def check_types(
    scale: object, form: object, output_final_state: object, inplace_state: object
) -> float | None:
    """Check the arguments that are no tensors.

    Returns:
        The scale as a float, or None.

    Raises:
        UnsupportedProblemError: one is outside its range.
    """
    check_form(form)
    checks.check_flags(output_final_state=output_final_state, inplace_state=inplace_state)
    number = None if scale is None else options.as_float("scale", scale, " or None")
    check_scale(number)
    return number


def check_scale(scale: float | None) -> None:
    """Check a scale; kernels divide by it.

    Raises:
        UnsupportedProblemError: it is not above 0, or not finite in fp32.
    """
    # A plain `if`, as torch.compile cannot put a symbolic float into a message.
    if scale is not None and not MIN_SCALE <= scale <= checks.MAX_SCALE:
        raise UnsupportedProblemError(f"scale must be positive and finite in fp32, got {scale}")


def check_form(form: object) -> None:
    """Check a form.

    Raises:
        UnsupportedProblemError: there is no such form.
    """
    require(
        isinstance(form, str) and form in FORMS,
        f"form must be one of {FORMS}, got {checks.shown(form)}",
    )


def check_call(call: Forward | Backward) -> None:
    """Check everything that a call computes with; batch, heads and sequences may be empty.

    Raises:
        UnsupportedProblemError: it names no retention that can be computed here.
    """
    q, k, v = call.q, call.k, call.v
    if isinstance(call, Forward):
        check_form(call.form)
    check_scale(call.scale)
    for name, x in (("q", q), ("k", k)):
        checks.check_dims(name, x)
    require(
        q.shape[2] == k.shape[2],
        f"retention takes as many queries as keys, got {q.shape[2]} and {k.shape[2]}",
    )
    checks.check_tensors(q, k, v, op="retention", causal=True)
    gammas.check_log2(call.log2_gamma, q)
    gammas.check(call.gamma, q.shape[1])
    check_packing(call)
    if call.initial_state is not None:
        check_state("initial_state", call.initial_state, call)


def check_packing(call: Forward | Backward) -> None:
    """Check where packed sequences end, if there are any, against checked tensors; values are not looked at.

    Raises:
        UnsupportedProblemError: they are no contiguous int32 ``[sequences + 1]`` on q's device, the tensors have
            several batch entries, the greatest length is no length, or the form is not one of chunks.
    """
    q, ends, longest = call.q, call.cu_seqlens, call.max_seqlen
    if ends is None:
        require(longest is None, f"max_seqlen is for cu_seqlens, got max_seqlen={longest}")
        return
    require(
        q.shape[0] == 1, f"packed sequences must be one batch entry, got a batch of {q.shape[0]}"
    )
    checks.check_layout("cu_seqlens", ends)
    require(
        ends.dim() == 1 and len(ends) >= 2,
        f"cu_seqlens must be [sequences + 1] with at least one sequence, got {checks.shown(ends)}",
    )
    checks.check_like("cu_seqlens", ends, ends.shape, torch.int32, q.device)
    require(ends.is_contiguous(), f"cu_seqlens must be contiguous, got a stride of {ends.stride()}")
    checks.check_longest("max_seqlen", longest, optional=True)
    form = call.form if isinstance(call, Forward) else "auto"
    require(
        form in PACKED_FORMS,
        f"form of packed sequences must be one of {PACKED_FORMS}, got {form!r}",
    )


def check_state(name: str, state: torch.Tensor, call: Forward | Backward) -> None:
    """Check a state or its gradient against a call's checked q, v and sequences; strides are free.

    Raises:
        UnsupportedProblemError: shape, dtype or device is another.
    """
    checks.check_layout(name, state)
    shape = state_shape(call)
    batch = "batch" if call.cu_seqlens is None else "sequences"
    require(
        tuple(state.shape) == shape,
        f"{name} must be [{batch}, heads_q, dim_qk, dim_v] = {list(shape)}, got {list(state.shape)}",
    )
    checks.check_like(name, state, shape, torch.float32, call.q.device)


def check_in_place(state: torch.Tensor | None) -> torch.Tensor:
    """Return a state after checking that it is there and can be overwritten.

    Raises:
        UnsupportedProblemError: there is none, or kernels cannot write it there.
    """
    if state is None:
        raise UnsupportedProblemError("inplace_state=True needs an initial_state, got None")
    if not state.is_contiguous():
        raise UnsupportedProblemError(
            f"initial_state must be contiguous to be updated in place, got strides {state.stride()}"
        )
    return state


def check_address(state: torch.Tensor) -> None:
    """Check that kernels can write a state where it lies; fake tensors lie nowhere.

    Raises:
        UnsupportedProblemError: it begins between 16 bytes.
    """
    rest = state.data_ptr() % checks.VECTOR_BYTES
    require(
        rest == 0,
        f"initial_state must begin at a multiple of 16 bytes to be updated in place, got {rest} bytes more",
    )


def is_readable_state(state: torch.Tensor) -> bool:
    """Return True where kernels can read and write a state as it lies."""
    return state.is_contiguous() and state.data_ptr() % checks.VECTOR_BYTES == 0


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Refuse to overwrite a state that a gradient would need.

    Raises:
        UnsupportedProblemError: gradients are being recorded, and a tensor requires one.
    """
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    require(
        not recorded,
        "inplace_state=True has no gradient, got a tensor with requires_grad=True: call it under torch.no_grad()",
    )


def state_shape(call: Forward | Backward) -> tuple[int, int, int, int]:
    """``[batch, heads_q, dim_qk, dim_v]``, with an entry for each sequence where they are packed."""
    q, ends = call.q, call.cu_seqlens
    batch = q.shape[0] if ends is None else ends.shape[0] - 1
    return (batch, q.shape[1], q.shape[3], call.v.shape[3])


def longest_of(call: Forward | Backward) -> int:
    """The greatest length of packed sequences as far as a choice of kernels depends on it: few plans serve many."""
    rows = call.q.shape[2]
    longest: Any = call.max_seqlen
    return max(1, rows if longest is None else min(bucket_seqlen(longest), rows))


def check_gradients(call: Backward) -> None:
    """Check the gradients that the backward starts from; strides are free.

    Raises:
        UnsupportedProblemError: one is no gradient of what the forward returned.
    """
    checks.check_some_gradient("the final state", call.grad_o, call.grad_state)
    checks.check_results({"the gradient of o": call.grad_o}, call.q, call.v)
    if call.grad_state is not None:
        check_state("the gradient of the final state", call.grad_state, call)


def make_problem(call: Forward | Backward, **of_direction: Any) -> Problem | None:
    """The problem of a checked call, None of an empty one; all kernels of its gradients give equal bits each time."""
    if checks.is_empty(call.q, call.k):
        return None
    sizes = checks.sizes(call.q, call.k, call.v)
    if call.cu_seqlens is not None:
        rows, longest = call.q.shape[2], longest_of(call)
        sizes |= {"seqlen_q": longest, "seqlen_k": longest, "packed_rows": (rows, rows)}
        sizes["batch"] = state_shape(call)[0]
    return Problem(
        op="retention",
        causal=True,
        alignment_bytes=checks.alignment_bytes(call.q, call.k, call.v),
        **sizes,
        **of_direction,
    )
