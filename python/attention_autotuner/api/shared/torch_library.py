"""The ``torch.library`` that the ops of every operation are defined in.

An op's arguments are stated once, as the fields of a ``NamedTuple``: its schema is written from them, and what computes
it takes one. ``Library.define`` and ``impl`` rather than ``custom_op``: a third of its host time a call.

An op with a derivative has a twin that autograd passes over, and which computes it. Compiled graphs hold twins, so that
a call of theirs does not go through Python once more for autograd, nor, where a call like it was seen before, through
the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch

from ... import settings
from ...core.problem import Form
from ...errors import UnsupportedArgumentError
from ...serving import pinning
from .plain import notice, refuse_tangent

NAMESPACE = "attention_autotuner"

# Lives as long as the module: the ops vanish with it.
LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # torch's own

REFERENCES: dict[str, Callable[..., Any]] = {}
"""Op -> the reference of it, of the op's arguments in their order; for tensors on any device."""

_TWIN = "_without_autograd"  # ends the name of an op's twin
_ADD_TWIN: dict[str, Callable[[], Any]] = {}  # op -> adds its twin to the library

_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    tuple[float, ...] | None: "float[]?",
    float: "float",
    float | None: "float?",
    int: "int",
    torch.SymInt: "SymInt",
    torch.SymInt | None: "SymInt?",
    bool: "bool",
    str: "str",
    Form: "str",
}


class _ReplayedOverload(torch._ops.OpOverload[Any, Any]):
    """An overload that looks beside the dispatcher first, unless a profiler records, which is to see the op."""

    replay: Callable[..., Any]

    def __call__(self, /, *fields: Any, **named: Any) -> Any:
        """Compute the op."""
        if not (named or torch._C._autograd._profiler_enabled()):
            results = self.replay(*fields)
            if results is not None:
                return results
        return super().__call__(*fields, **named)


class _TransformedOverload(torch._ops.OpOverload[Any, Any]):
    """An overload that torch.func's transforms differentiate ahead of the dispatcher, which calls its derivative late.

    By then torch lets no function of autograd be applied.
    """

    transformed: Callable[..., Any]

    def __call__(self, /, *fields: Any, **named: Any) -> Any:
        """Compute the op."""
        functorch: Any = torch._C._functorch
        if functorch.peek_interpreter_stack() is not None and not named:
            transforms = {inside.key() for inside in functorch.get_interpreter_stack()}
            if functorch.TransformType.Grad in transforms:
                return self.transformed(*fields)
        return super().__call__(*fields, **named)


def schema_of(
    name: str,
    arguments: type[Any],
    *,
    results: int,
    mutates: str = "",
    with_defaults: bool = True,
) -> str:
    """An op's schema in torch's own notation.

    Args:
        name: of the op.
        arguments: a ``NamedTuple`` whose fields are the op's arguments, in order; a default can only be None.
        results: how many tensors it returns.
        mutates: the argument that it overwrites, if any.
        with_defaults: those of the fields are those of the arguments; else compiled graphs state every argument.

    Raises:
        KeyError: a field has a type that no schema has.
    """
    hints = get_type_hints(arguments)
    fields = []
    for field in arguments._fields:
        kind = _SCHEMA_TYPES[hints[field]]
        default = "=None" if with_defaults and field in arguments._field_defaults else ""
        fields.append(f"{kind}(a!) {field}" if field == mutates else f"{kind} {field}{default}")
    outputs = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return f"{name}({', '.join(fields)}) -> {outputs}"


def define(
    name: str,
    arguments: type[Any],
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    results: int,
    mutates: str = "",
    replay: Callable[..., Any] | None = None,
) -> Any:
    """Add an op to the library.

    Args:
        name: of the op.
        arguments: as :func:`schema_of` takes them, and ``cuda``, ``cpu`` and ``fake`` one of them.
        cuda: computes it on a GPU.
        cpu: computes it on the CPU, and on any other device, by the reference.
        fake: makes outputs of the right shape, layout, dtype and device, and refuses bad arguments.
        results: how many tensors it returns.
        mutates: the argument that it overwrites, if any.
        replay: computes the op's twin beside the dispatcher, of its arguments; None where it cannot.

    Returns:
        The op, to be called.
    """

    def of_fields(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *fields: function(arguments(*fields))

    def on_cpu(*fields: Any) -> Any:
        settings.current()  # wrong ones are refused, and the logger has their level, before anything is done
        call, op = arguments(*fields), name.partition("_")[0]
        if pinning.split(call.device_type)[1]:
            raise UnsupportedArgumentError(
                f"config names a kernel, and the PyTorch reference computes {op} of tensors on the CPU: leave it out"
            )
        notice(f"tensors on the CPU: {op} is computed by the PyTorch reference, not by a kernel")
        return cpu(call)

    def add(name: str, *, with_defaults: bool = True) -> Any:
        schema = schema_of(
            name, arguments, results=results, mutates=mutates, with_defaults=with_defaults
        )
        LIBRARY.define(schema)
        LIBRARY.impl(name, of_fields(cuda), "CUDA")
        LIBRARY.impl(name, on_cpu, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", of_fields(fake), lib=LIBRARY)
        return getattr(torch.ops.attention_autotuner, name).default

    def add_twin() -> Any:
        twin = add(f"{name}{_TWIN}", with_defaults=False)
        if replay is not None:
            twin.__class__, twin.replay = _ReplayedOverload, replay  # torch itself makes overloads
        return twin

    _ADD_TWIN[name] = add_twin
    REFERENCES[name] = of_fields(cpu)
    return add(name)


def differentiate_by(op: Any, formula: Any, *, setup_context: Any) -> None:
    """Give an op a derivative, and its twin.

    Args:
        op: what :func:`define` returned.
        formula: of the context and the results' gradients: those of the arguments.
        setup_context: of the context, the arguments and the results: keeps what the formula needs.
    """
    twin = _ADD_TWIN[op._opname]()
    defaults = [argument.default_value for argument in op._schema.arguments]
    LIBRARY.impl(twin._opname, torch.library.fallthrough_kernel, "Autograd")

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            results = twin(*arguments)
            setup_context(ctx, arguments, results)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return formula(ctx, *gradients)

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return op(*arguments)  # as it is inside the transform

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            refuse_tangent(op._opname.partition("_")[0])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return formula(ctx, *gradients)

    op.__class__ = _TransformedOverload  # torch itself makes overloads
    transformed: Any = Transformed.apply
    op.transformed = lambda *stated: transformed(*stated, *defaults[len(stated) :])

    def differentiable(*stated: Any) -> Any:
        arguments = (*stated, *defaults[len(stated) :])
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in arguments
        ):
            return Derivative.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's own
        return twin(*arguments)

    LIBRARY.impl(op._opname, differentiable, "Autograd")


def twin_of(op: Any) -> Any:
    """The op that computes one with a derivative, and that compiled graphs hold in its place."""
    return getattr(torch.ops.attention_autotuner, f"{op._opname}{_TWIN}").default


def nothing(like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The empty tensor that stands in a schema's place for a result that is not wanted."""
    return like.new_empty(0, dtype=dtype)
