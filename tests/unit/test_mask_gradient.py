"""Gradients of masks that are added to scores: of every shape that broadcasts, beside all modifications, in parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner.operations.attention import modified
from tests.numerics.score_modifications import formula

flash_attn_func: Any = attention_autotuner.flash_attn_func  # as an untyped caller sees it
BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K = 3, 4, 2, 9, 13
SHAPES = [
    (BATCH, HEADS, SEQLEN_Q, SEQLEN_K),
    (1, HEADS, SEQLEN_Q, SEQLEN_K),
    (BATCH, 1, SEQLEN_Q, SEQLEN_K),
    (BATCH, 1, 1, SEQLEN_K),
    (HEADS, SEQLEN_Q, 1),
    (SEQLEN_Q, SEQLEN_K),
    (SEQLEN_K,),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "causal_alignment": "top_left", "window_size": (4, -1)},
    "bent": {
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 0.9, HEADS),
        "bias": torch.randn(HEADS, 11, generator=torch.Generator().manual_seed(5)),
        "sinks": torch.linspace(-1, 1, HEADS),
        "window_size": (6, 3),
    },
}


def leaves_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and a mask, some of whose entries hide pairs."""
    generator = torch.Generator().manual_seed(len(shape))
    sizes = [(BATCH, n, s, 16) for n, s in ((HEADS, SEQLEN_Q), *((HEADS_KV, SEQLEN_K),) * 2)]
    leaves = [torch.randn(size, generator=generator).half() for size in sizes]
    mask = torch.randn(shape, generator=generator)
    mask[torch.rand(shape, generator=generator) < 0.2] = -1e4
    return [*(x.requires_grad_() for x in leaves), mask.to(dtype).requires_grad_()]


def gradients(of: Any, leaves: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of the tensors by O and LSE, along fixed directions."""
    results = of(*leaves[:3], attn_mask=leaves[3], **options)
    directions = (torch.sin(1.0 + torch.arange(x.numel())).view(x.shape) for x in results)
    seen = [torch.isfinite(x) for x in results]
    total = sum(
        (x.double() * d)[s].sum() for x, d, s in zip(results, directions, seen, strict=True)
    )
    assert isinstance(total, torch.Tensor)
    return torch.autograd.grad(total, leaves)


def ours(*tensors: torch.Tensor, **options: Any) -> Any:
    return flash_attn_func(*tensors, return_lse=True, **options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_the_formula(shape: tuple[int, ...], name: str) -> None:
    leaves = leaves_of(shape)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    named = OPTIONS[name]
    expected = gradients(formula, exact, dtype=torch.float64, **named)
    for gradient, wanted in zip(gradients(ours, leaves, **named), expected, strict=True):
        assert gradient.shape == wanted.shape
        torch.testing.assert_close(gradient.double(), wanted, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("most", [1, 3 * SEQLEN_Q * SEQLEN_K * HEADS])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_parts_add_up(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], most: int) -> None:
    leaves = leaves_of(shape)
    monkeypatch.setitem(modified.BLOCK_SCORES, "cpu", 2**24)
    whole = gradients(ours, leaves, causal=True)[3]
    monkeypatch.setitem(modified.BLOCK_SCORES, "cpu", most)
    torch.testing.assert_close(gradients(ours, leaves, causal=True)[3], whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_have_the_dtype_of_the_mask(dtype: torch.dtype) -> None:
    leaves = leaves_of(SHAPES[0], dtype)
    gradient = gradients(ours, leaves)[3]
    assert gradient.dtype == dtype
    wanted = gradients(ours, [*leaves[:3], leaves[3].detach().float().requires_grad_()])[3]
    torch.testing.assert_close(gradient.float(), wanted, atol=1e-2, rtol=1e-2)


def test_hidden_rows_have_none() -> None:
    leaves = leaves_of((SEQLEN_Q, SEQLEN_K))
    mask = leaves[3].detach().clone()
    mask[2] = mask[:, 3] = -math.inf
    results = gradients(ours, [*leaves[:3], mask.requires_grad_()])
    assert all(x.isfinite().all() for x in results)
    assert not results[3][2].any()
    assert not results[3][:, 3].any()
    assert results[3].count_nonzero() > 50


def test_documents_and_prefixes_hide_pairs_from_it() -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, 12, 16, generator=generator).half() for _ in range(3)]
    mask = torch.zeros(12, 12).requires_grad_()
    ids = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    prefixes = torch.tensor([4], dtype=torch.int32)
    o = flash_attn_func(
        *leaves, attn_mask=mask, causal=True, document_ids=ids, prefix_lens=prefixes
    )
    (gradient,) = torch.autograd.grad(o.float().square().sum(), mask)
    rows, keys = torch.arange(12)[:, None], torch.arange(12)
    seen = ((keys <= rows) | (keys < 4)) & (ids[0][:, None] == ids[0])
    assert not gradient[~seen].any()
    assert gradient[seen].count_nonzero() > 40


def test_second_derivatives_pass_through_the_mask_and_its_gradient() -> None:
    leaves = leaves_of((SEQLEN_Q, SEQLEN_K))
    mask = torch.randn(SEQLEN_Q, SEQLEN_K).requires_grad_()
    o = flash_attn_func(*leaves[:3], attn_mask=mask)
    of_q, of_mask = torch.autograd.grad(
        o.float().square().sum(), [leaves[0], mask], create_graph=True
    )
    (mixed,) = torch.autograd.grad(of_q.float().square().sum(), mask, retain_graph=True)
    x, m = leaves[0].detach().double().requires_grad_(), mask.detach().double().requires_grad_()
    exact = formula(x, leaves[1].detach(), leaves[2].detach(), attn_mask=m)[0]
    by_x, by_mask = torch.autograd.grad(exact.square().sum(), [x, m], create_graph=True)
    (wanted,) = torch.autograd.grad(by_x.square().sum(), m, retain_graph=True)
    torch.testing.assert_close(mixed.double(), wanted, atol=2e-2, rtol=2e-2)
    of_both = torch.autograd.grad(of_mask.sin().sum(), [leaves[0], mask])
    for again, exactly in zip(
        of_both, torch.autograd.grad(by_mask.sin().sum(), [x, m]), strict=True
    ):
        torch.testing.assert_close(again.double(), exactly, atol=2e-2, rtol=2e-2)


def test_a_compiled_call_has_it() -> None:
    leaves = leaves_of((HEADS, SEQLEN_Q, SEQLEN_K))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for gradient, wanted in zip(gradients(compiled, leaves), gradients(ours, leaves), strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_a_boolean_mask_has_none() -> None:
    leaves = leaves_of((SEQLEN_Q, SEQLEN_K))
    mask = leaves[3].detach() > 0
    o = flash_attn_func(*leaves[:3], attn_mask=mask)
    assert all(x is not None for x in torch.autograd.grad(o.float().sum(), leaves[:3]))
