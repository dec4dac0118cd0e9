"""Launch plans of retention, driven on the CPU: a host-side library stands in for a GPU kernel, all else is real."""

from __future__ import annotations

import ctypes
import gc
import math
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.api.retention import (
    autograd as retention_autograd,
)
from attention_autotuner.api.retention import (
    plan as retention_plan,
)
from attention_autotuner.api.retention.checks import Backward, Forward
from attention_autotuner.core import abi
from attention_autotuner.core.problem import Form, Problem
from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.reference import (
    default_log2_gamma,
    retention_backward,
    retention_recurrent,
)
from attention_autotuner.serving import dispatch
from tests import gradients
from tests.fake_kernels import CPU, STREAM, FakeDispatch, in_threads, serve_fakes

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

PROBLEM = Problem(
    op="retention",
    causal=True,
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=7,
    seqlen_k=7,
    dim_qk=16,
    dim_v=24,
)
GAMMA = (0.9, 0.5, 0.99, 1.0)
WAYS = ["tensor", "numbers", "usual"]


@pytest.fixture
def fake(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDispatch]:
    with serve_fakes(fake_kernel, monkeypatch, source="fake_retention.c") as fake:
        yield fake


def there(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors that are not None."""
    return [x for x in tensors if x is not None]


class Call:
    """The arguments of a call and of its gradient, each of which a test may replace."""

    def __init__(
        self, problem: Problem = PROBLEM, *, decays: str = "numbers", initial: bool = True
    ) -> None:
        self.q, self.k, self.v = gradients.make(problem, requires_grad=False)
        self.log2 = torch.tensor(GAMMA).log2() if decays == "tensor" else None
        self.gamma = GAMMA if decays == "numbers" else None
        generator = torch.Generator().manual_seed(1)
        shape = (problem.batch, problem.heads_q, problem.dim_qk, problem.dim_v)
        self.state = torch.randn(shape, generator=generator) if initial else None
        self.form: Form = "auto"
        self.scale: float | None = None
        self.device_type = ""
        self.grad_o: torch.Tensor | None = torch.randn(
            (*self.q.shape[:3], problem.dim_v), generator=generator
        ).half()
        self.grad_state: torch.Tensor | None = torch.randn(shape, generator=generator)
        self.need_state, self.need_gamma = initial, True

    @property
    def decays(self) -> torch.Tensor:
        if self.log2 is None and self.gamma is None:
            return default_log2_gamma(self.q.shape[1]).exp2()
        return torch.tensor(GAMMA, dtype=torch.float64)

    def forward(
        self, *, return_state: bool = True, in_place: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = (self.q, self.k, self.v, self.log2, self.gamma, self.state)
        call = Forward(*inputs, self.scale, self.form, self.device_type, return_state)
        return retention_plan.retention_forward(call, in_place)

    def backward(self) -> retention_plan.Gradients:
        call = Backward(
            self.grad_o,
            self.grad_state,
            self.q,
            self.k,
            self.v,
            self.log2,
            self.gamma,
            self.state,
            self.scale,
            self.device_type,
            self.need_state,
            self.need_gamma,
        )
        return retention_plan.retention_backward(call)

    def true_value(self) -> tuple[torch.Tensor, torch.Tensor]:
        return retention_recurrent(
            self.q, self.k, self.v, self.decays, scale=self.scale, initial_state=self.state
        )

    def check_results(self, o: torch.Tensor, state: torch.Tensor | None) -> None:
        expected_o, expected_state = self.true_value()
        torch.testing.assert_close(o.float(), expected_o, rtol=2e-3, atol=2e-3)
        if state is not None:
            torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-4)

    def check_gradients(self, results: retention_plan.Gradients) -> None:
        *expected, dgamma = retention_backward(
            self.grad_o,
            self.grad_state,
            self.q,
            self.k,
            self.v,
            self.decays,
            scale=self.scale,
            initial_state=self.state,
            need_dgamma=True,
        )
        assert dgamma is not None
        dlog2 = (dgamma * self.decays * math.log(2)).float()
        for mine, true_value in zip(results[:3], expected[:3], strict=True):
            torch.testing.assert_close(mine, true_value, rtol=1e-2, atol=1e-2)
        pairs: list[tuple[torch.Tensor | None, torch.Tensor, bool]] = [
            (results[3], expected[3], self.need_state),
            (results[4], dlog2, self.need_gamma),
        ]
        for got, exact, wanted in pairs:
            assert (got is not None) == wanted
            if got is not None:
                torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("decays", WAYS)
def test_results_through_the_c_abi(fake: FakeDispatch, decays: str, initial: bool) -> None:
    call = Call(decays=decays, initial=initial)
    for _ in range(3):  # cold, then warm
        call.check_results(*call.forward())
        call.check_gradients(call.backward())
    assert len(fake.asked) == 2
    assert fake.read("launch_count") == 3
    assert fake.read("last_stream", ctypes.c_void_p, direction="backward") == STREAM


@pytest.mark.parametrize("through", ["o", "state", "both"])
@pytest.mark.parametrize("need_state", [False, True])
@pytest.mark.parametrize("need_gamma", [False, True])
def test_gradients_of_what_is_wanted(
    fake: FakeDispatch, through: str, need_state: bool, need_gamma: bool
) -> None:
    call = Call()
    call.need_state, call.need_gamma = need_state, need_gamma
    if through == "o":
        call.grad_state = None
    if through == "state":
        call.grad_o = None
    call.check_gradients(call.backward())


def test_a_scale_reaches_the_kernels_and_makes_another_plan(fake: FakeDispatch) -> None:
    call = Call()
    for scale in (None, 0.7, 0.25, 0.7):
        call.scale = scale
        call.check_results(*call.forward())
        call.check_gradients(call.backward())
    assert len(retention_plan.FORWARD_PLANS) == len(retention_plan.BACKWARD_PLANS) == 3


def test_poisoned_memory_shows_in_nothing(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients.poison(monkeypatch)
    call = Call()
    call.check_results(*call.forward())
    call.check_gradients(call.backward())


@pytest.mark.parametrize("form", get_args(Form))
def test_the_problem_is_described_to_dispatch(fake: FakeDispatch, form: Form) -> None:
    call = Call()
    call.form, call.device_type = form, "A100"
    call.forward()
    call.backward()
    assert [asked[0] for asked in fake.asked] == [
        replace(PROBLEM, form=form),
        replace(PROBLEM, direction="backward"),
    ]
    assert fake.asked[0][1:] == (("A100", CPU), False)


def test_the_workspace_is_that_of_what_is_there(fake: FakeDispatch) -> None:
    call = Call()
    sizes = []
    for need_gamma in (False, True):
        call.need_gamma = need_gamma
        call.backward()
        sizes.append(list(retention_plan.BACKWARD_PLANS.values())[-1].workspace_bytes)
    assert 0 < sizes[0] < sizes[1]
    assert sizes[1] - sizes[0] == 4 * 16 * 24


def test_a_state_in_place_keeps_its_memory(fake: FakeDispatch) -> None:
    call = Call()
    assert call.state is not None
    kept = call.state.clone()
    expected_o, expected_state = call.forward()
    address = call.state.data_ptr()
    o, state = call.forward(return_state=False, in_place=True)
    assert state is None
    assert call.state.data_ptr() == address
    assert expected_state is not None
    assert torch.equal(call.state, expected_state)
    assert torch.equal(o, expected_o)
    call.state.copy_(kept)
    for _ in range(2):  # warm
        call.check_results(*call.forward())


STATE_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns first": gradients.columns_first,
    "heads last": gradients.transposed,
    "between 16 bytes": gradients.unaligned,
    "rows between others": gradients.padded,
}


@pytest.mark.parametrize("kind", STATE_LAYOUTS)
def test_states_of_any_layout(fake: FakeDispatch, kind: str) -> None:
    call = Call()
    assert call.state is not None
    assert call.grad_state is not None
    call.state = STATE_LAYOUTS[kind](call.state)
    call.grad_state = STATE_LAYOUTS[kind](call.grad_state)
    for _ in range(2):
        call.check_results(*call.forward())
        call.check_gradients(call.backward())
    with pytest.raises(UnsupportedProblemError, match="to be updated in place, got"):
        call.forward(return_state=False, in_place=True)


def test_one_state_for_all(fake: FakeDispatch) -> None:
    call = Call()
    assert call.state is not None
    call.state = call.state[:1, :1].expand(call.state.shape)
    call.check_results(*call.forward())
    call.check_gradients(call.backward())


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


@pytest.mark.parametrize("layout", [*gradients.LAYOUTS, gradients.one_row, gradients.one_value])
def test_gradients_that_kernels_cannot_read_are_copied(
    fake: FakeDispatch, layout: gradients.Layout
) -> None:
    call = Call()
    assert call.grad_o is not None
    call.grad_o = layout(call.grad_o)
    for _ in range(2):
        call.check_gradients(call.backward())
    assert fake.asked[-1][0].alignment_bytes == 16


def test_anything_that_matters_makes_another_plan(fake: FakeDispatch) -> None:
    calls = [Call(decays=decays, initial=initial) for decays in WAYS for initial in (False, True)]
    calls.append(Call(replace(PROBLEM, seqlen_q=8, seqlen_k=8)))
    other = Call()
    other.gamma = (0.9, 0.5, 0.98, 1.0)
    formed = Call()
    formed.form = "recurrent"
    for number, call in enumerate([*calls, other, formed]):
        call.forward()
        call.forward()
        assert len(retention_plan.FORWARD_PLANS) == number + 1
    with settings.override(mode="off"):
        calls[0].forward()
    dispatch.invalidate()
    calls[0].forward()
    assert len(fake.asked) == len(calls) + 4


def test_bad_arguments_are_refused_and_make_no_plan(fake: FakeDispatch) -> None:
    call = Call()
    call.forward()
    call.backward()
    asked = len(fake.asked)
    changes: list[tuple[str, Any, str]] = [
        ("state", torch.zeros(2, 4, 16, 16), r"\[2, 4, 16, 24\], got \[2, 4, 16, 16\]"),
        ("state", torch.zeros(2, 4, 16, 24).half(), "initial_state must be torch.float32"),
        ("gamma", (0.9, 0.5, 1.5, 1.0), r"gamma must lie in \(0, 1\], got 1.5 for head 2"),
        ("gamma", (0.9, 0.5), "one value for each of 4 heads of q, got 2"),
        ("log2", torch.zeros(4).double(), "log2_gamma must be contiguous float32"),
        ("form", "rolling", "form must be one of .* got 'rolling'"),
        ("grad_o", torch.zeros(2, 4, 7, 24), "gradient of o must be torch.float16"),
        ("grad_state", torch.zeros(2, 4, 16, 16), "gradient of the final state must be"),
    ]
    for name, value, message in changes:
        kept = getattr(call, name)
        setattr(call, name, value)
        for _ in range(2):
            with pytest.raises(UnsupportedProblemError, match=message):
                call.backward() if name.startswith("grad") else call.forward()
        setattr(call, name, kept)
    call.grad_o = call.grad_state = None
    with pytest.raises(UnsupportedProblemError, match="or of the final state must be given"):
        call.backward()
    assert len(retention_plan.FORWARD_PLANS) == len(retention_plan.BACKWARD_PLANS) == 1
    assert len(fake.asked) == asked


def test_a_state_that_is_not_there_cannot_be_updated(fake: FakeDispatch) -> None:
    with pytest.raises(UnsupportedProblemError, match="needs an initial_state, got None"):
        Call(initial=False).forward(return_state=False, in_place=True)


def test_empty_outputs_need_no_kernel(fake: FakeDispatch) -> None:
    call = Call()
    for empty in (lambda x: x[:0], lambda x: x[:, :0]):
        q, k, v = empty(call.q), empty(call.k), empty(call.v)
        assert call.state is not None
        before = empty(call.state)
        gamma = None
        o, state = retention_plan.retention_forward(
            Forward(q, k, v, None, gamma, before, None, "auto", "", True)
        )
        assert state is not None
        assert (o.shape, state.shape) == ((*q.shape[:3], 24), before.shape)
        results = retention_plan.retention_backward(
            Backward(o, state, q, k, v, None, gamma, before, None, "", True, True)
        )
        assert results[4] is not None
        assert torch.equal(results[4], torch.zeros(q.shape[1]))
    assert not fake.asked


@pytest.mark.parametrize("return_state", [False, True])
def test_the_function_beside_the_dispatcher(fake: FakeDispatch, return_state: bool) -> None:
    call = Call(decays="tensor")
    if not return_state:
        call.grad_state = None
    assert call.log2 is not None
    assert call.state is not None
    assert call.grad_o is not None
    tensors = [x.requires_grad_() for x in (call.q, call.k, call.v, call.log2, call.state)]
    results = retention_autograd.RetentionFunction.apply(
        *tensors[:4], None, tensors[4], None, "auto", "", return_state
    )
    outputs: list[tuple[torch.Tensor, torch.Tensor | None]] = [(results, call.grad_o)]
    if return_state:
        outputs = [(results[0], call.grad_o), (results[1], call.grad_state)]
    dq, dk, dv, dlog2, dstate = torch.autograd.grad(
        [o for o, _ in outputs], tensors, [g for _, g in outputs]
    )
    for x in tensors:
        x.requires_grad_(False)
    call.check_gradients((dq, dk, dv, dstate, dlog2))
    assert fake.read("launch_count", direction="backward") == 1


def test_threads_share_a_plan_without_mixing_their_pointers(fake: FakeDispatch) -> None:
    calls = [Call() for _ in range(4)]
    for index, call in enumerate(calls):
        call.q = call.q + index
    expected = [call.forward()[0] for call in calls]
    wrong: list[Call] = []

    def work(call: Call, true_value: torch.Tensor) -> None:
        wrong.extend(call for _ in range(50) if not torch.equal(call.forward()[0], true_value))

    in_threads(work, zip(calls, expected, strict=True))
    assert not wrong
    assert len(retention_plan.FORWARD_PLANS) == 1


def test_plans_keep_no_tensor_alive(fake: FakeDispatch) -> None:
    call = Call(decays="tensor")
    results = there(*call.forward(), *call.backward())
    held = [weakref.ref(x) for x in there(*results, call.q, call.state, call.log2)]
    del call, results
    gc.collect()
    assert all(reference() is None for reference in held)


def test_every_field_of_the_params_is_filled(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[abi.RetentionBackwardParams] = []

    def look(address: Any, *rest: Any) -> int:
        source = abi.RetentionBackwardParams.from_address(address.value)
        seen.append(abi.RetentionBackwardParams.from_buffer_copy(bytes(source)))
        return 0

    monkeypatch.setattr(fake.kernels["backward"], "launch_function", look)
    call = Call(decays="tensor")
    call.q = gradients.transposed(call.q)
    dq, dk, dv, dstate, _ = call.backward()
    (params,) = seen
    assert (params.struct_size, params.abi_version) == (ctypes.sizeof(params), abi.ABI_VERSION)
    assert call.grad_o is not None
    rows = {"q": call.q, "k": call.k, "v": call.v, "dout": call.grad_o, "dq": dq, "dk": dk}
    for name, x in {**rows, "dv": dv}.items():
        tensor = getattr(params, name)
        assert tensor.data == x.data_ptr(), name
        strides = (tensor.stride_batch, tensor.stride_head, tensor.stride_row)
        assert strides == x.stride()[:3], name
    for name, arguments in (
        ("log2_gamma", call.log2),
        ("initial_state", call.state),
        ("dfinal_state", call.grad_state),
        ("dinitial_state", dstate),
    ):
        assert arguments is not None
        assert getattr(params, name) == arguments.data_ptr(), name
    assert params.dlog2_gamma
    scalars = {name: getattr(params, name) for name, _ in params._fields_[14:]}
    assert scalars == {
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "seqlen": 7,
        "dim_qk": 16,
        "dim_v": 24,
        "scale": 0.25,
    }
