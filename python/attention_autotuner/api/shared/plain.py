"""Tensors that need no dispatcher: whose ops would do no more than call our kernel, so that it can be left out.

It would cost an attention call 10 us without grad and 16 us with it (benchmarks/host_overhead.py on an H200: 25.0 and
41.3 us through it, 14.9 and 25.1 beside it).

Torch computes the gradients of GPU tensors in threads of its own, where no override of the settings is in force; so the
settings of a forward call are kept for them. Code that torch compiled calls the ops itself: its gradients are decided
under the process's settings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ... import settings
from ...arch import Policy, naming
from ...core.memo import remembered
from ...errors import UnsupportedProblemError
from ...serving import pinning
from ...serving.pinning import Config

_log = logging.getLogger(__name__)

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

_SIMPLE = frozenset((*PLAIN_TYPES, type(None), bool, int, float, str, tuple))

Gradient = torch.Tensor | None

_UNCHANGED = nullcontext()


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without torch's layer of Python, which a call of plain tensors has no need of.

    That layer looks for functorch's transforms, which :func:`addresses` rules out, and for default arguments.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def of_arguments(arguments: type[Any], *gradients: Gradient) -> tuple[Gradient, ...]:
    """Gradients of an op's first arguments, and None for the others; ``arguments`` is its ``NamedTuple``."""
    return (*gradients, *(None,) * (len(arguments._fields) - len(gradients)))


@remembered("notices.plain")
def notice(message: str) -> None:
    """Log a message once a process."""
    _log.warning(message)


def is_watched() -> bool:
    """Return True where torch lets something else see calls: modes, functorch's transforms, tracing, dual numbers."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and not _is_default_device())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )


def _is_default_device() -> bool:
    """Return True where the only mode of functions is that of ``torch.device`` and ``torch.set_default_device``.

    It gives a device to constructors that name none, which no call of ours makes.
    """
    only = torch._C._len_torch_function_stack() == 1
    return only and type(torch._C._get_function_stack_at(0)) is DeviceContext


def may_leave_default_device(arguments: Iterable[Any]) -> bool:
    """Return True where torch's default device is all that sees a call, and no argument is a subclass of a tensor.

    Its mode hears of every method of a tensor, which takes as long as the rest of a warm call. As no call of ours makes
    a tensor that names no device, it may be off meanwhile.
    """
    return _is_default_device() and _SIMPLE.issuperset(map(type, arguments))


def without_default_device(
    function: Callable[..., Any], *, others: dict[str, Any], **arguments: Any
) -> Any:
    """Call a function while torch's default device is off; NotImplemented where it may not be left.

    Args:
        function: to call.
        others: keyword arguments that it does not name.
        arguments: all others by name.
    """
    if not may_leave_default_device((*arguments.values(), *others.values())):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        return function(**arguments, **others)


def is_plain(x: Any) -> bool:
    """Return True for a tensor that is no subclass, where nothing sees the call."""
    return type(x) in PLAIN_TYPES and not is_watched()


def addresses(*tensors: Any) -> list[int] | None:
    """Where tensors lie, if the dispatcher would do no more with them than call our kernel; None is passed over.

    None for anything unusual: arrays, subclasses, fake tensors, what :func:`is_watched` says, and tensors whose values
    are not what lies in strided memory. Asking for their dispatch keys would say the same of those at three times the
    price.
    """
    if is_watched():
        return None
    result = []
    try:
        for x in tensors:
            if x is None:
                continue
            if type(x) not in PLAIN_TYPES or x.is_neg() or x.is_nested:
                return None
            address = x.data_ptr()
            if not address:
                return None  # tensors known to be zero, functional wrappers and empty tensors lie nowhere
            result.append(address)
    except RuntimeError:
        return None  # sparse, or a wrapper that a finished transform left behind
    return result


def are_plain(*tensors: Gradient) -> bool:
    """Return True where the dispatcher would do no more with tensors of autograd than call our kernel."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    try:
        for x in tensors:
            if x is not None and (type(x) not in PLAIN_TYPES or x.is_neg() or not x.data_ptr()):
                return False  # empty tensors and those known to be zero lie nowhere
    except RuntimeError:
        return False  # sparse, or a batch of gradients
    return True


def refuse_tangents(*tensors: Gradient, op: str) -> None:
    """Refuse tensors with a tangent, which would be dropped without a word: there is no formula for it here.

    Raises:
        UnsupportedProblemError: one has a tangent.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is None:
            continue
        tangent = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]  # torch's own
        if tangent is not None:
            refuse_tangent(op)


def refuse_tangent(op: str) -> NoReturn:
    """Refuse forward-mode differentiation of an operation.

    Raises:
        UnsupportedProblemError: always.
    """
    raise UnsupportedProblemError(
        f"{op} has no forward-mode derivative: differentiate in reverse mode"
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's own
def policy_name(device_type: str | Policy | type[Policy]) -> str:
    """The name under which a policy enters a graph."""
    return naming.policy_name(device_type)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's own
def pinned_name(
    device_type: str | Policy | type[Policy] | None, config: Config | Sequence[Config]
) -> str:
    """The name under which a policy with pinned candidates enters a graph."""
    return pinning.pinned_name(device_type, config)


def settings_of(holder: Any) -> AbstractContextManager[None]:
    """Inside it the settings of the forward call, kept as ``holder.settings``, are in force."""
    if torch.compiler.is_compiling() or settings.current() is holder.settings:
        return _UNCHANGED
    return settings.adopted(holder.settings)
