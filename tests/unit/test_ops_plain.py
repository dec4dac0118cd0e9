"""Which tensors may pass by the dispatcher: those whose values are what lies in strided memory, and no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attention_autotuner.api.shared import plain

SHAPE = (2, 2, 3, 8)


class Subclass(torch.Tensor):
    """A tensor that may do anything."""


def make() -> torch.Tensor:
    return torch.zeros(SHAPE, dtype=torch.float16)


def escape(transform: Callable[..., Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    """The wrapper that a transform made, after its end."""
    kept = []

    def function(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.float().sum()

    transform(function)(make())
    return kept[0]


def nest() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        return torch.nested.nested_tensor([make()[0], make()[1]])


def fake() -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(make())


UNUSUAL: dict[str, Callable[[], object]] = {
    "negated lazily": lambda: torch._neg_view(make()),
    "zero without memory": lambda: torch._efficientzerotensor(SHAPE, dtype=torch.float16),
    "functional": lambda: torch._to_functional_tensor(make()),
    "sparse": lambda: make().to_sparse(),
    "nested": nest,
    "left by vmap": lambda: escape(torch.vmap),
    "left by grad": lambda: escape(torch.func.grad),
    "meta": lambda: make().to("meta"),
    "empty": lambda: make()[:0],
    "subclass": lambda: make().as_subclass(Subclass),
    "fake": fake,
    "array": lambda: make().numpy(),
}


def test_plain_tensors_tell_where_they_lie() -> None:
    q, k, v = make(), torch.nn.Parameter(make()), make().transpose(1, 2)
    with torch.inference_mode():
        inference = make()
    for x in (v, inference, make()[:, :1].expand(SHAPE), make().requires_grad_()):
        assert plain.addresses(q, k, x) == [q.data_ptr(), k.data_ptr(), x.data_ptr()]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_go_through_the_dispatcher(kind: str, place: int) -> None:
    tensors: list[object] = [make(), make(), make()]
    tensors[place] = UNUSUAL[kind]()
    assert plain.addresses(*tensors) is None


class _FunctionMode(TorchFunctionMode):
    """Does nothing, but is there."""


class _DispatchMode(TorchDispatchMode):
    """Does nothing, but is there."""


@pytest.mark.parametrize("mode", [_FunctionMode, _DispatchMode, forward_ad.dual_level])
def test_modes_go_through_the_dispatcher(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    q = make()
    with mode():
        assert plain.addresses(q, q, q) is None
    assert plain.addresses(q, q, q) is not None


def test_a_default_device_is_passed_by() -> None:
    q = make()
    with torch.device("cpu"):
        assert plain.addresses(q, q, q) is not None
        assert plain.may_leave_default_device((q, None, 1.0, "bhsd", (1, -1)))
        assert not plain.may_leave_default_device((q, q.as_subclass(Subclass)))
        with _FunctionMode():
            assert plain.addresses(q, q, q) is None
            assert not plain.may_leave_default_device((q,))
    assert not plain.may_leave_default_device((q,))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_transforms_and_traces_go_through_the_dispatcher(transform: Callable[..., object]) -> None:
    outside, results = make(), []

    def function(x: torch.Tensor) -> torch.Tensor:
        results.append(plain.addresses(outside, outside, outside))
        return x.float().sum()

    transform(function)(make())  # type: ignore[operator]  # a function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its tracer deprecated
        torch.jit.trace(function, make(), check_trace=False)
    assert results == [None, None]
