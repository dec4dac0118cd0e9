"""Gradients of the public op on a GPU: every layout, determinism on request, memory use, and torch's rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.api.attention.torch_op import BACKWARD_OP, FORWARD_OP
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.reference import attention_naive
from attention_autotuner.serving import dispatch
from tests import gradients
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu

HALF = Problem(
    direction="backward",
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=129,
    seqlen_k=191,
    dim_qk=64,
    dim_v=64,
)
SHAPES = (
    HALF,
    replace(HALF, causal=True),
    replace(HALF, causal=True, causal_alignment="top_left"),
    replace(HALF, dtype="bf16", causal=True),
    replace(HALF, heads_kv=1, seqlen_q=1, seqlen_k=300),
    replace(HALF, heads_kv=4, seqlen_q=257, seqlen_k=9),
    replace(HALF, seqlen_q=200, seqlen_k=70, causal=True),  # rows that see no key
    replace(HALF, dim_qk=40, dim_v=72, causal=True),
)
NARROW = replace(HALF, alignment_bytes=2)
REPEATABLE = replace(HALF, deterministic=True)
_BACKWARD = (*SHAPES, NARROW, REPEATABLE)
# Problems whose default kernels these tests run.
PROBLEMS = (*_BACKWARD, *(replace(p, direction="forward", deterministic=False) for p in _BACKWARD))
REPEATS = 20
LONG_CYCLES = 2_000_000_000  # a second on any present GPU


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


def make(problem: Problem = HALF, *, seed: int = 0) -> gradients.Three:
    return gradients.make(problem, seed=seed, device="cuda")


def mask_of(problem: Problem) -> dict[str, Any]:
    return {"causal": problem.causal, "causal_alignment": problem.causal_alignment}


def assert_right(
    computed: tuple[torch.Tensor, ...],
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    tensors: gradients.Three,
    **options: Any,
) -> None:
    errors = gradients.errors_of(computed, grad_o, grad_lse, tensors, **options)
    assert not errors, "; ".join(errors)


def random_like(x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device="cuda", dtype=x.dtype)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["o", "lse", "both"])
@pytest.mark.parametrize("problem", SHAPES, ids=Problem.describe)
def test_gradients_match_the_reference(problem: Problem, through: str) -> None:
    tensors = make(problem)
    o, lse = flash_attn_func(*tensors, return_lse=True, **mask_of(problem))
    grad_o = None if through == "lse" else random_like(o)
    grad_lse = None if through == "o" else random_like(lse)
    pairs = [(x, g) for x, g in ((o, grad_o), (lse, grad_lse)) if g is not None]
    computed = torch.autograd.grad([x for x, _ in pairs], tensors, [g for _, g in pairs])
    assert_right(computed, grad_o, grad_lse, tensors, **mask_of(problem))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(scale: float) -> None:
    tensors = make()
    o = flash_attn_func(*tensors, softmax_scale=scale)
    computed = torch.autograd.grad(o, tensors, random_like(o))
    assert_right(computed, random_like(o), None, tensors, softmax_scale=scale)


def test_rows_that_see_no_key_have_no_gradient() -> None:
    problem = replace(HALF, seqlen_q=200, seqlen_k=70, causal=True)
    tensors = make(problem)
    o, lse = flash_attn_func(*tensors, causal=True, return_lse=True)
    assert bool((lse[:, :, :130] == -math.inf).all())
    computed = torch.autograd.grad((o, lse), tensors, (random_like(o), random_like(lse)))
    assert not bool(computed[0][:, :, :130].any())
    assert all(bool(x.isfinite().all()) for x in computed)


def test_without_lse_the_result_is_the_same() -> None:
    tensors = make()
    alone = flash_attn_func(*tensors)
    pair = flash_attn_func(*tensors, return_lse=True)
    with torch.no_grad():
        plain = flash_attn_func(*tensors)
    assert gradients.same_bits((alone, alone), (pair[0], plain))


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", gradients.LAYOUTS[:4])
def test_inputs_of_any_layout(layout: gradients.Layout) -> None:
    q, k, v = (layout(x.detach()).requires_grad_() for x in make())
    o = flash_attn_func(q, k, v)
    computed = torch.autograd.grad(o, (q, k, v), random_like(o))
    assert_right(computed, random_like(o), None, (q, k, v))
    if layout is gradients.transposed:
        assert [g.stride() for g in computed] == [x.stride() for x in (q, k, v)]


def test_a_packed_projection() -> None:
    problem = replace(HALF, seqlen_q=191, heads_kv=4)
    packed = torch.stack([x.detach().transpose(1, 2) for x in make(problem)], dim=2)
    packed.requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    o = flash_attn_func(q, k, v)
    (computed,) = torch.autograd.grad(o, packed, random_like(o))
    split = tuple(x.transpose(1, 2) for x in computed.unbind(2))
    assert_right(split, random_like(o), None, (q, k, v))


@pytest.mark.parametrize("layout", [*gradients.LAYOUTS, gradients.one_row, gradients.one_value])
def test_gradients_of_o_of_any_layout(layout: gradients.Layout) -> None:
    tensors = make()
    o = flash_attn_func(*tensors)
    grad_o = layout(random_like(o))
    computed = torch.autograd.grad(o, tensors, grad_o)
    assert_right(computed, grad_o, None, tensors)


def test_a_sum() -> None:
    tensors = make()
    computed = torch.autograd.grad(flash_attn_func(*tensors).sum(), tensors)
    ones = torch.ones((2, 4, 129, 64), device="cuda", dtype=torch.float16)
    assert_right(computed, ones, None, tensors)


def test_gradients_of_lse_of_any_stride() -> None:
    tensors = make()
    _, lse = flash_attn_func(*tensors, return_lse=True)
    for grad_lse in (
        random_like(lse).mT.contiguous().mT,
        torch.ones_like(lse[:1, :1]).expand_as(lse),
    ):
        computed = torch.autograd.grad(lse, tensors, grad_lse, retain_graph=True)
        assert_right(computed, None, grad_lse, tensors)


def test_broadcast_keys_and_values() -> None:
    q, k, v = make()
    shared_k = k.detach()[:1].requires_grad_()
    o = flash_attn_func(q, shared_k.expand_as(k), v)
    computed = torch.autograd.grad(o, (q, shared_k, v), random_like(o))
    whole = shared_k.detach().expand_as(k).clone().requires_grad_()
    expected = torch.autograd.grad(flash_attn_func(q, whole, v), (q, whole, v), random_like(o))
    summed = expected[1].sum(0, keepdim=True)
    torch.testing.assert_close(computed[1], summed, rtol=1e-2, atol=1e-2)


# --- determinism ----------------------------------------------------------------------------------


def problems_asked(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that dispatch is asked for from now on."""
    asked: list[Problem] = []
    kernel_for = dispatch.kernel_for

    def record(problem: Problem, *arguments: Any, **options: Any) -> Any:
        asked.append(problem)
        return kernel_for(problem, *arguments, **options)

    monkeypatch.setattr(dispatch, "kernel_for", record)
    gradients.forget_plans()
    return asked


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("by", ["argument", "setting"])
def test_repeats_agree_bit_for_bit(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    asked = problems_asked(monkeypatch)
    tensors = make()

    def run(deterministic: bool | None) -> tuple[torch.Tensor, ...]:
        o, lse = flash_attn_func(*tensors, return_lse=True, deterministic=deterministic)
        return torch.autograd.grad((o, lse), tensors, (random_like(o), random_like(lse)))

    if by == "setting":
        with deterministic_algorithms():
            runs = [run(None) for _ in range(REPEATS)]
    else:
        runs = [run(True) for _ in range(REPEATS)]
    assert all(gradients.same_bits(runs[0], other) for other in runs[1:])
    assert [p.deterministic for p in asked if p.direction == "backward"] == [True]
    run(None)
    assert [p.deterministic for p in asked if p.direction == "backward"] == [True, False]


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_poisoned_memory_changes_no_gradient(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    gradients.poison(monkeypatch)
    try:
        tensors = make()
        o, lse = flash_attn_func(*tensors, return_lse=True, deterministic=deterministic)
        computed = torch.autograd.grad((o, lse), tensors, (random_like(o), random_like(lse)))
        assert_right(computed, random_like(o), random_like(lse), tensors)
    finally:
        monkeypatch.undo()
        gradients.forget_plans()


def test_memory_is_linear_in_the_sequence() -> None:
    problem = replace(HALF, batch=1, heads_q=2, heads_kv=2, seqlen_q=16384, seqlen_k=16384)
    tensors = make(problem)
    o = flash_attn_func(*tensors)
    grad_o = random_like(o)
    torch.autograd.grad(o, tensors, grad_o, retain_graph=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(o, tensors, grad_o)
    # Three gradients, dQ in fp32, LSE and delta; one head's scores alone would be 128 times Q.
    assert torch.cuda.max_memory_allocated() - before < 8 * tensors[0].nbytes


def test_insufficient_memory_is_torchs_error() -> None:
    problem = replace(HALF, batch=4, seqlen_q=16384, seqlen_k=16384)  # 32 MiB for dQ
    tensors = make(problem)
    o = flash_attn_func(*tensors)
    grad_o = random_like(o)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(o, tensors, grad_o, retain_graph=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(x.grad is None for x in tensors)
    computed = torch.autograd.grad(o, tensors, grad_o)
    assert all(bool(x.isfinite().all()) for x in computed)


# --- threads, streams and warm calls --------------------------------------------------------------


def test_autograd_threads_use_the_settings_of_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, str]] = []
    kernel_for = dispatch.kernel_for

    def record(problem: Problem, *arguments: Any, **options: Any) -> Any:
        seen.append((problem.direction, settings.current().mode))
        return kernel_for(problem, *arguments, **options)

    monkeypatch.setattr(dispatch, "kernel_for", record)
    gradients.forget_plans()
    tensors = make()
    torch.autograd.grad(flash_attn_func(*tensors).sum(), tensors)
    assert seen == [("forward", "off"), ("backward", "off")]


def test_the_backward_runs_on_the_stream_of_its_forward() -> None:
    tensors = make()
    grad_o = random_like(flash_attn_func(*tensors))
    torch.autograd.grad(flash_attn_func(*tensors), tensors, grad_o)
    poisoned = torch.full_like(grad_o, torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        o = flash_attn_func(*tensors)
        torch.cuda._sleep(LONG_CYCLES // 10)
        poisoned.copy_(grad_o)
        computed = torch.autograd.grad(o, tensors, poisoned)  # on another stream it would read NaN
    stream.synchronize()
    assert_right(computed, grad_o, None, tensors)


def test_a_warm_call_waits_for_nothing() -> None:
    tensors = make()
    grad_o = random_like(flash_attn_func(*tensors))

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flash_attn_func(*tensors), tensors, grad_o)

    kept = [run() for _ in range(12)]  # memory for all of them
    kept.clear()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    done = torch.cuda.Event()
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = [run() for _ in range(10)]
        assert not done.query(), "the calls came back only after the work before them was done"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(kept[-1], grad_o, None, tensors)


# --- torch's rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_ops_follow_torchs_rules(deterministic: bool) -> None:
    # Short enough that even nondeterministic kernels have only one order of sums: two runs are compared.
    tensors = make(replace(HALF, batch=1, seqlen_q=9, seqlen_k=11))
    rest = (None, True, False, "")
    torch.library.opcheck(FORWARD_OP, (*tensors, *rest, True, deterministic))
    plain = [x.detach() for x in tensors]
    o, lse = FORWARD_OP(*plain, *rest, True, deterministic)
    grads = (random_like(o), random_like(lse))
    for requires_grad in (False, True):
        for x in (*grads, *plain):
            x.requires_grad_(requires_grad)
        torch.library.opcheck(BACKWARD_OP, (*grads, *plain, o, lse, *rest, deterministic))


def test_the_op_without_lse_runs_again_for_its_gradient() -> None:
    tensors = make()
    o, _ = FORWARD_OP(*tensors, None, False, False, "", False, False)
    computed = torch.autograd.grad(o, tensors, random_like(o))
    assert_right(computed, random_like(o), None, tensors)


@pytest.mark.parametrize("changed", ["q", "k", "v", "o"])
def test_a_tensor_changed_before_the_backward_is_torchs_error(changed: str) -> None:
    tensors = make()
    o = flash_attn_func(*tensors)
    total = o.sum()
    with torch.no_grad():
        dict(zip("qkvo", (*tensors, o), strict=True))[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, tensors)


def test_a_second_backward_needs_the_graph() -> None:
    tensors = make()
    o = flash_attn_func(*tensors)
    torch.autograd.grad(o.sum(), tensors, retain_graph=True)
    torch.autograd.grad(o.sum(), tensors)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(o.sum(), tensors)


def test_gradients_that_do_not_fit_are_refused() -> None:
    tensors = make()
    o, lse = flash_attn_func(*tensors, return_lse=True)
    with pytest.raises(RuntimeError, match="device"):
        torch.autograd.grad(o, tensors, torch.zeros(o.shape).half(), retain_graph=True)
    plain = [x.detach() for x in (*tensors, o, lse)]
    rest = (None, False, False, "", False)
    for grad_o, message in (
        (random_like(o).float(), "gradient of o must be torch.float16"),
        (random_like(o)[..., :32], "gradient of o must have the shape"),
        (torch.zeros(o.shape).half(), "gradient of o must be on q's device"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            BACKWARD_OP(grad_o, None, *plain, *rest)


def test_double_backward_matches_the_reference() -> None:
    problem = replace(HALF, batch=1, seqlen_q=33, seqlen_k=47)
    tensors = make(problem)
    inputs_fp64 = [x.detach().double().requires_grad_() for x in tensors]
    grad_o = random_like(flash_attn_func(*tensors))

    def penalty(o: torch.Tensor, inputs: Any) -> torch.Tensor:
        first = torch.autograd.grad((o * grad_o).sum(), inputs, create_graph=True)
        return torch.stack([x.float().square().sum() for x in first]).sum()

    computed = torch.autograd.grad(penalty(flash_attn_func(*tensors), tensors), tensors)
    naive, _ = attention_naive(inputs_fp64[0], inputs_fp64[1], inputs_fp64[2], dtype=torch.float64)
    expected = torch.autograd.grad(penalty(naive, inputs_fp64), inputs_fp64)
    for mine, reference in zip(computed, expected, strict=True):
        largest = float(reference.abs().max())
        torch.testing.assert_close(mine.double(), reference, rtol=2e-2, atol=1e-2 * largest)


def test_another_policy_runs_on_this_gpu() -> None:
    tensors = make()
    o = flash_attn_func(*tensors, "A100")
    computed = torch.autograd.grad(o, tensors, random_like(o))
    assert_right(computed, random_like(o), None, tensors)
