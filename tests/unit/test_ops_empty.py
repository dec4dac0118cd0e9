"""Sequences and batches without anything in them: the formula's results, on the CPU and by plans, without a launch."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import Decay, flash_attn_func, retention_func, retnet_attn_func
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.retention import checks as retention_checks
from attention_autotuner.api.retention import plan as retention_plan
from attention_autotuner.api.retnet import plan as retnet_plan
from attention_autotuner.api.retnet.checks import Backward, Forward, Rules
from tests.fake_kernels import FakeDispatch, serve_fakes

# As an untyped caller sees them.
attention: Callable[..., Any] = flash_attn_func
retnet: Callable[..., Any] = retnet_attn_func
retention: Callable[..., Any] = retention_func

SIZES = pytest.mark.parametrize(
    ("batch", "rows", "keys"), [(2, 0, 5), (2, 7, 0), (2, 0, 0), (0, 7, 5), (0, 0, 0)]
)
RULES = Rules(1.0, False, True, None, False)
NOTHING_KNOWN: Any = ((None, False, False, ""), False)


@pytest.fixture
def fake(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDispatch]:
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    with serve_fakes(fake_kernel, monkeypatch) as fake:
        yield fake
        assert not fake.asked


def make(batch: int, rows: int, keys: int, *, grad: bool = False) -> list[torch.Tensor]:
    shapes = ((batch, 4, rows, 16), (batch, 2, keys, 16), (batch, 2, keys, 24))
    return [torch.randn(shape).half().requires_grad_(grad) for shape in shapes]


def check_zeros(gradients: Any, tensors: list[torch.Tensor]) -> None:
    for gradient, x in zip(gradients, tensors, strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@SIZES
@pytest.mark.parametrize("causal", [False, True])
def test_attention(batch: int, rows: int, keys: int, causal: bool) -> None:
    tensors = make(batch, rows, keys, grad=True)
    o, lse = attention(*tensors, causal=causal, return_lse=True)
    assert torch.equal(o, torch.zeros(batch, 4, rows, 24).half())
    assert torch.equal(lse, torch.full((batch, 4, rows), -math.inf))
    first = torch.autograd.grad([o, lse], tensors, [o + 1, lse.nan_to_num() + 1], create_graph=True)
    check_zeros(first, tensors)
    second = torch.autograd.grad(
        [x.sum() for x in first], tensors, allow_unused=True, materialize_grads=True
    )
    check_zeros(second, tensors)


@SIZES
def test_attention_by_plans(fake: FakeDispatch, batch: int, rows: int, keys: int) -> None:
    q, k, v = tensors = make(batch, rows, keys)
    for _ in range(2):  # a plan made, and replayed
        o, lse = attention_plan.attention_forward(q, k, v, (None, True, False, ""), True)
        assert lse is not None
        assert torch.equal(o, torch.zeros(batch, 4, rows, 24).half())
        assert torch.equal(lse, torch.full((batch, 4, rows), -math.inf))
        gradients = attention_plan.attention_backward(o, lse, q, k, v, o, lse, *NOTHING_KNOWN)
        check_zeros(gradients, tensors)


@SIZES
@pytest.mark.parametrize("decay", [False, True])
def test_retnet(batch: int, rows: int, keys: int, decay: bool) -> None:
    tensors = make(batch, rows, keys, grad=True)
    mask = torch.randn(4, rows, keys).half().requires_grad_()
    o, r = retnet(*tensors, Decay() if decay else mask, return_r=True)
    assert torch.equal(o, torch.zeros(batch, 4, rows, 24).half())
    assert torch.equal(r, torch.ones(batch, 4, rows))
    inputs = tensors if decay else [*tensors, mask]
    check_zeros(torch.autograd.grad(o, inputs, o + 1), inputs)


@SIZES
def test_retnet_by_plans(fake: FakeDispatch, batch: int, rows: int, keys: int) -> None:
    q, k, v = tensors = make(batch, rows, keys)
    factors = (torch.randn(4, rows, keys).half(), None, None)
    o, r = retnet_plan.retnet_forward(Forward._make((q, k, v, *factors, *RULES, "", True, False)))
    assert r is not None
    assert torch.equal(o, torch.zeros(batch, 4, rows, 24).half())
    assert torch.equal(r, torch.ones(batch, 4, rows))
    backward = Backward._make((o, q, k, v, *factors, None, r, *RULES, "", True, False))
    *gradients, dmask = retnet_plan.retnet_backward(backward)
    check_zeros(gradients, tensors)
    assert dmask is not None
    assert torch.equal(dmask, torch.zeros(4, rows, keys).half())


@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 7), (0, 0)])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("form", ["auto", "parallel", "recurrent"])
def test_retention(batch: int, length: int, initial: bool, form: Any) -> None:
    tensors = make(batch, length, length, grad=True)
    gamma = torch.full((4,), 0.5, requires_grad=True)
    state = torch.randn(batch, 4, 16, 24, requires_grad=True) if initial else None
    o, final = retention(*tensors, gamma, form=form, initial_state=state)
    assert torch.equal(o, torch.zeros(batch, 4, length, 24).half())
    assert torch.equal(final, torch.zeros(batch, 4, 16, 24) if state is None else state)
    grad_state = torch.randn(final.shape)
    inputs = [*tensors, gamma]
    if state is not None:
        (dstate,) = torch.autograd.grad(final, state, grad_state, retain_graph=True)
        assert torch.equal(dstate, grad_state)
    check_zeros(torch.autograd.grad([o, final], inputs, [o + 1, grad_state]), inputs)


def test_retention_of_nothing_in_place() -> None:
    q, k, v = make(2, 0, 0)
    state = torch.randn(2, 4, 16, 24)
    before = state.clone()
    _, final = retention(q, k, v, initial_state=state, inplace_state=True)
    assert final is state
    assert torch.equal(state, before)


@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 7), (0, 0)])
@pytest.mark.parametrize("initial", [False, True])
def test_retention_by_plans(fake: FakeDispatch, batch: int, length: int, initial: bool) -> None:
    q, k, v = tensors = make(batch, length, length)
    state = torch.randn(batch, 4, 24, 16).mT if initial else None
    o, final = retention_plan.retention_forward(
        retention_checks.Forward(q, k, v, None, None, state, None, "auto", "", True)
    )
    assert final is not None
    assert torch.equal(o, torch.zeros(batch, 4, length, 24).half())
    assert torch.equal(final, torch.zeros(batch, 4, 16, 24) if state is None else state)
    *gradients, dstate, dlog2 = retention_plan.retention_backward(
        retention_checks.Backward(o, final, q, k, v, None, None, state, None, "", True, True)
    )
    check_zeros(gradients, tensors)
    assert dstate is not None
    assert dlog2 is not None
    assert torch.equal(dstate, final)
    assert torch.equal(dlog2, torch.zeros(4))
    if state is not None:
        dense = state.contiguous()
        o, nothing = retention_plan.retention_forward(
            retention_checks.Forward(q, k, v, None, None, dense, None, "auto", "", False),
            in_place=True,
        )
        assert nothing is None
        assert torch.equal(dense, state)
