"""The reference attention against torch's own, its blocked forms against it, and the rule that compares."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attention_autotuner.reference import (
    attention,
    attention_backward,
    attention_double_backward,
    attention_low,
    attention_naive,
    check,
)

SHAPES = [  # batch, heads_q, heads_kv, seqlen_q, seqlen_k, dim_qk, dim_v
    (2, 4, 4, 17, 17, 16, 16),
    (1, 6, 2, 9, 23, 8, 24),
    (2, 4, 1, 23, 9, 24, 8),
    (1, 1, 1, 1, 5, 8, 8),
    (1, 2, 2, 5, 1, 8, 8),
]
MASKS: list[dict[str, Any]] = [
    {"causal": False},
    {"causal": True, "causal_alignment": "bottom_right"},
    {"causal": True, "causal_alignment": "top_left"},
]


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, *, grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, hq, hkv, sq, sk, dqk, dv = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = ((b, hq, sq, dqk), (b, hkv, sk, dqk), (b, hkv, sk, dv))
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    for x in (q, k, v):
        x.requires_grad_(grad)
    return q, k, v


def visible(sq: int, sk: int, causal: bool, causal_alignment: str = "bottom_right") -> torch.Tensor:
    offset = sk - sq if causal_alignment == "bottom_right" else 0
    seen = [[not causal or j <= i + offset for j in range(sk)] for i in range(sq)]
    return torch.tensor(seen).reshape(sq, sk)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [None, -0.7, 0.0, 2.5])
def test_naive_equals_torch_where_rows_see_keys_and_is_defined_elsewhere(
    shape: tuple[int, ...], mask: dict[str, Any], scale: float | None
) -> None:
    q, k, v = make_inputs(shape)
    o, lse = attention_naive(q, k, v, softmax_scale=scale, dtype=torch.float64, **mask)
    seen = visible(q.shape[2], k.shape[2], **mask)
    rows = seen.any(-1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
    )
    torch.testing.assert_close(o[:, :, rows], expected[:, :, rows])
    assert torch.equal(o[:, :, ~rows], torch.zeros_like(o[:, :, ~rows]))
    assert (lse[:, :, ~rows] == -math.inf).all()
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    by_hand = torch.where(seen, scores, -math.inf).exp().sum(-1).log()
    torch.testing.assert_close(lse[:, :, rows], by_hand[:, :, rows])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_scores", [1, 40, 2**26])
def test_blocked_equals_naive(
    shape: tuple[int, ...], mask: dict[str, Any], max_scores: int
) -> None:
    q, k, v = make_inputs(shape)
    expected = attention_naive(q, k, v, softmax_scale=-1.3, dtype=torch.float64, **mask)
    results = attention(
        q, k, v, softmax_scale=-1.3, dtype=torch.float64, max_scores=max_scores, **mask
    )
    torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_scores", [1, 40, 2**26])
@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_backward_equals_autograd_of_naive(
    shape: tuple[int, ...], mask: dict[str, Any], max_scores: int, through: str
) -> None:
    q, k, v = make_inputs(shape, grad=True)
    o, lse = attention_naive(q, k, v, softmax_scale=0.9, dtype=torch.float64, **mask)
    grad_o = torch.randn_like(o) if through != "lse" else None
    grad_lse = torch.randn_like(lse) if through != "o" else None
    pairs = [(x, g) for x, g in ((o, grad_o), (lse, grad_lse)) if g is not None]
    expected = torch.autograd.grad(
        [x for x, _ in pairs], (q, k, v), [g for _, g in pairs], materialize_grads=True
    )
    results = attention_backward(
        grad_o,
        grad_lse,
        q,
        k,
        v,
        softmax_scale=0.9,
        dtype=torch.float64,
        max_scores=max_scores,
        **mask,
    )
    torch.testing.assert_close(results, expected)
    assert all(g.isfinite().all() for g in results)


@pytest.mark.parametrize("mask", MASKS)
def test_gradcheck_with_masked_rows_and_lse(mask: dict[str, Any]) -> None:
    q, k, v = make_inputs((1, 2, 1, 5, 3, 8, 8), grad=True)
    rows = visible(5, 3, **mask).any(-1)

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = attention(*tensors, softmax_scale=-0.4, dtype=torch.float64, **mask)
        return o, lse[:, :, rows]

    assert torch.autograd.gradcheck(outputs, (q, k, v))


def test_masked_rows_get_no_gradient_and_no_nan() -> None:
    q, k, v = make_inputs((1, 1, 1, 6, 2, 8, 8), grad=True)
    o, lse = attention_naive(q, k, v, causal=True, dtype=torch.float64)
    grads = torch.autograd.grad([o.sum(), lse.exp().sum()], (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert torch.equal(grads[0][:, :, :4], torch.zeros_like(grads[0][:, :, :4]))
    assert grads[0][:, :, 5].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_low_rounds_in_the_input_dtype_and_passes_its_own_rule(
    dtype: torch.dtype, mask: dict[str, Any]
) -> None:
    q, k, v = make_inputs((2, 4, 2, 33, 21, 16, 16), dtype)
    ref_o, ref_lse = attention(q, k, v, **mask)
    low_o, low_lse = attention_low(q, k, v, **mask)
    assert low_o.dtype == dtype
    assert low_lse.dtype == torch.float32
    assert not torch.equal(low_o.float(), ref_o)
    assert check(low_o, ref_o, low_o)
    assert check(low_lse, ref_lse, low_lse)


def test_float32_truth_ignores_a_program_that_allows_tf32_and_restores_it() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        q, k, v = make_inputs(SHAPES[0], torch.float32)
        attention(q, k, v)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def triple(n: int = 4096) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ref = torch.randn(n, generator=torch.Generator().manual_seed(3))
    low = (ref + 1e-3 * torch.randn(n, generator=torch.Generator().manual_seed(4))).half()
    return ref.half(), ref, low


def test_rule_accepts_rounding() -> None:
    out, ref, low = triple()
    results = check(out, ref, low)
    assert results
    assert results.ok
    assert 0 < results.max_error < results.max_allowed
    assert results.elements == 4096


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (7, math.nan, "not finite"),
        (8, math.inf, "not finite"),
        (9, -math.inf, "not finite"),
        (10, 40.0, "largest error"),
    ],
)
def test_rule_rejects_one_bad_element(index: int, value: float, message: str) -> None:
    out, ref, low = triple()
    out[index] = value
    results = check(out, ref, low)
    assert not results
    assert message in results.reason
    assert str((index,)) in results.reason


def test_rule_rejects_many_small_errors_by_their_norm() -> None:
    out, ref, low = triple()
    results = check((ref + 0.8 * check(out, ref, low).max_allowed).half(), ref, low)
    assert not results
    assert "norm" in results.reason
    assert "largest" not in results.reason


def test_an_overflow_of_low_excuses_nothing() -> None:
    out, ref, low = triple()
    low[3] = math.inf
    out[5] += 1.0
    assert not check(out, ref, low)


def test_minus_infinity_must_stand_exactly_where_the_truth_has_it() -> None:
    ref = torch.tensor([1.0, -math.inf, 2.0])
    assert check(ref.clone(), ref, ref.clone())
    assert not check(torch.tensor([1.0, -1e30, 2.0]), ref, ref.clone())
    assert not check(torch.tensor([-math.inf, -math.inf, 2.0]), ref, ref.clone())
    assert not check(torch.tensor([1.0, math.nan, 2.0]), ref, ref.clone())


def test_rule_refuses_to_judge_by_nonsense() -> None:
    good = torch.zeros(3)
    with pytest.raises(ValueError, match="NaN"):
        check(good, torch.tensor([0.0, math.nan, 0.0]), good)
    with pytest.raises(ValueError, match="one shape"):
        check(good, torch.zeros(4), good)
    with pytest.raises(ValueError, match="float32 or float64"):
        check(good, good.half(), good)


def test_an_empty_output_is_right() -> None:
    empty = torch.zeros(0, 4)
    assert check(empty.half(), empty, empty.half())


def test_alignments_coincide_for_equal_lengths() -> None:
    q, k, v = make_inputs(SHAPES[0])
    left = attention(q, k, v, causal=True, causal_alignment="top_left", dtype=torch.float64)
    right = attention(q, k, v, causal=True, causal_alignment="bottom_right", dtype=torch.float64)
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_scores", [1, 40, 2**26])
@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_double_backward_equals_autograd_of_naive_twice(
    shape: tuple[int, ...], mask: dict[str, Any], max_scores: int, through: str
) -> None:
    tensors = make_inputs(shape, grad=True)
    o, lse = attention_naive(*tensors, softmax_scale=0.9, dtype=torch.float64, **mask)
    rows = visible(shape[3], shape[4], **mask).any(-1)
    grad_o = torch.randn_like(o).requires_grad_() if through != "lse" else None
    grad_lse = torch.randn_like(lse).requires_grad_() if through != "o" else None
    arguments = [x for x in (grad_o, grad_lse) if x is not None]
    found_outputs = [x for x, g in ((o, grad_o), (lse, grad_lse)) if g is not None]
    first = torch.autograd.grad(
        found_outputs, tensors, arguments, create_graph=True, materialize_grads=True
    )
    factors = [torch.randn_like(x) for x in first]
    expected = list(
        torch.autograd.grad(
            first, (*arguments, *tensors), factors, allow_unused=True, materialize_grads=True
        )
    )
    results = attention_double_backward(
        (factors[0], factors[1], factors[2]),
        grad_o,
        grad_lse,
        *tensors,
        softmax_scale=0.9,
        dtype=torch.float64,
        max_scores=max_scores,
        **mask,
    )
    assert (results[0] is None, results[1] is None) == (grad_o is None, grad_lse is None)
    present = [x for x in results if x is not None]
    torch.testing.assert_close(present, expected)
    assert torch.equal(present[-3][:, :, ~rows], torch.zeros_like(present[-3][:, :, ~rows]))


def test_what_reaches_the_lse_of_a_row_without_keys_reaches_nothing() -> None:
    """Merging two such rows by ``logaddexp`` gives NaN there, which is no part of any gradient."""
    q, k, v = (torch.randn(1, 1, n, 8, dtype=torch.float64) for n in (6, 2, 2))
    options: dict[str, Any] = {"causal": True, "dtype": torch.float64}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, lse = attention_naive(*leaves, **options)
    grad_lse = torch.full_like(lse, math.nan)
    grad_lse[:, :, 4:] = 1.0
    expected = torch.autograd.grad(lse, (q, k), grad_lse)
    results = attention_backward(None, grad_lse, q, k, v, **options)
    for mine, exact in zip(results, expected, strict=False):
        torch.testing.assert_close(mine, exact)
    ones = (torch.ones_like(q), torch.ones_like(k), torch.ones_like(v))
    twice = attention_double_backward(ones, None, grad_lse, q, k, v, **options)
    assert all(bool(x.isfinite().all()) for x in twice if x is not None)


def test_double_backward_can_be_differentiated_again() -> None:
    tensors = make_inputs((1, 2, 1, 3, 4, 8, 8), grad=True)
    others = [torch.randn_like(x).requires_grad_() for x in tensors]
    grad_o = torch.randn(1, 2, 3, 8, dtype=torch.float64).requires_grad_()
    grad_lse = torch.randn(1, 2, 3, dtype=torch.float64).requires_grad_()

    def function(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = attention_double_backward(
            (arguments[0], arguments[1], arguments[2]),
            *arguments[3:],
            causal=True,
            dtype=torch.float64,
            max_scores=8,
        )
        return tuple(x for x in results if x is not None)

    arguments = (*others, grad_o, grad_lse, *tensors)
    assert torch.autograd.gradcheck(function, arguments, fast_mode=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradcheck(shape: tuple[int, ...], mask: dict[str, Any]) -> None:
    tensors = make_inputs(shape, grad=True)
    rows = visible(shape[3], shape[4], **mask).any(-1)

    def outputs(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = attention_naive(*arguments, dtype=torch.float64, **mask)
        return o, lse[:, :, rows]

    assert torch.autograd.gradcheck(outputs, tensors, fast_mode=True)
