"""The three forms of retention with decay against each other, and their gradients against autograd, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.reference import (
    check,
    decay_mask,
    default_log2_gamma,
    retention_backward,
    retention_chunkwise,
    retention_low,
    retention_parallel,
    retention_recurrent,
    retnet_attention,
    retnet_attention_backward,
)

GAMMAS = [1e-3, 0.3, 0.5, 0.97, 1 - 2**-12, 1.0]
SHAPES = [  # batch, heads_q, heads_kv, seqlen, dim_qk, dim_v
    (2, 6, 6, 37, 8, 5),
    (1, 6, 2, 40, 4, 16),
    (1, 6, 3, 130, 2, 3),  # 1e-3 to the power of -128 overflows
    (2, 6, 1, 1, 8, 8),
]
FORMS: list[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = [
    retention_parallel,
    lambda *x, **o: retention_parallel(*x, max_scores=100, **o),
    lambda *x, **o: retention_chunkwise(*x, chunk=1, **o),
    lambda *x, **o: retention_chunkwise(*x, chunk=8, **o),
    retention_chunkwise,
    retention_recurrent,
]

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _the_same_numbers() -> None:
    torch.manual_seed(0)


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, *, grad: bool = False
) -> Inputs:
    """q, k, v, one of GAMMAS for each of six heads, and an initial state."""
    b, hq, hkv, s, dqk, dv = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = ((b, hq, s, dqk), (b, hkv, s, dqk), (b, hkv, s, dv), (b, hq, dqk, dv))
    q, k, v, state = (torch.randn(x, generator=generator, dtype=torch.float64) for x in sizes)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    gamma = torch.tensor(GAMMAS[:hq], dtype=torch.float64)
    q, k, v, state = q.to(dtype), k.to(dtype), v.to(dtype), state.to(precise)
    for x in (q, k, v, gamma, state):
        x.requires_grad_(grad)
    return q, k, v, gamma, state


def by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gamma: torch.Tensor,
    state: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for t in range(q.shape[2]):
        state = gamma[:, None, None] * state + torch.einsum("bhd,bhe->bhde", k[:, :, t], v[:, :, t])
        outputs.append(scale * torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
    return torch.stack(outputs, 2), state


def gradients_of(
    outputs: tuple[torch.Tensor, torch.Tensor],
    inputs: Inputs,
    grads: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    q, k, v, gamma, state = inputs
    return torch.autograd.grad(outputs, (q, k, v, state, gamma), grads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [None, -0.6])
def test_the_forms_agree_with_the_definition_forward_and_in_every_gradient(
    shape: tuple[int, ...], scale: float | None
) -> None:
    inputs = make_inputs(shape, grad=True)
    q, k, v, gamma, state = inputs
    expected = by_definition(*inputs, scale=shape[4] ** -0.5 if scale is None else scale)
    generator = torch.Generator().manual_seed(2)
    grad_o, grad_state = (
        torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in expected
    )
    grads = grad_o, grad_state
    expected_grads = gradients_of(expected, inputs, grads)
    for form in FORMS:
        results = form(q, k, v, gamma, initial_state=state, scale=scale)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(gradients_of(results, inputs, grads), expected_grads)
    for chunk, every in ((1, 1), (1, 5), (8, 1), (8, 2), (8, 16), (64, 16)):
        explicit = retention_backward(
            *grads,
            q,
            k,
            v,
            gamma,
            initial_state=state,
            scale=scale,
            need_dgamma=True,
            chunk=chunk,
            checkpoint_every=every,
        )
        torch.testing.assert_close(explicit, expected_grads)


@pytest.mark.parametrize("absent", ["grad_o", "grad_state", "state"])
def test_what_is_absent_is_zero(absent: str) -> None:
    q, k, v, gamma, state = make_inputs(SHAPES[1])
    zero = torch.zeros_like(state)
    outputs = retention_recurrent(q, k, v, gamma, initial_state=zero)
    grad_o, grad_state = torch.randn_like(outputs[0]), torch.randn_like(outputs[1])
    options: dict[str, Any] = {"need_dgamma": True, "initial_state": state, "chunk": 16}
    if absent == "state":
        torch.testing.assert_close(retention_recurrent(q, k, v, gamma), outputs)
        results = retention_backward(
            grad_o, grad_state, q, k, v, gamma, **{**options, "initial_state": None}
        )
        options["initial_state"] = zero
    elif absent == "grad_o":
        results = retention_backward(None, grad_state, q, k, v, gamma, **options)
        grad_o = torch.zeros_like(grad_o)
    else:
        results = retention_backward(grad_o, None, q, k, v, gamma, **options)
        grad_state = torch.zeros_like(grad_state)
    explicit = retention_backward(grad_o, grad_state, q, k, v, gamma, **options)
    torch.testing.assert_close(results, explicit)


class Explicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(*inputs)
        q, k, v, gamma, state = inputs
        return retention_chunkwise(q, k, v, gamma, initial_state=state, chunk=3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, gamma, state = ctx.saved_tensors
        dq, dk, dv, dstate, dgamma = retention_backward(
            grads[0], grads[1], q, k, v, gamma, initial_state=state, chunk=3, need_dgamma=True
        )
        return dq, dk, dv, dgamma, dstate


def test_gradcheck() -> None:
    q, k, v, _, state = make_inputs((1, 4, 2, 7, 3, 2), grad=True)
    gamma = torch.tensor([0.02, 0.3, 0.97, 1 - 2**-12], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Explicit.apply, (q, k, v, gamma, state))


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_may_be_split_anywhere(
    form: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    q, k, v, gamma, state = make_inputs((1, 6, 3, 19, 8, 5))
    expected = retention_recurrent(q, k, v, gamma, initial_state=state)
    for cut in range(20):
        outputs, carried = [], state
        for part in (slice(cut), slice(cut, None)):
            o, carried = form(
                q[:, :, part], k[:, :, part], v[:, :, part], gamma, initial_state=carried
            )
            outputs.append(o)
        torch.testing.assert_close((torch.cat(outputs, 2), carried), expected)


@pytest.mark.parametrize("cut", [0, 1, 7, 18, 19])
def test_gradients_of_a_split_sequence_are_those_of_the_whole(cut: int) -> None:
    q, k, v, gamma, state = make_inputs((1, 6, 3, 19, 8, 5))
    o, last = retention_recurrent(q, k, v, gamma, initial_state=state)
    grad_o, grad_state = torch.randn_like(o), torch.randn_like(last)
    options: dict[str, Any] = {"need_dgamma": True, "chunk": 4}
    expected = retention_backward(
        grad_o, grad_state, q, k, v, gamma, initial_state=state, **options
    )
    first, second = slice(cut), slice(cut, None)
    middle = retention_chunkwise(
        q[:, :, first], k[:, :, first], v[:, :, first], gamma, initial_state=state
    )[1]
    after = retention_backward(
        grad_o[:, :, second],
        grad_state,
        q[:, :, second],
        k[:, :, second],
        v[:, :, second],
        gamma,
        initial_state=middle,
        **options,
    )
    before = retention_backward(
        grad_o[:, :, first],
        after[3],
        q[:, :, first],
        k[:, :, first],
        v[:, :, first],
        gamma,
        initial_state=state,
        **options,
    )
    for whole, a, b in zip(expected[:3], before[:3], after[:3], strict=True):
        torch.testing.assert_close(torch.cat((a, b), 2), whole)
    torch.testing.assert_close(before[3], expected[3])
    assert before[4] is not None
    assert after[4] is not None
    torch.testing.assert_close(before[4] + after[4], expected[4])


def test_the_parallel_form_is_the_masked_operation_with_the_decay_for_a_mask() -> None:
    q, k, v, gamma, _ = make_inputs(SHAPES[1])
    grad_o = torch.randn(1, 6, 40, 16, dtype=torch.float64)
    mask = decay_mask(gamma, 6, 40, 40, q.device)
    options: dict[str, Any] = {"scale": 0.5, "causal": True, "normalize": False}
    o, _ = retnet_attention(q, k, v, mask, **options)
    torch.testing.assert_close(o, retention_chunkwise(q, k, v, gamma, chunk=16)[0])
    grads = retention_backward(grad_o, None, q, k, v, gamma, chunk=16)
    masked = retnet_attention_backward(grad_o, q, k, v, mask, **options)
    torch.testing.assert_close(grads[:3], masked[:3])


def test_the_decay_mask_is_aligned_at_its_bottom_right() -> None:
    gamma = torch.tensor([0.5, 1.0], dtype=torch.float64)
    results = decay_mask(gamma, 2, 2, 3, gamma.device)
    expected = [[[0.5, 1, 0], [0.25, 0.5, 1]], [[1, 1, 0], [1, 1, 1]]]
    torch.testing.assert_close(results, torch.tensor(expected, dtype=torch.float64))
    results = decay_mask(gamma, 2, 3, 2, gamma.device)
    expected = [[[0, 0], [1, 0], [0.5, 1]], [[0, 0], [1, 0], [1, 1]]]
    torch.testing.assert_close(results, torch.tensor(expected, dtype=torch.float64))


def test_the_usual_decays_stay_below_one_where_fp32_rounds_them_to_it() -> None:
    log2 = default_log2_gamma(60)
    assert (log2 < 0).all()
    assert torch.equal((1 - 2.0 ** -torch.arange(5.0, 65.0))[20:], torch.ones(40))
    expected = [math.log1p(-(2.0 ** (-5 - h))) / math.log(2) for h in range(60)]
    torch.testing.assert_close(log2, torch.tensor(expected, dtype=torch.float64))
    q, k, v, _, state = make_inputs((1, 6, 6, 9, 4, 4))
    usual = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(6)], dtype=torch.float64)
    for form in FORMS:
        torch.testing.assert_close(
            form(q, k, v, initial_state=state), form(q, k, v, usual, initial_state=state)
        )


def test_long_sequences_stay_exact_for_every_gamma() -> None:
    q, k, v, gamma, state = make_inputs((1, 6, 1, 2**15 + 7, 2, 2))
    true_value = retention_chunkwise(q, k, v, gamma, initial_state=state, chunk=256)
    assert all(x.isfinite().all() for x in true_value)
    grads = torch.randn_like(true_value[0]), torch.randn_like(true_value[1])
    options: dict[str, Any] = {"need_dgamma": True, "chunk": 256}
    exact = retention_backward(*grads, q, k, v, gamma, initial_state=state, **options)
    low = q.float(), k.float(), v.float()
    results = retention_chunkwise(*low, gamma, initial_state=state.float(), chunk=128)
    rounded = retention_backward(
        grads[0].float(), grads[1].float(), *low, gamma, initial_state=state.float(), **options
    )
    # The terms of gamma's gradient can be far larger than their sum; fp32 states bring their rounding into them.
    tolerances = [2e-6] * (len(true_value) + len(exact) - 1) + [1e-4]
    for a, b, tolerance in zip(
        (*results, *rounded), (*true_value, *exact), tolerances, strict=True
    ):
        assert a is not None
        assert b is not None
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_the_state_of_a_gamma_near_one_fades_as_it_should_in_fp32() -> None:
    tokens = 5000
    q = torch.zeros(1, 30, tokens, 1)
    state = torch.ones(1, 30, 1, 1)
    expected = (1 - 2.0 ** -torch.arange(5.0, 35.0, dtype=torch.float64)) ** tokens
    for form in (retention_recurrent, retention_chunkwise):
        results = form(q, q, q, initial_state=state)[1]
        assert results.dtype == torch.float32
        torch.testing.assert_close(results.flatten().double(), expected, rtol=3e-6, atol=1e-38)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_rounds_in_the_input_dtype_and_passes_its_own_rule(dtype: torch.dtype) -> None:
    q, k, v, gamma, state = make_inputs((2, 6, 3, 83, 16, 24), dtype, grad=True)
    ref = retention_chunkwise(q, k, v, gamma, initial_state=state)
    low = retention_low(q, k, v, gamma, initial_state=state, chunk=32)
    assert (ref[0].dtype, ref[1].dtype) == (torch.float32, torch.float32)
    assert (low[0].dtype, low[1].dtype) == (dtype, torch.float32)
    for results, true_value in zip(low, ref, strict=True):
        assert not torch.equal(results.float(), true_value)
        assert check(results.detach(), true_value.detach(), results.detach())
    grads = torch.randn_like(low[0]), torch.randn_like(low[1])
    excuse = torch.autograd.grad(low, (q, k, v, state, gamma), grads)
    options: dict[str, Any] = {"initial_state": state, "need_dgamma": True}
    references = retention_backward(*grads, q, k, v, gamma, dtype=torch.float64, **options)
    found_grads = retention_backward(*grads, q, k, v, gamma, **options)
    precise = retention_backward(*grads, q.double(), k.double(), v.double(), gamma, **options)
    arguments = (q, k, v, state, gamma)
    for grad, x, true, exact, rounded in zip(
        found_grads, arguments, references, precise, excuse, strict=True
    ):
        assert grad is not None
        assert true is not None
        assert exact is not None
        assert grad.dtype == x.dtype
        assert torch.equal(true, exact.to(x.dtype))
        assert check(grad, exact.double(), rounded)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.0000001, 2.0, math.nan, math.inf])
def test_a_gamma_out_of_range_is_named(value: float) -> None:
    q, k, v, gamma, _ = make_inputs(SHAPES[0])
    gamma[4] = value
    for form in FORMS:
        with pytest.raises(UnsupportedProblemError, match=r"\(0, 1\]") as error:
            form(q, k, v, gamma)
        assert f"got {value} for head 4" in str(error.value)
    with pytest.raises(UnsupportedProblemError, match=r"\(0, 1\]"):
        retention_backward(q, None, q, k, v, gamma)


@pytest.mark.parametrize("gamma", [torch.ones(5), torch.ones(1), torch.ones(6).long()])
def test_a_gamma_of_another_shape_or_kind_is_named(gamma: torch.Tensor) -> None:
    q, k, v, _, _ = make_inputs(SHAPES[0])
    with pytest.raises(UnsupportedProblemError, match=r"gamma must be floats \[6\]") as error:
        retention_chunkwise(q, k, v, gamma)
    assert str(list(gamma.shape)) in str(error.value)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(2, 6, 5, 8), r"\[2, 6, 8, 5\], got \[2, 6, 5, 8\]"),
        (torch.zeros(6, 8, 5), r"got \[6, 8, 5\]"),
        (torch.zeros(2, 6, 8, 5).half(), r"float32 or float64, got torch.float16"),
        (torch.zeros(2, 6, 8, 5).long(), r"float32 or float64, got torch.int64"),
    ],
)
def test_a_state_of_another_shape_or_dtype_is_named(state: torch.Tensor, message: str) -> None:
    q, k, v, gamma, _ = make_inputs(SHAPES[0])
    for form in FORMS:
        with pytest.raises(UnsupportedProblemError, match=f"initial_state must be .*{message}"):
            form(q, k, v, gamma, initial_state=state)
    with pytest.raises(UnsupportedProblemError, match=f"initial_state must be .*{message}"):
        retention_backward(None, None, q, k, v, gamma, initial_state=state)
    with pytest.raises(UnsupportedProblemError, match=f"grad_state must be .*{message}"):
        retention_backward(None, state, q, k, v, gamma)


def test_what_contradicts_itself_is_named() -> None:
    q, k, v, gamma, _ = make_inputs(SHAPES[1])
    with pytest.raises(UnsupportedProblemError, match="agree in batch, seqlen"):
        retention_chunkwise(q, k[:, :, :-1], v, gamma)
    with pytest.raises(UnsupportedProblemError, match="agree in batch, seqlen"):
        retention_chunkwise(q, k, v[:, :, :-1], gamma)
    with pytest.raises(UnsupportedProblemError, match="multiple of heads_kv, got 5 and 2"):
        retention_chunkwise(q[:, :5], k, v, gamma[:5])
    with pytest.raises(UnsupportedProblemError, match="at least 1 token, got 0"):
        retention_chunkwise(q, k, v, gamma, chunk=0)
    with pytest.raises(UnsupportedProblemError, match="at least 1 chunk, got 0"):
        retention_backward(None, None, q, k, v, gamma, checkpoint_every=0)
    with pytest.raises(UnsupportedProblemError, match="needs a gamma, got None"):
        retention_backward(None, None, q, k, v, need_dgamma=True)
