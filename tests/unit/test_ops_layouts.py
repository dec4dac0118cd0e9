"""Layouts of tensors: ``[batch, seqlen, heads, dim]`` by views, and a notice for calls that look like the other one."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import Decay, flash_attn_func, retention_func, retnet_attn_func
from attention_autotuner.api.attention import function, torch_op
from attention_autotuner.serving import runtime

# As an untyped caller sees them.
flash_attn: Callable[..., Any] = flash_attn_func
retain: Callable[..., Any] = retention_func

Call = Callable[..., Any]


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return flash_attn(q, k, v, causal=True, softmax_scale=0.3, return_lse=True, **options)


def retnet(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return retnet_attn_func(q, k, v, Decay(0.9), return_r=True, scale=0.3, **options)


def retention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return retain(q, k, v, 0.9, scale=0.3, form="chunkwise", **options)


CALLS = pytest.mark.parametrize("call", [attention, retnet, retention])


def make(*, grad: bool = False) -> list[torch.Tensor]:
    """q, k and v of 2 sequences, 4 and 2 heads and 7 tokens, as bshd."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).half().requires_grad_(grad)
        for shape in ((2, 7, 4, 16), (2, 7, 2, 16), (2, 7, 2, 24))
    ]


@CALLS
def test_bshd_is_bhsd_of_views(call: Call) -> None:
    tensors = make(grad=True)
    o, second = call(*tensors, layout="bshd")
    views = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    expected, expected_second = call(*views, layout="bhsd")
    assert o.is_contiguous()
    assert torch.equal(o, expected.transpose(1, 2))
    assert torch.equal(second, expected_second)
    grad_o = torch.randn(o.shape).half()
    gradients = torch.autograd.grad(o, tensors, grad_o)
    wanted = torch.autograd.grad(expected, views, grad_o.transpose(1, 2))
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert torch.equal(mine, theirs.transpose(1, 2))


@CALLS
def test_arrays_in_bshd(call: Call) -> None:
    tensors = make()
    o, second = call(*(x.numpy() for x in tensors), layout="bshd")
    expected, expected_second = call(*tensors, layout="bshd")
    assert (o == expected.numpy()).all()
    assert (second == expected_second.numpy()).all()


def test_one_result_in_bshd() -> None:
    tensors = make()
    o = flash_attn(*tensors, layout="bshd")
    assert torch.equal(o, flash_attn(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2))


def test_bshd_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    op = torch_op.FORWARD_OP

    def note(*arguments: Any) -> Any:
        seen.extend(arguments[:3])
        return op(*arguments)

    monkeypatch.setattr(function, "FORWARD_OP", note)
    tensors = make()
    flash_attn(*tensors, layout="bshd")
    for x, original in zip(seen, tensors, strict=True):
        assert x.data_ptr() == original.data_ptr()
        assert x.stride() == original.transpose(1, 2).stride()


def test_bshd_under_compile() -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    tensors = make()
    for mine, theirs in zip(
        compiled(*tensors, layout="bshd"), attention(*tensors, layout="bshd"), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


def notices(caplog: pytest.LogCaptureFixture, call: Callable[[], object]) -> int:
    """Count the records of two equal calls that name the other layout."""
    caplog.clear()
    runtime.forget("notices")
    with caplog.at_level(logging.WARNING, logger="attention_autotuner"):
        call()
        call()
    return sum('layout="bshd"' in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("q", "k", "expected"),
    [
        ((2, 64, 8, 16), (2, 64, 8, 16), 1),  # 64 tokens, 8 heads
        ((1, 256, 4, 16), (1, 128, 2, 16), 1),
        ((1, 64, 8, 16), (1, 8, 8, 16), 0),  # a short prompt of a model with 64 and 8 heads
        ((1, 64, 1, 16), (1, 64, 300, 16), 0),  # decoding
        ((2, 32, 8, 16), (2, 32, 8, 16), 0),
        ((2, 64, 64, 16), (2, 64, 64, 16), 0),
    ],
)
def test_calls_that_look_like_the_other_layout(
    caplog: pytest.LogCaptureFixture, q: tuple[int, ...], k: tuple[int, ...], expected: int
) -> None:
    query, key = torch.zeros(q).half(), torch.zeros(k).half()
    assert notices(caplog, lambda: flash_attn(query, key, key)) == expected


@CALLS
def test_each_function_notices(caplog: pytest.LogCaptureFixture, call: Call) -> None:
    x = torch.zeros(1, 64, 4, 8).half()
    assert notices(caplog, lambda: call(x, x, x)) == 1


@pytest.mark.parametrize(
    "bent",
    [
        {"window_size": (3, 0)},
        {"softcap": 3.0},
        {"alibi_slopes": torch.ones(64)},
        {"sinks": torch.ones(64)},
        {"causal": True, "seqlens_k": torch.ones(1, dtype=torch.int32)},
    ],
    ids=lambda x: next(iter(x)),
)
def test_changed_scores_leave_the_notice(
    caplog: pytest.LogCaptureFixture, bent: dict[str, Any]
) -> None:
    x = torch.zeros(1, 64, 4, 8).half()
    assert notices(caplog, lambda: flash_attn(x, x, x, **bent)) == 1
    views = [x.transpose(1, 2).contiguous().transpose(1, 2)] * 3
    assert notices(caplog, lambda: flash_attn(*views, **bent)) == 0


def test_views_of_bshd_are_not_taken_for_it(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(1, 8, 64, 16).half()
    assert notices(caplog, lambda: flash_attn(x, x, x, layout="bshd")) == 0
    views = [x.transpose(1, 2)] * 3
    assert notices(caplog, lambda: flash_attn(*views)) == 0


def test_without_torch_a_typed_error_names_the_remedy() -> None:
    program = """
import sys
sys.modules["torch"] = None
import attention_autotuner
from attention_autotuner.errors import AttentionAutotunerError
try:
    from attention_autotuner import flash_attn_func
except ImportError as error:
    assert isinstance(error, AttentionAutotunerError), error
    assert error.name == "torch"
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "flash_attn_func needs the package torch" in done.stdout
    assert "pip install 'attention-autotuner[torch]'" in done.stdout


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
def test_the_scale_of_retention(form: Any) -> None:
    tensors = [x.transpose(1, 2) for x in make(grad=True)]
    state = torch.randn(2, 4, 16, 24)
    results = {
        scale: retain(*tensors, 0.9, form=form, scale=scale, initial_state=state)
        for scale in (None, 0.25, np.float32(0.5))
    }
    assert torch.equal(results[None][0], results[0.25][0])  # 1 / sqrt(16)
    o, final = results[0.5]
    torch.testing.assert_close(o, 2 * results[0.25][0], rtol=2e-3, atol=2e-3)
    assert torch.equal(final, results[None][1])
    grad_o = torch.randn(o.shape).half()
    pairs = [
        torch.autograd.grad(results[scale][0], tensors, grad_o, create_graph=True)
        for scale in (0.25, 0.5)
    ]
    for half, whole in zip(*pairs, strict=True):
        torch.testing.assert_close(whole, 2 * half, rtol=5e-3, atol=5e-3)
    loss = [torch.stack([g.float().square().sum() for g in x]).sum() for x in pairs]
    for half, whole in zip(*(torch.autograd.grad(x, tensors) for x in loss), strict=True):
        torch.testing.assert_close(whole, 4 * half, rtol=2e-2, atol=2e-2 * float(whole.abs().max()))
