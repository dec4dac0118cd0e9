"""Argument checks of ``retention_func`` beyond attention's own, and the problem that its tensors name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.problem import FORMS, Form, Problem
from ...errors import UnsupportedProblemError
from ..shared import checks, gammas
from ..shared.checks import fail_unless


def check_types(form: object, output_final_state: object, inplace_state: object) -> None:
    """Check the arguments that are no tensors.

    Raises:
        UnsupportedProblemError: one is outside its range.
    """
    check_form(form)
    for name, value in (
        ("output_final_state", output_final_state),
        ("inplace_state", inplace_state),
    ):
        fail_unless(isinstance(value, bool), f"{name} must be True or False, got {value!r}")


def check_form(form: object) -> None:
    """Check a form.

    Raises:
        UnsupportedProblemError: there is no such form.
    """
    fail_unless(form in FORMS, f"form must be one of {FORMS}, got {form!r}")


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log2_gamma: torch.Tensor | None,
    gamma: Sequence[float] | None,
    initial_state: torch.Tensor | None,
    form: str = "auto",
) -> None:
    """Check everything that a call computes with; empty batch or heads are allowed.

    Raises:
        UnsupportedProblemError: it names no retention that can be computed here.
    """
    check_form(form)
    checks.check_tensors(q, k, v)
    fail_unless(
        q.shape[2] == k.shape[2],
        f"retention takes as many queries as keys, got {q.shape[2]} and {k.shape[2]}",
    )
    gammas.check_log2(log2_gamma, q)
    gammas.check(gamma, q.shape[1])
    if initial_state is not None:
        check_state("initial_state", initial_state, q, v)


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
    fail_unless(state.dtype == torch.float32, f"{name} must be torch.float32, got {state.dtype}")
    fail_unless(
        state.device == q.device, f"{name} must be on q's device {q.device}, got {state.device}"
    )


def check_in_place(state: torch.Tensor | None) -> torch.Tensor:
    """Check that a state is there and can be overwritten; answers it.

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
    """Whether kernels can read and write a state where it lies."""
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


def check_some_gradient(*gradients: torch.Tensor | None) -> None:
    """Check that there is anything to propagate.

    Raises:
        UnsupportedProblemError: every gradient is None.
    """
    fail_unless(
        any(x is not None for x in gradients),
        "the gradient of o or of the final state must be given, got None",
    )


def check_gradients(
    grad_o: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Check what the backward is given beside what the forward was; strides are free.

    Raises:
        UnsupportedProblemError: one is no gradient of what the forward returned.
    """
    check_some_gradient(grad_o, grad_state)
    if grad_o is not None:
        shape = (*q.shape[:3], v.shape[3])
        checks.check_like("the gradient of o", grad_o, shape, q.dtype, q.device)
    if grad_state is not None:
        check_state("the gradient of the final state", grad_state, q, v)


def make_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    form: Form = "auto",
    backward: bool = False,
) -> Problem:
    """The problem that checked, non-empty tensors name; all kernels of its gradients give equal bits each time."""
    return Problem(
        op="retention",
        direction="backward" if backward else "forward",
        causal=True,
        alignment_bytes=checks.alignment_bytes(q, k, v),
        form=form,
        **checks.sizes(q, k, v),
    )
