"""Argument checks of ``retention_func`` beyond attention's own, and the problem that its tensors name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core.problem import FORMS, Form, Problem
from ...errors import UnsupportedProblemError
from ..shared import checks, gammas, options
from ..shared.checks import fail_unless

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
    fail_unless(
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
    fail_unless(
        q.shape[2] == k.shape[2],
        f"retention takes as many queries as keys, got {q.shape[2]} and {k.shape[2]}",
    )
    checks.check_tensors(q, k, v, op="retention", causal=True)
    gammas.check_log2(call.log2_gamma, q)
    gammas.check(call.gamma, q.shape[1])
    if call.initial_state is not None:
        check_state("initial_state", call.initial_state, q, v)


def check_state(name: str, state: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> None:
    """Check a state or its gradient against checked q and v; strides are free.

    Raises:
        UnsupportedProblemError: shape, dtype or device is another.
    """
    checks.check_layout(name, state)
    shape = state_shape(q, v)
    fail_unless(
        tuple(state.shape) == shape,
        f"{name} must be [batch, heads_q, dim_qk, dim_v] = {list(shape)}, got {list(state.shape)}",
    )
    checks.check_like(name, state, shape, torch.float32, q.device)


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
    fail_unless(
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
    if not torch.is_grad_enabled():
        return
    for x in tensors:
        if x is not None and x.requires_grad:
            raise UnsupportedProblemError(
                "inplace_state=True has no gradient, got a tensor with requires_grad=True: call it under "
                "torch.no_grad()"
            )


def state_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int, int]:
    """``[batch, heads_q, dim_qk, dim_v]``."""
    return (q.shape[0], q.shape[1], q.shape[3], v.shape[3])


def check_gradients(call: Backward) -> None:
    """Check the gradients that the backward starts from; strides are free.

    Raises:
        UnsupportedProblemError: one is no gradient of what the forward returned.
    """
    checks.check_some_gradient("the final state", call.grad_o, call.grad_state)
    checks.check_results({"the gradient of o": call.grad_o}, call.q, call.v)
    if call.grad_state is not None:
        check_state("the gradient of the final state", call.grad_state, call.q, call.v)


def make_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **of_direction: Any) -> Problem:
    """The problem that checked, non-empty tensors name; all kernels of its gradients give equal bits each time."""
    return Problem(
        op="retention",
        causal=True,
        alignment_bytes=checks.alignment_bytes(q, k, v),
        **checks.sizes(q, k, v),
        **of_direction,
    )
