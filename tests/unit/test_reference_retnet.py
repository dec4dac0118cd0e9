"""The reference of masked, normalised retention against its formula, through autograd in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.reference import (
    check,
    retnet_attention,
    retnet_attention_backward,
    retnet_attention_low,
)

SHAPES = [  # batch, heads_q, heads_kv, mask heads, seqlen_q, seqlen_k, dim_qk, dim_v
    (1, 3, 3, 3, 17, 17, 16, 24),
    (3, 6, 2, 6, 9, 23, 8, 5),
    (2, 6, 2, 1, 9, 23, 7, 24),
    (2, 4, 1, 1, 23, 9, 24, 8),
    (1, 4, 2, 4, 23, 9, 8, 8),
    (1, 1, 1, 1, 1, 5, 8, 8),
    (1, 2, 2, 2, 5, 1, 8, 8),
]
RULES: list[dict[str, Any]] = [
    {},
    {"r_grad": True},
    {"r_clamp_max": 3.0},
    {"r_clamp_max": 3.0, "r_grad": True},
    {"normalize": False},
]
BLOCKS = [1, 300, 1300, 2**26]  # one row; some rows; some heads; everything

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _the_same_numbers() -> None:
    torch.manual_seed(0)


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, *, grad: bool = False
) -> Tensors:
    """q, k, v and a mask of both signs, whose rows differ in size so that some sums lie below 1 and some above 3."""
    b, hq, hkv, hm, sq, sk, dqk, dv = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = ((b, hq, sq, dqk), (b, hkv, sk, dqk), (b, hkv, sk, dv), (hm, sq, sk))
    q, k, v, mask = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    mask = mask * torch.logspace(-2.5, 0, sq, dtype=torch.float64)[:, None]
    if sq > 3:
        mask[:, 3] = 0.0
    tensors = tuple(x.to(dtype).requires_grad_(grad) for x in (q, k, v, mask))
    return tensors[0], tensors[1], tensors[2], tensors[3]


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    normalize: bool = True,
    r_clamp_max: float | None = None,
    r_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    x = scale * (q @ k.mT) * (mask.tril(mask.shape[2] - mask.shape[1]) if causal else mask)
    r = x.abs().sum(-1, keepdim=True).clamp(1, r_clamp_max)
    r = (r if r_grad else r.detach()) if normalize else torch.ones_like(r)
    return x / r @ v, r[..., 0].detach()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_every_gradient_equal_the_formula(
    shape: tuple[int, ...], rule: dict[str, Any], causal: bool
) -> None:
    tensors = make_inputs(shape, grad=True)
    options: dict[str, Any] = {"scale": -0.7, "causal": causal, **rule}
    o, r = naive(*tensors, **options)
    grad_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)
    expected = torch.autograd.grad(o, tensors, grad_o)
    for max_scores in BLOCKS:
        results = retnet_attention(*tensors, max_scores=max_scores, **options)
        torch.testing.assert_close(results, (o, r))
        grads = retnet_attention_backward(
            grad_o, *tensors, need_dmask=True, max_scores=max_scores, **options
        )
        torch.testing.assert_close(grads, expected)
    through = torch.autograd.grad(results[0], tensors, grad_o)
    torch.testing.assert_close(through, expected)


def test_the_inputs_reach_both_clamps_the_range_between_and_an_empty_row() -> None:
    _, r = naive(*make_inputs(SHAPES[0]), scale=-0.7, r_clamp_max=3.0)
    assert (r == 1).any()
    assert (r == 3).any()
    assert ((r > 1) & (r < 3)).any()
    o, r = retnet_attention(*make_inputs(SHAPES[0]))
    assert torch.equal(r[:, :, 3], torch.ones_like(r[:, :, 3]))
    assert torch.equal(o[:, :, 3], torch.zeros_like(o[:, :, 3]))


def test_r_is_detached_unless_asked_and_then_matters_only_between_the_clamps() -> None:
    tensors = make_inputs(SHAPES[0])
    grad_o = torch.ones_like(retnet_attention(*tensors)[0])
    r = retnet_attention(*tensors, r_clamp_max=3.0)[1]
    detached, exact = (
        retnet_attention_backward(grad_o, *tensors, r_clamp_max=3.0, r_grad=r_grad)[0]
        for r_grad in (False, True)
    )
    between = (r > 1) & (r < 3)
    assert between.any()
    assert not torch.isclose(detached, exact)[between].all(-1).any()
    assert torch.equal(detached[~between], exact[~between])


class Explicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.options = options
        return retnet_attention(q, k, v, mask, **options)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        results = retnet_attention_backward(
            grads[0], *ctx.saved_tensors, need_dmask=True, **ctx.options
        )
        return (*results, None)


@pytest.mark.parametrize("shape", [(1, 2, 1, 2, 5, 3, 3, 2), (2, 2, 1, 1, 3, 5, 2, 3)])
@pytest.mark.parametrize(
    "rule", [{"r_grad": True}, {"r_grad": True, "r_clamp_max": 3.0}, {"normalize": False}]
)
def test_gradcheck(shape: tuple[int, ...], rule: dict[str, Any]) -> None:
    q, k, v, mask = make_inputs(shape)
    mask = torch.where(mask == 0, 0.1, mask)  # |X| has a kink at 0
    tensors = [x.clone().requires_grad_() for x in (q, k, v, mask)]
    options: dict[str, Any] = {"scale": 1.6, "causal": True, **rule}
    r = retnet_attention(*tensors, **options)[1]
    assert rule.get("normalize", True) == bool((r != 1).any())
    assert torch.autograd.gradcheck(lambda *x: Explicit.apply(*x, options), tensors)


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_above_the_promised_diagonal_is_read(shape: tuple[int, ...]) -> None:
    q, k, v, mask = make_inputs(shape)
    above = torch.ones(mask.shape, dtype=torch.bool).triu(1 + mask.shape[2] - mask.shape[1])
    zero, garbage = mask.masked_fill(above, 0.0), mask.masked_fill(above, math.nan)
    grad_o = torch.ones(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for max_scores in BLOCKS:
        options: dict[str, Any] = {"r_grad": True, "max_scores": max_scores}
        expected = retnet_attention(q, k, v, zero, **options)
        results = retnet_attention(q, k, v, garbage, causal=True, **options)
        torch.testing.assert_close(results, expected)
        grads = retnet_attention_backward(
            grad_o, q, k, v, garbage, causal=True, need_dmask=True, **options
        )
        kept = retnet_attention_backward(grad_o, q, k, v, zero, need_dmask=True, **options)
        torch.testing.assert_close(grads[:3], kept[:3])
        assert grads[3] is not None
        assert kept[3] is not None
        torch.testing.assert_close(grads[3], kept[3].masked_fill(above, 0.0))


def test_without_the_promise_what_stands_above_the_diagonal_counts() -> None:
    q, k, v, mask = make_inputs(SHAPES[0])
    free, held = (retnet_attention(q, k, v, mask, causal=causal)[0] for causal in (False, True))
    assert not torch.isclose(free[:, :, -2], held[:, :, -2]).all()
    torch.testing.assert_close(free[:, :, -1], held[:, :, -1])


def test_the_gradient_of_the_mask_is_made_only_when_asked() -> None:
    q, k, v, mask = make_inputs(SHAPES[1])
    grad_o = torch.ones(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    assert retnet_attention_backward(grad_o, q, k, v, mask)[3] is None


class Largest(TorchDispatchMode):
    """The elements of the largest tensor made inside, views of what was there before left out."""

    def __init__(self, *arguments: torch.Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in arguments}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self.known:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("mask_heads", [1, 4])
def test_scores_and_masks_are_made_a_block_at_a_time(mask_heads: int) -> None:
    tensors = make_inputs((2, 4, 2, mask_heads, 200, 300, 8, 8), torch.float32)
    grad_o = torch.ones(2, 4, 200, 8)
    largest_input = tensors[0].numel()
    for max_scores in (2**13, 2**15):
        with Largest(*tensors, grad_o) as made:
            retnet_attention(*tensors, causal=True, r_grad=True, max_scores=max_scores)
            retnet_attention_backward(
                grad_o, *tensors, causal=True, r_grad=True, max_scores=max_scores
            )
        assert max_scores // 2 < made.elements <= max(max_scores, largest_input)


def test_views_serve_as_they_are() -> None:
    q, k, v, mask = make_inputs(SHAPES[0])
    single, two, three = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    expanded = mask[:1].expand(3, -1, -1)
    expected = retnet_attention(q, k, v, mask[:1])
    torch.testing.assert_close(retnet_attention(single, two, three, expanded), expected)
    grad_o = torch.ones_like(expected[0])
    separately = retnet_attention_backward(grad_o, single, two, three, expanded, need_dmask=True)
    shared = retnet_attention_backward(grad_o, q, k, v, mask[:1], need_dmask=True)
    assert separately[3] is not None
    torch.testing.assert_close((*separately[:3], separately[3].sum(0, keepdim=True)), shared)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("r_grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_low_rounds_in_the_input_dtype_and_passes_its_own_rule(
    dtype: torch.dtype, causal: bool, r_grad: bool
) -> None:
    tensors = make_inputs((2, 4, 2, 4, 33, 21, 16, 16), dtype, grad=True)
    options: dict[str, Any] = {"causal": causal, "r_grad": r_grad}
    ref, low = retnet_attention(*tensors, **options), retnet_attention_low(*tensors, **options)
    assert (ref[0].dtype, ref[1].dtype) == (torch.float32, torch.float32)
    assert (low[0].dtype, low[1].dtype) == (dtype, torch.float32)
    for results, true_value in zip(low, ref, strict=True):
        assert not torch.equal(results.float(), true_value)
        assert check(results.detach(), true_value.detach(), results.detach())
    grad_o = torch.randn_like(low[0])
    excuse = torch.autograd.grad(low[0], tensors, grad_o)
    precise = [x.double() for x in tensors]
    references = retnet_attention_backward(grad_o, *precise, need_dmask=True, **options)
    grads = retnet_attention_backward(grad_o, *tensors, need_dmask=True, **options)
    for grad, arguments, true, rounded in zip(grads, tensors, references, excuse, strict=True):
        assert grad is not None
        assert true is not None
        assert grad.dtype == arguments.dtype
        assert check(grad, true, rounded), check(grad, true, rounded).reason


def test_sums_beyond_fp16_are_kept_in_fp32() -> None:
    q = torch.full((1, 1, 1, 8), 20.0).half()
    k, v, mask = q.expand(1, 1, 64, 8), torch.ones(1, 1, 64, 8).half(), torch.ones(1, 1, 64).half()
    o, r = retnet_attention_low(q, k, v, mask)
    assert r.item() == 64 * 3200
    torch.testing.assert_close(o, torch.ones_like(o))
    o, r = retnet_attention_low(q, k, v, mask, r_clamp_max=5e4)
    assert r.item() == 5e4
    torch.testing.assert_close(o, torch.full_like(o, 4.096))


@pytest.mark.parametrize("sizes", [(2, 17, 17), (3, 17, 16), (3, 16, 17), (17, 17), (1, 3, 17, 17)])
def test_a_mask_of_another_shape_is_named(sizes: tuple[int, ...]) -> None:
    q, k, v, _ = make_inputs(SHAPES[0])
    with pytest.raises(UnsupportedProblemError, match=r"mask must be .*, got \[") as error:
        retnet_attention(q, k, v, torch.ones(sizes))
    assert str(list(sizes)) in str(error.value)
    with pytest.raises(UnsupportedProblemError, match="mask must be"):
        retnet_attention_backward(q, q, k, v, torch.ones(sizes))


@pytest.mark.parametrize("limit", [0.5, -1.0, math.nan])
def test_a_clamp_below_one_is_named(limit: float) -> None:
    with pytest.raises(UnsupportedProblemError, match=f"r_clamp_max .* got {limit}"):
        retnet_attention(*make_inputs(SHAPES[0]), r_clamp_max=limit)


@pytest.mark.parametrize("rule", [{"r_clamp_max": 3.0}, {"r_grad": True}])
def test_no_normaliser_takes_no_options_of_one(rule: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedProblemError, match="normalize=False"):
        retnet_attention(*make_inputs(SHAPES[0]), normalize=False, **rule)
