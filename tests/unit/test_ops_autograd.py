"""Derivatives of attention: through the op, beside the dispatcher, in place, twice, deterministic, compiled."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.api.attention import (
    autograd,
)
from attention_autotuner.api.attention import (
    function as attention,
)
from attention_autotuner.api.attention import (
    plan as attention_plan,
)
from attention_autotuner.api.attention import (
    torch_op as library,
)
from attention_autotuner.api.shared import plain
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.reference import attention_naive
from tests import gradients
from tests.fake_kernels import FakeDispatch, serve_fakes

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

PROBLEM = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=6, seqlen_k=5, dim_qk=16, dim_v=24)
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "causal_alignment": "top_left"},
]


@pytest.fixture
def fake(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDispatch]:
    with serve_fakes(fake_kernel, monkeypatch) as fake:
        yield fake


def fast(tensors: gradients.Three, *, return_lse: bool = True, deterministic: bool = False) -> Any:
    """Attention beside the dispatcher, as flash_attn_func calls it for plain tensors on a GPU."""
    return autograd.differentiable_attention(
        *tensors, (0.4, True, False, ""), return_lse, deterministic
    )


# --- beside the dispatcher ------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_autograd_beside_the_dispatcher(fake: FakeDispatch, through: str) -> None:
    tensors = gradients.make(replace(PROBLEM, causal=True))
    o, lse = fast(tensors)
    grad_o = None if through == "lse" else torch.randn(o.shape).half()
    grad_lse = None if through == "o" else torch.randn(lse.shape)
    pairs = [(x, g) for x, g in ((o, grad_o), (lse, grad_lse)) if g is not None]
    results = torch.autograd.grad([x for x, _ in pairs], tensors, [g for _, g in pairs])
    wrong = gradients.errors_of(results, grad_o, grad_lse, tensors, softmax_scale=0.4, causal=True)
    assert not wrong
    assert [problem.direction for problem, _, _ in fake.asked] == ["forward", "backward"]
    assert fake.read("launch_count", direction="backward") == 1


@needs_compiler
def test_without_lse_the_gradients_are_the_same(fake: FakeDispatch) -> None:
    tensors = gradients.make(PROBLEM)
    alone, (o, _) = fast(tensors, return_lse=False), fast(tensors)
    assert torch.equal(alone, o)
    factors = torch.randn(o.shape).half()
    results = torch.autograd.grad(alone, tensors, factors)
    assert gradients.same_bits(results, torch.autograd.grad(o, tensors, factors))
    assert len(fake.asked) == 2


@needs_compiler
def test_gradients_of_views_and_of_sums(fake: FakeDispatch) -> None:
    tensors = gradients.make(PROBLEM)
    o = fast(tensors, return_lse=False)
    factors = torch.zeros(o.shape)
    for sum_of, weight in (
        (o.sum(), torch.ones_like(factors)),
        (o.transpose(1, 2).reshape(2, 6, -1)[..., ::2].sum(), None),
        (o[:, :, 3].sum(), factors.index_fill(2, torch.tensor(3), 1.0)),
    ):
        results = torch.autograd.grad(sum_of, tensors, retain_graph=True)
        if weight is None:
            flat = torch.zeros(2, 6, 4 * 24)
            flat[..., ::2] = 1.0
            weight = flat.view(2, 6, 4, 24).transpose(1, 2)
        options = {"softmax_scale": 0.4, "causal": True}
        assert not gradients.errors_of(results, weight.half(), None, tensors, **options)


@needs_compiler
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_choice_of_the_forward_call_reaches_the_backward(
    fake: FakeDispatch, deterministic: bool
) -> None:
    tensors = gradients.make(PROBLEM)
    o = fast(tensors, return_lse=False, deterministic=deterministic)
    torch.autograd.grad(o.sum(), tensors)
    assert [problem.deterministic for problem, _, _ in fake.asked] == [False, deterministic]


@needs_compiler
def test_saved_tensors_may_come_back_in_another_form(fake: FakeDispatch) -> None:
    tensors = gradients.make(PROBLEM)
    expected = torch.autograd.grad(fast(tensors, return_lse=False).sum(), tensors)

    def unpack(x: torch.Tensor) -> torch.Tensor:
        return gradients.odd_rows(x) if x.dim() == 4 else x.mT.contiguous().mT

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        o = fast(tensors, return_lse=False)
    assert gradients.same_bits(torch.autograd.grad(o.sum(), tensors), expected)


@needs_compiler
def test_batched_gradients(fake: FakeDispatch) -> None:
    tensors = gradients.make(PROBLEM)
    o = fast(tensors, return_lse=False)
    factors = torch.randn(3, *o.shape).half()
    results = torch.autograd.grad(o, tensors, factors, retain_graph=True, is_grads_batched=True)
    for index in range(3):
        single = tuple(x[index] for x in results)
        options = {"softmax_scale": 0.4, "causal": True}
        assert not gradients.errors_of(single, factors[index], None, tensors, **options)


class Subclass(torch.Tensor):
    """A tensor that may do anything."""


def test_only_plain_tensors_pass_by_the_dispatcher() -> None:
    x = torch.zeros(2, 2, 3, 8).half()
    assert plain.are_plain(x, None, torch.nn.Parameter(x))
    for other in (
        x.as_subclass(Subclass),
        torch._neg_view(x),
        torch._efficientzerotensor(x.shape, dtype=x.dtype),
        x[:0],
        x.to_sparse(),
        x.to("meta"),
    ):
        assert not plain.are_plain(x, other)
    seen = []

    def look(y: torch.Tensor) -> torch.Tensor:
        seen.append(plain.are_plain(x))
        return y

    torch.vmap(look)(x)
    with torch.utils._python_dispatch.TorchDispatchMode():
        seen.append(plain.are_plain(x))
    assert seen == [False, False]


# --- torch's rules, both ways ---------------------------------------------------------------------


def through_dispatcher(tensors: gradients.Three, **options: Any) -> torch.Tensor:
    o: torch.Tensor = flash_attn_func(*tensors, causal=True, softmax_scale=0.4, **options)
    return o


def beside_dispatcher(tensors: gradients.Three) -> torch.Tensor:
    o: torch.Tensor = fast(tensors, return_lse=False)
    return o


Way = Callable[[gradients.Three], torch.Tensor]


@pytest.fixture(params=["dispatcher", "beside"])
def way(request: pytest.FixtureRequest) -> Way:
    if request.param == "dispatcher":
        return through_dispatcher
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    request.getfixturevalue("fake")
    return beside_dispatcher


def test_a_second_backward_needs_the_graph(way: Way) -> None:
    tensors = gradients.make(PROBLEM)
    o = way(tensors)
    first = torch.autograd.grad(o.sum(), tensors, retain_graph=True)
    again = torch.autograd.grad(o.sum(), tensors)
    assert gradients.same_bits(first, again)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(o.sum(), tensors)


@pytest.mark.parametrize("changed", ["q", "k", "v", "o"])
def test_what_is_changed_in_between_is_torchs_error(way: Way, changed: str) -> None:
    tensors = gradients.make(PROBLEM)
    o = way(tensors)
    total = o.sum()
    with torch.no_grad():
        dict(zip("qkvo", (*tensors, o), strict=True))[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, tensors)


def test_gradients_that_do_not_fit_are_torchs_error(way: Way) -> None:
    tensors = gradients.make(PROBLEM)
    o = way(tensors)
    with pytest.raises(RuntimeError, match="shape"):
        torch.autograd.grad(o, tensors, torch.zeros(2, 4, 6, 16).half(), retain_graph=True)
    with pytest.raises(RuntimeError, match="device"):
        torch.autograd.grad(
            o, tensors, torch.zeros(o.shape, device="meta").half(), retain_graph=True
        )
    # Another dtype is cast by torch before we see it.
    factors = torch.randn(o.shape)
    precise = torch.autograd.grad(o, tensors, factors, retain_graph=True)
    assert gradients.same_bits(precise, torch.autograd.grad(o, tensors, factors.half()))


def test_a_gradient_that_is_sparse_is_refused(way: Way) -> None:
    tensors = gradients.make(PROBLEM)
    o = way(tensors)
    with pytest.raises(UnsupportedProblemError, match="must be a dense strided tensor"):
        torch.autograd.grad(o, tensors, torch.ones(o.shape).half().to_sparse())


def test_a_gradient_with_a_tangent_is_refused(way: Way) -> None:
    tensors = gradients.make(PROBLEM)
    o = way(tensors)
    factors = torch.randn(o.shape).half()
    with forward_ad.dual_level():
        torch.autograd.grad(o, tensors, factors, retain_graph=True)  # none, no complaint
        dual = forward_ad.make_dual(factors, torch.ones_like(factors))
        with pytest.raises(UnsupportedProblemError, match="no forward-mode derivative"):
            torch.autograd.grad(o, tensors, dual)


def test_only_what_requires_grad_gets_one(way: Way) -> None:
    q, k, v = gradients.make(PROBLEM, requires_grad=False)
    v.requires_grad_()
    torch.autograd.backward(way((q, k, v)).sum())
    assert (q.grad, k.grad) == (None, None)
    assert v.grad is not None
    assert v.grad.shape == v.shape


def test_activation_checkpointing(way: Way) -> None:
    tensors = gradients.make(PROBLEM)
    expected = torch.autograd.grad(way(tensors).sum(), tensors)
    o = checkpoint(lambda q, k, v: way((q, k, v)), *tensors, use_reentrant=False)
    assert gradients.same_bits(torch.autograd.grad(o.sum(), tensors), expected)


def test_double_backward_is_the_references(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    tensors = gradients.make(PROBLEM)
    precise = [x.detach().double().requires_grad_() for x in tensors]
    generator = torch.Generator().manual_seed(3)
    factors = torch.randn(2, 4, 6, 24, generator=generator).half()

    def penalty(o: torch.Tensor, inputs: Any) -> torch.Tensor:
        first = torch.autograd.grad((o * factors).sum(), inputs, create_graph=True)
        total: torch.Tensor = sum(x.float().square().sum() for x in first)
        return total

    results = torch.autograd.grad(penalty(way(tensors), tensors), tensors)
    naive, _ = attention_naive(*precise, softmax_scale=0.4, causal=True, dtype=torch.float64)
    expected = torch.autograd.grad(penalty(naive, precise), precise)
    for mine, exact in zip(results, expected, strict=True):
        largest = float(exact.abs().max())
        torch.testing.assert_close(mine.double(), exact, rtol=1e-2, atol=5e-3 * largest)


def test_a_weight_on_lse_takes_part_in_double_backward() -> None:
    tensors = gradients.make(replace(PROBLEM, seqlen_k=9))
    precise = [x.detach().double().requires_grad_() for x in tensors]

    def penalty(pair: Any, inputs: Any) -> torch.Tensor:
        o, lse = pair
        first = torch.autograd.grad(o.sum() + lse.square().sum(), inputs, create_graph=True)
        total: torch.Tensor = sum(x.float().square().sum() for x in first)
        return total

    mine = penalty(flash_attn_func(*tensors, causal=True, return_lse=True), tensors)
    exact = penalty(attention_naive(*precise, causal=True, dtype=torch.float64), precise)
    for x, y in zip(
        torch.autograd.grad(mine, tensors), torch.autograd.grad(exact, precise), strict=True
    ):
        torch.testing.assert_close(x.double(), y, rtol=1e-2, atol=5e-3 * float(y.abs().max()))


def test_empty_tensors_can_be_differentiated_twice() -> None:
    q, k, v = (x[:0].detach().requires_grad_() for x in gradients.make(PROBLEM))
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q, create_graph=True)
    assert torch.autograd.grad(dq.sum(), k)[0].shape == k.shape


def test_the_settings_of_the_forward_hold_in_the_threads_of_the_backward(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = gradients.make(PROBLEM)
    seen: list[settings.Settings] = []

    def look(function: Callable[..., Any]) -> Callable[..., Any]:
        def looking(*arguments: Any) -> Any:
            seen.append(settings.current())
            return function(*arguments)

        return looking

    monkeypatch.setattr(autograd, "BACKWARD_OP", look(library.BACKWARD_OP))
    for name in ("attention_backward", "plain_backward"):
        monkeypatch.setattr(attention_plan, name, look(getattr(attention_plan, name)))
    with settings.override(mode="off") as in_force:
        o = way(tensors)
        thread = threading.Thread(target=lambda: torch.autograd.backward(o.sum()))
        thread.start()
        thread.join()
    assert tensors[0].grad is not None
    assert len(seen) == 1
    assert seen[0] is in_force


# --- the op by itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [(False, False), (True, False), (True, True)])
def test_the_op_without_lse_runs_again_for_its_gradient(mask: tuple[bool, bool]) -> None:
    tensors = gradients.make(PROBLEM)
    rest = (0.4, *mask, "")
    o, nothing = library.FORWARD_OP(*tensors, *rest, False, False)
    assert nothing.shape == (0,)
    factors = torch.randn(o.shape).half()
    results = torch.autograd.grad(o, tensors, factors)
    full, _ = library.FORWARD_OP(*tensors, *rest, True, False)
    assert gradients.same_bits(results, torch.autograd.grad(full, tensors, factors))


def test_that_second_run_gives_the_backward_its_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = gradients.make(PROBLEM)
    o, _ = library.FORWARD_OP(*tensors, 0.4, True, False, "A100", False, True)
    expected = library.FORWARD_OP(*tensors, 0.4, True, False, "A100", True, True)
    seen: list[tuple[Any, ...]] = []

    def look(*arguments: Any) -> Any:
        seen.append(arguments)
        return library.BACKWARD_OP(*arguments)

    monkeypatch.setattr(autograd, "BACKWARD_OP", look)
    torch.autograd.grad(o.sum(), tensors)
    (arguments,) = seen
    assert torch.equal(arguments[5], expected[0])
    assert torch.equal(arguments[6], expected[1])
    assert arguments[7:] == (0.4, True, False, "A100", True)


def watch_forward(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of the op beside the tensors."""
    seen: list[tuple[Any, ...]] = []

    def look(*arguments: Any) -> Any:
        seen.append(arguments[3:])
        return library.FORWARD_OP(*arguments)

    monkeypatch.setattr(attention, "FORWARD_OP", look)
    return seen


def test_lse_is_computed_where_a_gradient_may_be_asked_for_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = watch_forward(monkeypatch)
    plain = gradients.make(PROBLEM, requires_grad=False)
    flash_attn_func(*plain)
    flash_attn_func(*plain, return_lse=True)
    for index in range(3):
        q, k, v = (x.clone().requires_grad_(i == index) for i, x in enumerate(plain))
        assert isinstance(flash_attn_func(q, k, v), torch.Tensor)
        with torch.no_grad():
            flash_attn_func(q, k, v)
    assert [call[4] for call in seen] == [False, True, *[True, False] * 3]


def test_deterministic_none_follows_torchs_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_forward(monkeypatch)
    tensors = gradients.make(PROBLEM)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for setting in (False, True):
            torch.use_deterministic_algorithms(setting)
            for choice in (None, False, True):
                flash_attn_func(*tensors, deterministic=choice)
    finally:
        torch.use_deterministic_algorithms(before)
    assert [call[5] for call in seen] == [False, False, True, True, False, True]


def test_the_ops_refuse_what_they_cannot_read() -> None:
    q, k, v = gradients.make(PROBLEM, requires_grad=False)
    o, lse = flash_attn_func(q, k, v, return_lse=True)
    rest = (None, False, False, "", False)
    for grad_o, message in (
        (o.float(), "gradient of o must be torch.float16"),
        (o[..., :16], "gradient of o must have the shape"),
        (None, "the gradient of o or of lse must be given"),
    ):
        for device in ("cpu", "meta"):
            tensors = [x if x is None else x.to(device) for x in (grad_o, None, q, k, v, o, lse)]
            with pytest.raises(UnsupportedProblemError, match=message):
                library.BACKWARD_OP(*tensors, *rest)


@pytest.mark.parametrize("layout", gradients.LAYOUTS)
def test_gradients_have_their_tensors_layout(layout: gradients.Layout) -> None:
    dense = gradients.make(PROBLEM, requires_grad=False)
    o, lse = flash_attn_func(*dense, return_lse=True)
    rest = (None, False, False, "", False)
    grad_o = torch.randn(o.shape).half()
    expected = library.BACKWARD_OP(grad_o, None, *dense, o, lse, *rest)
    results = library.BACKWARD_OP(layout(grad_o), None, *dense, o, lse, *rest)
    assert gradients.same_bits(results, expected)
    if layout is gradients.columns_first:
        return  # no layout of q, k and v
    moved = [layout(x) for x in dense]
    results = library.BACKWARD_OP(grad_o, None, *moved, o, lse, *rest)
    assert gradients.same_bits(results, expected)
    fakes = [x.to("meta") for x in (grad_o, *dense, o, lse)]
    shapes = library.BACKWARD_OP(fakes[0], None, *fakes[1:], *rest)
    assert [x.shape for x in shapes] == [x.shape for x in dense]


# --- the helpers that GPU tests use ---------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_the_judge_passes_what_is_right_and_names_what_is_not(mask: dict[str, Any]) -> None:
    tensors = gradients.make(PROBLEM)
    o, lse = flash_attn_func(*tensors, return_lse=True, **mask)
    grad_o, grad_lse = torch.randn_like(o), torch.randn_like(lse)
    results = list(torch.autograd.grad((o, lse), tensors, (grad_o, grad_lse)))
    assert gradients.errors_of(tuple(results), grad_o, grad_lse, tensors, **mask) == []
    results[1] = results[1] * 1.05
    (wrong,) = gradients.errors_of(tuple(results), grad_o, grad_lse, tensors, **mask)
    assert wrong.startswith("dk: ")


def test_the_block_learns() -> None:
    block = gradients.make_block(device="cpu", dtype=torch.float16)
    x = torch.randn(2, 9, 4 * 64).half()
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = gradients.loss_of(block, x)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
