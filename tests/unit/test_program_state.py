"""Autocast and TF32 as a program sets them: they change no result on the CPU, and stay as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func, matmul, retention_func
from attention_autotuner.operations.shared.blocks import full_precision

BACKENDS: Any = torch.backends
MATMUL = BACKENDS.cuda.matmul


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    BACKENDS.fp32_precision = MATMUL.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


def test_autocast_changes_no_result() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 16).half().requires_grad_().unbind()
    a, b = torch.randn(2, 24, 24).half().requires_grad_().unbind()

    def results() -> list[torch.Tensor]:
        o, lse = flash_attn_func(q, k, v, return_lse=True)
        kept, state = retention_func(q, k, v)
        product = matmul(a, b)
        sums = (o.float().sum() + kept.float().square().sum(), product.float().square().sum())
        gradients = torch.autograd.grad(sums, (q, k, v, a, b))
        return [o, lse, kept, state, product, *gradients]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        for result, other in zip(results(), expected, strict=True):
            assert result.dtype == other.dtype
            assert torch.equal(result, other)


def test_a_setting_that_is_inherited_stays_so() -> None:
    BACKENDS.fp32_precision = "tf32"
    with full_precision():
        assert MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == "tf32"
    BACKENDS.fp32_precision = "ieee"
    assert MATMUL.fp32_precision == "ieee"
    MATMUL.fp32_precision = "tf32"
    with full_precision():
        pass
    assert MATMUL.fp32_precision == "tf32"


def test_threads_leave_the_setting_of_the_program() -> None:
    MATMUL.fp32_precision = "tf32"
    inside, outside = threading.Event(), threading.Event()

    def compute() -> None:
        with full_precision():
            inside.set()
            assert outside.wait(10.0)

    thread = threading.Thread(target=compute)
    with full_precision():
        thread.start()
        assert inside.wait(10.0)
    assert MATMUL.fp32_precision == "ieee"  # the other thread still computes
    outside.set()
    thread.join()
    assert MATMUL.fp32_precision == "tf32"
