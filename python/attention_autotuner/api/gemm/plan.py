"""The ``torch.library`` op of gemm, its launch plans and its derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import settings
from ...core.operation import require
from ...core.problem import DIM_MULTIPLE, Problem
from ...operations.gemm.problem import of_sizes
from ...operations.shared.blocks import full_precision
from ...serving import dispatch
from ..shared import checks, launch, planning
from ..shared.plain import Gradient, settings_of
from ..shared.torch_library import define, differentiate_by

PLANS = launch.table_of_plans("gemm", "forward")


class Call(NamedTuple):
    """The op's arguments."""

    a: torch.Tensor
    b: torch.Tensor
    device_type: str


def lies(name: str, x: torch.Tensor) -> str:
    """``n`` where a matrix lies by rows, ``t`` where it lies by columns.

    Raises:
        UnsupportedProblemError: neither, or its rows or columns cannot be read 16 bytes at a time.
    """
    if x.stride(1) == 1 and checks.is_aligned(x):
        return "n"
    require(
        x.stride(0) == 1 and checks.is_aligned(x.T),
        f"{name} must lie by rows or by columns that start at multiples of 16 bytes, got strides "
        f"{tuple(x.stride())}",
    )
    return "t"


def check_call(call: Call) -> None:
    """Check a call's tensors; sizes may be 0.

    Raises:
        UnsupportedProblemError: they name nothing that can be computed here.
    """
    a, b = call.a, call.b
    for name, x in (("a", a), ("b", b)):
        checks.check_layout(name, x)
        require(x.dim() == 2, f"{name} must have 2 dimensions, got {x.dim()}")
        require(
            x.dtype in checks.DTYPE_NAMES,
            f"{name} must be one of {tuple(checks.DTYPE_NAMES)}, got {x.dtype}",
        )
    require(
        a.shape[1] == b.shape[0],
        f"a must have as many columns as b has rows, got {list(a.shape)} and {list(b.shape)}",
    )
    for what in ("dtype", "device"):
        of_a, of_b = getattr(a, what), getattr(b, what)
        require(of_a == of_b, f"b must be of a's {what} {of_a}, got {of_b}")


def product(call: Call) -> torch.Tensor:
    """A product through a kernel, of tensors on a GPU.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    a, b, device_type = call
    key = (
        launch.signature(a),
        launch.signature(b),
        device_type,
        dispatch.generation(),
        id(settings.current()),
    )
    plan = PLANS.get(key)
    if plan is None:
        plan = _plan(call)
        PLANS.remember(key, plan)
    return plan.run(a, b)[0].view(a.shape[0], b.shape[1])


def problem_of(call: Call) -> Problem | None:
    """The problem of a call, None of one with a size of 0.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
    """
    check_call(call)
    a, b, _ = call
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, k, n):
        return None
    operands: Any = lies("a", a) + lies("b", b)
    for name, size in (("k", k), ("n", n)):  # as a caller knows them
        require(
            size % DIM_MULTIPLE == 0,
            f"{name} must be a positive multiple of {DIM_MULTIPLE}, got {size}",
        )
    return of_sizes(m, n, k, dtype=checks.DTYPE_NAMES[a.dtype], operands=operands)


def _plan(call: Call) -> launch.Plan | launch.ReferencePlan:
    problem = problem_of(call)
    a, b, device_type = call
    m, n = a.shape[0], b.shape[1]
    views = {"a": a[None, None], "b": b[None, None]}
    if problem is not None:
        pairs = zip(views.items(), problem.operands, strict=True)
        views = {name: x if side == "n" else x.mT for (name, x), side in pairs}

    def by_reference(*read: torch.Tensor) -> Sequence[torch.Tensor]:
        return [_product(*read)]

    return planning.plan_of(
        problem,
        device_type,
        1.0,
        inputs=views,
        outputs=[launch.contiguous("o", (1, 1, m, n), a.dtype)],
        reference=by_reference,
    )


def _on_cpu(call: Call) -> torch.Tensor:
    problem_of(call)  # what no kernel takes is refused here, too
    return _product(call.a, call.b)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's product, in the dtype of its operands under autocast, too."""
    with full_precision():
        return torch.mm(a, b)


def _fake(call: Call) -> torch.Tensor:
    check_call(call)
    return call.a.new_empty(call.a.shape[0], call.b.shape[1])


OP = define("gemm", Call, product, _on_cpu, _fake, results=1)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what :func:`differentiate` needs of a call."""
    call = Call(*inputs)
    ctx.save_for_backward(call.a, call.b)
    ctx.device_type, ctx.settings = call.device_type, settings.current()


def differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Gradient, Gradient, None]:
    """Gradients of a and b, products themselves; they can be differentiated again."""
    a, b = ctx.saved_tensors
    need_a, need_b, _ = ctx.needs_input_grad
    grad = grad.contiguous()  # one of a sum has strides of 0
    with settings_of(ctx):
        grad_a = OP(grad, b.T, ctx.device_type) if need_a else None
        if not need_b:
            return grad_a, None, None
        # Kernels sum over multiples of 8; of other numbers of rows, torch does.
        whole = a.shape[0] % DIM_MULTIPLE == 0
        return grad_a, OP(a.T, grad, ctx.device_type) if whole else a.T @ grad, None


differentiate_by(OP, differentiate, setup_context=save_for_backward)
