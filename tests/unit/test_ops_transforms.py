"""``torch.func``: gradients as of autograd, of functions, of functions of functions, and beside a map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner import Decay, retention_func, retnet_attn_func
from attention_autotuner.errors import UnsupportedProblemError

flash_attn_func: Any = attention_autotuner.flash_attn_func  # as an untyped caller sees it
varlen_func: Any = attention_autotuner.flash_attn_varlen_func
ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "attention": lambda q, k, v: flash_attn_func(q, k, v, causal=True),
    "of another layout": lambda q, k, v: flash_attn_func(q, k, v, layout="bshd"),
    "by lse": lambda q, k, v: flash_attn_func(q, k, v, return_lse=True)[1],
    "in a window": lambda q, k, v: flash_attn_func(q, k, v, window_size=(3, 0)),
    "packed": lambda *three: varlen_func(*(x[0].transpose(0, 1) for x in three), ENDS, ENDS, 7, 7),
    "retnet": lambda q, k, v: retnet_attn_func(q, k, v, Decay(None), causal=True),
    "retention": lambda q, k, v: retention_func(q, k, v)[0],
}


def make() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 12, 16, generator=generator).half() for _ in range(3)]


def total(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *tensors: call(*tensors).float().square().sum()


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_autograd(name: str) -> None:
    function, three = total(CALLS[name]), make()
    results = torch.func.grad(function, argnums=(0, 1, 2))(*three)
    leaves = [x.clone().requires_grad_() for x in three]
    for ours, expected in zip(results, torch.autograd.grad(function(*leaves), leaves), strict=True):
        torch.testing.assert_close(ours, expected)
    vjp: Any = torch.func.vjp(function, *three)
    value, pull = vjp
    for ours, expected in zip(pull(torch.ones_like(value)), results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("packed", "by lse")])
def test_gradients_of_gradients_are_those_of_autograd(name: str) -> None:
    function = total(CALLS[name])
    q, k, v = make()
    once = torch.func.grad(function)
    twice = torch.func.grad(lambda q: once(q, k, v).float().square().sum())(q)
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf, k, v), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(first.float().square().sum(), leaf)
    torch.testing.assert_close(twice, expected, atol=1e-3, rtol=1e-2)


def test_gradients_of_every_entry_of_a_batch() -> None:
    function = total(CALLS["attention"])
    q, k, v = make()
    entries = [x.unsqueeze(1) for x in (q, k, v)]
    by_entry = torch.func.vmap(torch.func.grad(function))(*entries).squeeze(1)
    expected = torch.func.grad(function)(q, k, v)
    torch.testing.assert_close(by_entry, expected)
    of_map = torch.func.grad(lambda *x: torch.func.vmap(function)(*x).sum())(*entries)
    torch.testing.assert_close(of_map.squeeze(1), expected)


def test_a_forward_mode_derivative_is_refused() -> None:
    q, k, v = make()
    with pytest.raises(UnsupportedProblemError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (q,))
    for call in CALLS.values():
        with pytest.raises(UnsupportedProblemError, match="no forward-mode derivative"):
            torch.func.hessian(lambda q, call=call: total(call)(q, k, v))(q)
