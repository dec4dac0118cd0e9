"""Launch plans of retnet, driven on the CPU: a host-side library stands in for a GPU kernel, all else is real."""

from __future__ import annotations

import ctypes
import gc
import math
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.api.retnet import autograd as retnet_autograd
from attention_autotuner.api.retnet import plan as retnet_plan
from attention_autotuner.api.retnet.checks import Backward, Forward, Rules
from attention_autotuner.api.shared import gammas, launch
from attention_autotuner.core import abi
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import NotWarmError, UnsupportedProblemError
from attention_autotuner.operations.retention.reference import decay_mask
from attention_autotuner.reference import (
    retnet_attention,
    retnet_attention_backward,
)
from attention_autotuner.serving import dispatch
from tests import gradients
from tests.fake_kernels import CPU, STREAM, FakeDispatch, serve_fakes

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

PROBLEM = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=7, seqlen_k=8, dim_qk=16, dim_v=24)
RULES = Rules(0.3, False, True, None, False)
GAMMA = (0.9, 0.5, 0.99, 1.0)
CHOICES = [
    RULES,
    RULES._replace(causal=True, scale=-1.5),
    RULES._replace(normalize=False),
    RULES._replace(r_grad=True),
    RULES._replace(r_grad=True, r_clamp_max=2.0, causal=True),
]


@pytest.fixture
def fake(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDispatch]:
    with serve_fakes(fake_kernel, monkeypatch, source="fake_retnet.c") as fake:
        yield fake


def there(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors that are not None."""
    return [x for x in tensors if x is not None]


class Call:
    """The arguments of a call and of its gradient, each of which a test may replace."""

    def __init__(
        self,
        problem: Problem = PROBLEM,
        rules: Rules = RULES,
        *,
        factors: str = "mask",
    ) -> None:
        self.q, self.k, self.v = gradients.make(problem, requires_grad=False)
        generator = torch.Generator().manual_seed(1)
        heads, rows, keys = problem.heads_q, problem.seqlen_q, problem.seqlen_k
        self.mask: torch.Tensor | None = None
        self.log2: torch.Tensor | None = None
        self.gamma: tuple[float, ...] | None = None
        if factors in ("mask", "shared"):
            heads = 1 if factors == "shared" else heads
            self.mask = torch.randn((heads, rows, keys), generator=generator).half()
        elif factors == "tensor":
            self.log2 = torch.tensor(GAMMA).log2()
        elif factors == "numbers":
            self.gamma = GAMMA
        self.rules, self.device_type = rules, ""
        self.need_dmask, self.deterministic = self.mask is not None, False
        shape = (problem.batch, problem.heads_q, rows, problem.dim_v)
        self.grad_o = torch.randn(shape, generator=generator).half()

    @property
    def factors(self) -> tuple[Any, Any, Any]:
        return self.mask, self.log2, self.gamma

    @property
    def reference(self) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        mask = self.mask
        if mask is None:
            gamma = None
            if self.log2 is not None or self.gamma is not None:
                gamma = torch.tensor(GAMMA, dtype=torch.float64)
            mask = decay_mask(
                gamma, self.q.shape[1], self.q.shape[2], self.k.shape[2], self.q.device
            )
        options = {**self.rules._asdict(), "causal": self.rules.causal or self.mask is None}
        return (self.q, self.k, self.v, mask), options

    def forward(self, *, return_r: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = (self.q, self.k, self.v, *self.factors, *self.rules)
        return retnet_plan.retnet_forward(
            Forward._make((*inputs, self.device_type, return_r, False))
        )

    def backward(self) -> retnet_plan.Gradients:
        tensors, options = self.reference
        o, r = retnet_attention(*tensors, **options)
        saved = (
            o.half() if self.rules.r_grad else None,
            r.float() if self.rules.normalize else None,
        )
        inputs = (self.grad_o, self.q, self.k, self.v, *self.factors)
        wanted = (self.need_dmask, self.deterministic)
        call = Backward._make((*inputs, *saved, *self.rules, self.device_type, *wanted))
        return retnet_plan.retnet_backward(call)

    def check_results(self, o: torch.Tensor, r: torch.Tensor | None) -> None:
        tensors, options = self.reference
        expected_o, expected_r = retnet_attention(*tensors, **options)
        torch.testing.assert_close(o.float(), expected_o, rtol=2e-3, atol=2e-3)
        if r is not None:
            torch.testing.assert_close(r, expected_r, rtol=1e-4, atol=1e-4)

    def check_gradients(self, results: retnet_plan.Gradients) -> None:
        tensors, options = self.reference
        expected = retnet_attention_backward(
            self.grad_o, *tensors, need_dmask=self.need_dmask, **options
        )
        for mine, exact in zip(results, expected, strict=True):
            assert (mine is None) == (exact is None)
            if mine is not None and exact is not None:
                torch.testing.assert_close(mine, exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rules", CHOICES)
@pytest.mark.parametrize("factors", ["mask", "shared", "tensor", "numbers", "usual"])
def test_results_through_the_c_abi(fake: FakeDispatch, factors: str, rules: Rules) -> None:
    call = Call(rules=rules, factors=factors)
    for _ in range(3):  # cold, then warm
        call.check_results(*call.forward())
        call.check_gradients(call.backward())
    assert len(fake.asked) == 2
    assert fake.read("launch_count") == 3
    assert fake.read("launch_count", direction="backward") == 3
    assert fake.read("last_stream", ctypes.c_void_p) == STREAM


@pytest.mark.parametrize("rows", [1, 5, 11])
def test_decays_of_other_lengths(fake: FakeDispatch, rows: int) -> None:
    call = Call(replace(PROBLEM, seqlen_q=rows), factors="numbers")
    call.check_results(*call.forward())
    call.check_gradients(call.backward())


def test_poisoned_memory_shows_in_nothing(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients.poison(monkeypatch)
    call = Call(rules=RULES._replace(causal=True))
    call.check_results(*call.forward())
    call.check_gradients(call.backward())


def test_r_is_there_only_where_it_is_wanted(fake: FakeDispatch) -> None:
    call = Call()
    o, r = call.forward(return_r=False)
    assert r is None
    call.check_results(o, r)


def test_the_problem_is_described_to_dispatch(fake: FakeDispatch) -> None:
    call = Call()
    call.device_type, call.deterministic = "A100", True
    call.forward()
    call.backward()
    explicit = replace(PROBLEM, op="retnet", mask="explicit")
    assert [asked[0] for asked in fake.asked] == [
        explicit,
        replace(explicit, direction="backward", deterministic=True),
    ]
    assert fake.asked[0][1:] == (("A100", CPU), False)
    Call(factors="usual").forward()
    assert fake.asked[-1][0] == replace(PROBLEM, op="retnet", mask="decay", causal=True)


@pytest.mark.parametrize("layout", gradients.LAYOUTS[:4])
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_inputs_are_read_where_they_lie(
    fake: FakeDispatch, layout: gradients.Layout, names: str
) -> None:
    call = Call()
    expected, gradients_expected = call.forward(), call.backward()
    for name in names:
        setattr(call, name, layout(getattr(call, name)))
    assert gradients.same_bits(there(*call.forward()), there(*expected))
    results = call.backward()
    assert gradients.same_bits(there(*results), there(*gradients_expected))
    narrow = layout in (gradients.unaligned, gradients.odd_rows)
    assert all(asked[0].alignment_bytes == (2 if narrow else 16) for asked in fake.asked[-2:])


MASK_LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "rows between others": (lambda m: torch.cat([m, m], -1)[..., : m.shape[2]], 16),
    "heads last but one": (lambda m: m.transpose(0, 1).contiguous().transpose(0, 1), 16),
    "between 16 bytes": (gradients.unaligned, 2),
    "odd rows": (gradients.odd_rows, 2),
    "one row for all": (lambda m: m[:, :1].expand(m.shape), 16),
    "one head for all": (lambda m: m[:1].expand(m.shape), 16),
}


@pytest.mark.parametrize("kind", MASK_LAYOUTS)
def test_masks_are_read_where_they_lie(fake: FakeDispatch, kind: str) -> None:
    layout, width = MASK_LAYOUTS[kind]
    call = Call()
    assert call.mask is not None
    call.mask = layout(call.mask)
    call.check_results(*call.forward())
    assert fake.asked[-1][0].alignment_bytes == width
    results = call.backward()
    call.check_gradients(results)
    assert fake.asked[-1][0].alignment_bytes == width
    assert results[3] is not None
    assert results[3].is_contiguous()


def test_a_mask_with_an_odd_number_of_keys_has_narrow_rows(fake: FakeDispatch) -> None:
    call = Call(replace(PROBLEM, seqlen_k=5))
    call.check_results(*call.forward())
    Call(replace(PROBLEM, seqlen_q=1, seqlen_k=8)).forward()
    assert [asked[0].alignment_bytes for asked in fake.asked] == [2, 16]


def test_heads_that_share_memory_have_gradients_of_their_own(fake: FakeDispatch) -> None:
    call = Call()
    assert call.mask is not None
    call.mask = call.mask[:1].expand(call.mask.shape)
    call.check_gradients(call.backward())
    single = Call(factors="shared")
    single.mask, single.grad_o = call.mask[:1], call.grad_o
    dmask, summed = call.backward()[3], single.backward()[3]
    assert dmask is not None
    assert summed is not None
    assert not torch.equal(dmask[0], dmask[1])
    torch.testing.assert_close(dmask.float().sum(0), summed[0].float(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("layout", [*gradients.LAYOUTS, gradients.one_value])
def test_gradients_that_kernels_cannot_read_are_copied(
    fake: FakeDispatch, layout: gradients.Layout
) -> None:
    call = Call(rules=RULES._replace(r_grad=True))
    call.grad_o = layout(call.grad_o)
    for _ in range(2):
        call.check_gradients(call.backward())
    assert fake.asked[-1][0].alignment_bytes == 16


def test_only_a_gradient_of_the_mask_that_is_wanted_takes_memory(fake: FakeDispatch) -> None:
    call = Call()
    call.need_dmask = False
    assert call.backward()[3] is None
    (without,) = retnet_plan.BACKWARD_PLANS.values()
    assert without.workspace_bytes == 0
    call.need_dmask = True
    call.backward()
    assert [p.workspace_bytes for p in retnet_plan.BACKWARD_PLANS.values()] == [0, 4 * 4 * 7 * 8]


def test_anything_that_matters_makes_another_plan(fake: FakeDispatch) -> None:
    calls = [Call(rules=rules) for rules in CHOICES]
    calls += [Call(factors=factors) for factors in ("shared", "tensor", "numbers", "usual")]
    calls.append(Call(replace(PROBLEM, seqlen_k=16)))
    other = Call(factors="numbers")
    other.gamma = (0.9, 0.5, 0.98, 1.0)
    calls.append(other)
    for number, call in enumerate(calls):
        call.forward()
        call.forward()
        assert len(retnet_plan.FORWARD_PLANS) == number + 1
    with settings.override(mode="off"):
        calls[0].forward()
    dispatch.invalidate()
    calls[0].forward()
    assert len(fake.asked) == len(calls) + 2


def test_bad_arguments_are_refused_and_make_no_plan(fake: FakeDispatch) -> None:
    call = Call()
    call.forward()
    call.backward()
    asked = len(fake.asked)
    for name, value, message in (
        ("mask", torch.zeros(4, 7, 9).half(), r"mask must be \[4 or 1, 7, 8\], got \[4, 7, 9\]"),
        ("mask", torch.zeros(4, 7, 8), "mask must have q's dtype torch.float16, got torch.float32"),
        ("rules", RULES._replace(scale=math.inf), "scale must be finite in fp32, got inf"),
        ("rules", RULES._replace(r_clamp_max=0.5), "at least 1, got 0.5"),
        ("grad_o", torch.zeros(2, 4, 7, 24), "gradient of o must be torch.float16"),
    ):
        kept = getattr(call, name)
        setattr(call, name, value)
        for _ in range(2):
            with pytest.raises(UnsupportedProblemError, match=message):
                call.backward() if name == "grad_o" else call.forward()
        setattr(call, name, kept)
    assert len(retnet_plan.FORWARD_PLANS) == len(retnet_plan.BACKWARD_PLANS) == 1
    assert len(fake.asked) == asked


def test_empty_outputs_need_no_kernel(fake: FakeDispatch) -> None:
    call = Call()
    for empty in (lambda x: x[:0], lambda x: x[:, :0]):
        q, k, v = empty(call.q), empty(call.k), empty(call.v)
        mask = torch.ones(1, 7, 8).half()
        factors = (mask, None, None)
        o, r = retnet_plan.retnet_forward(
            Forward._make((q, k, v, *factors, *RULES, "", True, False))
        )
        assert r is not None
        assert (o.shape, r.shape) == ((*q.shape[:3], 24), q.shape[:3])
        backward = Backward._make((o, q, k, v, *factors, None, r, *RULES, "", True, False))
        dq, dk, dv, dmask = retnet_plan.retnet_backward(backward)
        assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in (q, k, v)]
        assert dmask is not None
        assert torch.equal(dmask, torch.zeros_like(mask))
    assert not fake.asked


def test_decays_under_capture_must_be_there_and_stay(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(factors="numbers")
    call.gamma = (0.25, 0.5, 0.75, 0.875)
    call.forward()
    (plan,) = retnet_plan.FORWARD_PLANS.values()
    assert isinstance(plan, launch.Plan)
    kept = plan.keep
    assert kept is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call.forward()
    assert launch.CAPTURED[id(kept)] is kept
    assert gammas.ON_DEVICES[call.gamma, kept.device] is kept


def test_the_function_beside_the_dispatcher(fake: FakeDispatch) -> None:
    for rules in CHOICES:
        call = Call(rules=rules)
        assert call.mask is not None
        tensors = [x.requires_grad_() for x in (call.q, call.k, call.v, call.mask)]
        o, r = retnet_autograd.RetNetFunction.apply(*tensors, None, None, *rules, "", True, False)
        assert not r.requires_grad
        results = torch.autograd.grad(o, tensors, call.grad_o)
        alone = retnet_autograd.RetNetFunction.apply(*tensors, None, None, *rules, "", False, False)
        assert torch.equal(alone, o)
        again = torch.autograd.grad(alone, tensors[:3], call.grad_o)
        for x in tensors:
            x.requires_grad_(False)
        call.check_gradients((results[0], results[1], results[2], results[3]))
        assert gradients.same_bits(again, results[:3])


def test_plans_keep_no_tensor_alive(fake: FakeDispatch) -> None:
    call = Call(rules=RULES._replace(r_grad=True))
    results = there(*call.forward(), *call.backward())
    held = [weakref.ref(x) for x in (*results, call.q, call.mask, call.grad_o) if x is not None]
    del call, results
    gc.collect()
    assert all(reference() is None for reference in held)


def test_every_field_of_the_params_is_filled(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[abi.RetNetBackwardParams] = []

    def look(address: Any, *rest: Any) -> int:
        source = abi.RetNetBackwardParams.from_address(address.value)
        seen.append(abi.RetNetBackwardParams.from_buffer_copy(bytes(source)))
        return 0

    monkeypatch.setattr(fake.kernels["backward"], "launch_function", look)
    call = Call(rules=RULES._replace(r_grad=True, r_clamp_max=3.0, causal=True))
    call.q = gradients.transposed(call.q)
    dq, dk, dv, dmask = call.backward()
    (params,) = seen
    assert (params.struct_size, params.abi_version) == (ctypes.sizeof(params), abi.ABI_VERSION)
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v), ("dout", call.grad_o)):
        tensor = getattr(params, name)
        assert tensor.data == x.data_ptr(), name
        strides = (tensor.stride_batch, tensor.stride_head, tensor.stride_row)
        assert strides == x.stride()[:3], name
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert getattr(params, name).data == x.data_ptr(), name
    for name, plane in (("mask", call.mask), ("dmask", dmask)):
        assert plane is not None
        tensor = getattr(params, name)
        assert tensor.data == plane.data_ptr()
        assert (tensor.stride_head, tensor.stride_row) == plane.stride()[:2]
    assert params.o.data
    assert params.r
    assert params.log2_gamma is None
    scalars = {name: getattr(params, name) for name, _ in params._fields_[14:]}
    assert scalars == {
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "seqlen_q": 7,
        "seqlen_k": 8,
        "dim_qk": 16,
        "dim_v": 24,
        "causal": 1,
        "causal_offset": 1,
        "scale": pytest.approx(0.3),
        "r_grad": 1,
        "r_clamp_max": 3.0,
    }


def test_numbers_not_moved_yet_cannot_be_under_capture(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotWarmError, match="moved to the GPU first"):
        gammas.on_device((0.125,) * 4, 4, torch.device("cuda", 0))
