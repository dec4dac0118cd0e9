"""The reference of modified scores by blocks of heads and batch entries: what one head at a time gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_autotuner import flash_attn_func
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.attention import modified
from attention_autotuner.operations.attention.modified_inputs import modifiers_of
from attention_autotuner.operations.bindings import make_inputs
from tests.numerics.score_modifications import KINDS

PROBLEM = Problem(
    direction="backward",
    batch=3,
    heads_q=6,
    heads_kv=3,
    seqlen_q=21,
    seqlen_k=21,
    dim_qk=16,
    dim_v=8,
)
CASES: dict[str, dict[str, Any]] = {
    **KINDS,
    "spans": {"modifications": ("prefix_lens", "document_ids"), "causal": True},
    "top left": {"causal": True, "causal_alignment": "top_left", "window_size": (5, -1)},
}
OF_HEAD = 2 * 21 * 21
BLOCKS = (1, 2 * OF_HEAD, 3 * OF_HEAD, 2**24)  # a head, two, an entry, all


def results_of(name: str, dtype: torch.dtype, bounds: dict[str, Any]) -> list[torch.Tensor]:
    """O, LSE and all gradients."""
    problem = replace(PROBLEM, **CASES[name])
    inputs = make_inputs(problem, seed=1, device=torch.device("cpu"))
    tensors = inputs.tensors
    options: Any = {
        "modifiers": modifiers_of(problem, inputs),
        "causal": problem.causal,
        "causal_alignment": problem.causal_alignment,
        "dtype": dtype,
        **bounds,
    }
    three = (tensors["q"], tensors["k"], tensors["v"])
    o, lse = modified.attention_modified(*three, **options)
    grad_lse = torch.linspace(-1.0, 1.0, lse.numel()).view(lse.shape)
    backward = modified.attention_modified_backward(tensors["dout"], grad_lse, *three, **options)
    return [o, lse, *backward]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_blocks_make_no_difference(
    monkeypatch: pytest.MonkeyPatch, name: str, bounded: bool, dtype: torch.dtype
) -> None:
    bounds = {}
    if bounded:
        bounds = {"seqlens_k": torch.tensor([21, 13, 0]), "starts_k": torch.tensor([0, 4, 2])}
    expected = results_of(name, dtype, bounds)
    for scores in BLOCKS[1:]:
        monkeypatch.setitem(modified.BLOCK_SCORES, "cpu", scores)
        for result, wanted in zip(results_of(name, dtype, bounds), expected, strict=True):
            close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float64 else {}
            torch.testing.assert_close(result, wanted, equal_nan=True, **close)


def test_blocks_take_fewer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Count(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for scores in (BLOCKS[0], BLOCKS[-1]):
        monkeypatch.setitem(modified.BLOCK_SCORES, "cpu", scores)
        with Count() as mode:
            results_of("biased", torch.float32, {})
        counts.append(mode.count)
    assert counts[1] < counts[0] / 3


@pytest.mark.parametrize(
    "hides",
    [
        {"attn_mask": torch.zeros(3, 4, dtype=torch.bool)},
        {"attn_mask": torch.full((3, 4), -torch.inf)},
        {"causal": True, "causal_alignment": "top_left", "seqlens_k": torch.zeros(1).int()},
    ],
)
def test_a_row_without_keys_whose_sink_is_minus_infinity_gives_zero(hides: dict[str, Any]) -> None:
    q, k, v = (torch.randn(1, 2, x, 16).half() for x in (3, 4, 4))
    sinks = torch.tensor([-torch.inf, 0.5])
    o, lse = flash_attn_func(q, k, v, sinks=sinks, return_lse=True, **hides)
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 3))


def test_gradients_of_a_row_without_keys_whose_sink_is_minus_infinity_are_zero() -> None:
    q, k, v = (torch.randn(1, 2, x, 16).half().requires_grad_() for x in (3, 4, 4))
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    o, lse = flash_attn_func(q, k, v, sinks=sinks, attn_mask=hidden, return_lse=True)
    gradients = torch.autograd.grad(o.sum() + lse[:, 1].sum(), (q, k, v, sinks))
    assert not any(x.count_nonzero() for x in gradients[:3])
    assert gradients[3].tolist() == [0.0, 3.0]
