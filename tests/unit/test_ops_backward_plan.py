"""Launch plans of the backward, driven on the CPU: a host-side library stands in for a GPU kernel, all else is real."""

from __future__ import annotations

import ctypes
import gc
import math
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.shared import launch
from attention_autotuner.core import abi
from attention_autotuner.core.modifications import SPANNED
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ArtifactError, NotWarmError, UnsupportedProblemError
from attention_autotuner.reference import attention
from attention_autotuner.serving import dispatch
from tests import gradients
from tests.fake_kernels import CPU, STREAM, FakeDispatch, in_threads, refuse_cold_calls, serve_fakes

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

PROBLEM = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=7, seqlen_k=5, dim_qk=16, dim_v=24)
MASKS = [(False, False), (True, False), (True, True)]


@pytest.fixture
def fake(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[FakeDispatch]:
    with serve_fakes(fake_kernel, monkeypatch, getattr(request, "param", ())) as fake:
        yield fake


class Call:
    """The arguments of a backward call, each of which a test may replace."""

    def __init__(
        self,
        problem: Problem = PROBLEM,
        *,
        scale: float | None = None,
        causal: bool = False,
        top_left: bool = False,
        through: str = "both",
    ) -> None:
        self.q, self.k, self.v = gradients.make(problem, requires_grad=False)
        self.scale, self.causal, self.top_left = scale, causal, top_left
        self.device_type, self.deterministic = "", False
        o, self.lse = attention(self.q, self.k, self.v, **self.options)
        self.o = o.half()
        generator = torch.Generator().manual_seed(1)
        self.grad_o: torch.Tensor | None = None
        self.grad_lse: torch.Tensor | None = None
        if through != "lse":
            self.grad_o = torch.randn(o.shape, generator=generator).half()
        if through != "o":
            self.grad_lse = torch.randn(self.lse.shape, generator=generator)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "softmax_scale": self.scale,
            "causal": self.causal,
            "causal_alignment": "top_left" if self.top_left else "bottom_right",
        }

    def __call__(self) -> attention_plan.Gradients:
        return attention_plan.attention_backward(
            self.grad_o,
            self.grad_lse,
            self.q,
            self.k,
            self.v,
            self.o,
            self.lse,
            (self.scale, self.causal, self.top_left, self.device_type),
            self.deterministic,
        )

    def check_results(self, results: attention_plan.Gradients) -> None:
        tensors = (self.q, self.k, self.v)
        assert not gradients.errors_of(results, self.grad_o, self.grad_lse, tensors, **self.options)


@pytest.mark.parametrize("through", ["o", "lse", "both"])
@pytest.mark.parametrize("scale", [None, -0.7, 0.0, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_results_through_the_c_abi(
    fake: FakeDispatch, scale: float | None, mask: tuple[bool, bool], through: str
) -> None:
    call = Call(scale=scale, causal=mask[0], top_left=mask[1], through=through)
    for _ in range(3):  # cold, then warm
        call.check_results(call())
    assert len(fake.asked) == 1
    assert fake.read("launch_count", direction="backward") == 3
    assert fake.read("last_stream", ctypes.c_void_p, direction="backward") == STREAM


def test_poisoned_memory_shows_in_no_gradient(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients.poison(monkeypatch)
    call = Call(causal=True)
    assert launch.allocator(call.q.device)((2,), (1,), torch.float32).isnan().all()
    workspace = launch.allocator(call.q.device)((8,), (1,), torch.uint8)
    assert workspace.view(torch.float32).isnan().all()
    call.check_results(call())


def test_the_problem_is_described_to_dispatch(fake: FakeDispatch) -> None:
    call = Call(causal=True, top_left=True)
    call.device_type, call.deterministic = "A100", True
    call()
    problem, policy, must_be_warm = fake.asked[0]
    assert problem == replace(
        PROBLEM,
        direction="backward",
        causal=True,
        causal_alignment="top_left",
        deterministic=True,
    )
    assert policy == ("A100", CPU)
    assert not must_be_warm


@pytest.mark.parametrize("layout", gradients.LAYOUTS[:4])
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_inputs_are_read_where_they_lie(
    fake: FakeDispatch, layout: gradients.Layout, names: str
) -> None:
    call = Call()
    expected = call()
    for name in names:
        setattr(call, name, layout(getattr(call, name)))
    results = call()
    assert gradients.same_bits(results, expected)
    narrow = layout in (gradients.unaligned, gradients.odd_rows)
    assert fake.asked[-1][0].alignment_bytes == (2 if narrow else 16)
    for name, gradient in zip("qkv", results, strict=True):
        x = getattr(call, name)
        assert gradient.stride() == torch.empty_like(x).stride() or layout is gradients.odd_rows


@pytest.mark.parametrize("layout", gradients.LAYOUTS)
@pytest.mark.parametrize("name", ["grad_o", "o"])
def test_what_kernels_cannot_read_is_copied_and_asks_for_no_other_kernel(
    fake: FakeDispatch, layout: gradients.Layout, name: str
) -> None:
    call = Call()
    expected = call()
    setattr(call, name, layout(getattr(call, name)))
    for _ in range(2):
        assert gradients.same_bits(call(), expected)
    assert fake.asked[-1][0].alignment_bytes == 16


@pytest.mark.parametrize("layout", [gradients.one_row, gradients.one_value])
def test_broadcast_gradients(fake: FakeDispatch, layout: gradients.Layout) -> None:
    call = Call()
    assert call.grad_o is not None
    call.grad_o = layout(call.grad_o)
    call.check_results(call())
    call.k, call.v = call.k[:1].expand(2, -1, -1, -1), call.v[:, :1].expand(-1, 2, -1, -1)
    o, call.lse = attention(call.q, call.k, call.v)
    call.o = o.half()
    results = call()
    call.check_results(results)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in results)


@pytest.mark.parametrize("name", ["lse", "grad_lse"])
def test_statistics_of_any_stride(fake: FakeDispatch, name: str) -> None:
    call = Call()
    expected = call()
    passed = getattr(call, name)
    setattr(call, name, passed.mT.contiguous().mT)
    assert gradients.same_bits(call(), expected)
    setattr(call, name, torch.stack([passed, torch.full_like(passed, math.nan)], -1)[..., 0])
    assert gradients.same_bits(call(), expected)
    call.grad_lse = torch.ones(()).expand(call.lse.shape)
    call.check_results(call())


def test_an_address_between_16_bytes_is_another_kind_of_call(fake: FakeDispatch) -> None:
    call = Call()
    expected = call()
    buffer = torch.empty(call.o.numel() + 8, dtype=torch.float16)
    for offset in (0, 1, 8, 3):
        assert call.grad_o is not None
        view = buffer[offset : offset + call.o.numel()].view(call.o.shape)
        view.copy_(call.grad_o)
        kept, call.grad_o = call.grad_o, view
        assert gradients.same_bits(call(), expected)
        call.grad_o = kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad_o": None, "grad_lse": None}, "the gradient of o or of lse must be given"),
        (
            {"grad_o": torch.zeros(2, 4, 7, 24)},
            r"gradient of o must be torch.float16, got .*float32",
        ),
        (
            {"grad_o": torch.zeros(2, 4, 7, 16).half()},
            r"gradient of o must have the shape \(2, 4, 7, 24\)",
        ),
        (
            {"grad_o": torch.zeros(7, 24).half()},
            r"gradient of o must have the shape .* got \(7, 24\)",
        ),
        ({"grad_o": torch.zeros(()).half()}, r"gradient of o must have the shape .* got \(\)"),
        (
            {"grad_o": torch.zeros(2, 4, 7, 24, device="meta").half()},
            "gradient of o must be on q's device cpu, got meta",
        ),
        ({"grad_lse": torch.zeros(2, 4, 7).half()}, "gradient of lse must be torch.float32"),
        ({"grad_lse": torch.zeros(2, 4, 7, 1)}, r"gradient of lse must have the shape \(2, 4, 7\)"),
        ({"o": torch.zeros(2, 4, 7, 16).half()}, "o must have the shape"),
        ({"o": torch.zeros(2, 4, 7, 24).bfloat16()}, "o must be torch.float16"),
        ({"lse": torch.zeros(2, 4, 7).double()}, "lse must be torch.float32"),
        ({"lse": torch.zeros(0)}, "lse must have the shape"),
        ({"q": torch.zeros(2, 4, 7, 8).half()}, "same dim"),
        ({"scale": math.nan}, "finite"),
    ],
)
def test_bad_arguments_are_refused_and_make_no_plan(
    fake: FakeDispatch, change: dict[str, Any], message: str
) -> None:
    call = Call()
    for name, value in change.items():
        setattr(call, name, value)
    for _ in range(2):
        with pytest.raises(UnsupportedProblemError, match=message):
            call()
    assert not attention_plan.BACKWARD_PLANS
    assert not fake.asked


def test_a_good_call_before_makes_no_bad_one_pass(fake: FakeDispatch) -> None:
    call = Call()
    call()
    call.grad_o = torch.zeros(call.o.shape)
    with pytest.raises(UnsupportedProblemError, match="float16"):
        call()
    call.grad_o = torch.zeros(call.o.shape).half()
    call.grad_lse = torch.zeros(call.lse.shape).double()
    with pytest.raises(UnsupportedProblemError, match="float32"):
        call()


def test_anything_that_matters_makes_another_plan(fake: FakeDispatch) -> None:
    calls = [
        Call(),
        Call(scale=0.5),
        Call(causal=True),
        Call(causal=True, top_left=True),
        Call(through="o"),
        Call(replace(PROBLEM, seqlen_k=6)),
        Call(replace(PROBLEM, batch=1)),
    ]
    named, repeatable = Call(), Call()
    named.device_type, repeatable.deterministic = "A100", True
    calls += [named, repeatable]
    for index, call in enumerate(calls):
        call()
        call()
        assert len(attention_plan.BACKWARD_PLANS) == index + 1
    with settings.override(mode="off"):
        calls[0]()
    assert len(attention_plan.BACKWARD_PLANS) == len(calls) + 1
    dispatch.invalidate()
    calls[0]()
    assert len(fake.asked) == len(calls) + 2
    assert [problem.deterministic for problem, _, _ in fake.asked].count(True) == 1


def test_empty_outputs_need_no_kernel(fake: FakeDispatch) -> None:
    empty = torch.empty(0, 4, 7, 24).half()
    nothing = torch.empty(0, 4, 7)
    q, k, v = (torch.empty(0, h, n, d).half() for h, n, d in ((4, 7, 16), (2, 5, 16), (2, 5, 24)))
    rest: Any = ((None, False, False, ""), False)
    results = attention_plan.attention_backward(empty, nothing, q, k, v, empty, nothing, *rest)
    assert [x.shape for x in results] == [x.shape for x in (q, k, v)]
    q, o, lse = (
        torch.empty(2, 0, 7, 16).half(),
        torch.empty(2, 0, 7, 24).half(),
        torch.empty(2, 0, 7),
    )
    k, v = torch.ones(2, 2, 5, 16).half(), torch.ones(2, 2, 5, 24).half()
    _, dk, dv = attention_plan.attention_backward(o, None, q, k, v, o, lse, *rest)
    assert torch.equal(dk, torch.zeros_like(k))
    assert torch.equal(dv, torch.zeros_like(v))
    assert not fake.asked


def test_rows_that_see_no_key_give_nothing(fake: FakeDispatch) -> None:
    call = Call(replace(PROBLEM, seqlen_q=6, seqlen_k=2), causal=True)
    assert (call.lse[:, :, :4] == -math.inf).all()
    dq, dk, dv = call()
    call.check_results((dq, dk, dv))
    assert torch.equal(dq[:, :, :4], torch.zeros(2, 4, 4, 16).half())


def test_workspace_comes_from_torch_and_is_reported(fake: FakeDispatch) -> None:
    Call()()
    assert fake.read("last_workspace", ctypes.c_void_p, direction="backward")
    (plan,) = attention_plan.BACKWARD_PLANS.values()
    assert plan.workspace_bytes == 4 * 2 * 4 * 7


def test_a_workspace_that_does_not_fit_is_torchs_error_and_launches_nothing(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = launch.allocator
    space_left = False

    def full(device: torch.device) -> launch.Allocate:
        allocate = allocator(device)

        def limited(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
            if dtype == torch.uint8 and not space_left:
                raise torch.OutOfMemoryError("no room")
            return allocate(shape, strides, dtype)

        return limited

    monkeypatch.setattr(launch, "allocator", full)
    call = Call()
    with pytest.raises(torch.OutOfMemoryError):
        call()
    assert fake.read("launch_count", direction="backward") == 0
    space_left = True
    call.check_results(call())


@pytest.mark.parametrize("fake", [("-DLAUNCH_STATUS=2",)], indirect=True)
def test_a_failed_launch_is_typed(fake: FakeDispatch) -> None:
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"launch it on cuda:-1: a bad shape \(status 2"):
            Call()()


def test_a_cold_call_under_capture_is_refused_and_leaves_nothing(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = Call()
    with refuse_cold_calls(monkeypatch), pytest.raises(NotWarmError):
        call()
    assert not attention_plan.BACKWARD_PLANS
    assert fake.read("launch_count", direction="backward") == 0
    call()
    assert fake.asked[0][2]


_watched: list[str] | None = None
_FILE_EVENTS = ("open", "os.", "import", "subprocess.", "ctypes.dlopen")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and event.startswith(_FILE_EVENTS):
        _watched.append(f"{event}{arguments}")


def test_a_warm_call_touches_no_file(fake: FakeDispatch) -> None:
    global _watched
    call = Call()
    call()
    sys.addaudithook(_watch)  # for the rest of the process, but idle unless _watched is a list
    _watched = []
    try:
        call()
        call()
        seen = list(_watched)
        with Path(__file__).open():
            heard = list(_watched)
    finally:
        _watched = None
    assert seen == []
    assert heard


def test_plans_keep_no_tensor_alive(fake: FakeDispatch) -> None:
    call = Call()
    results = call()
    held = [weakref.ref(x) for x in (*results, call.q, call.o, call.lse, call.grad_o)]
    del call, results
    gc.collect()
    assert all(reference() is None for reference in held)


def test_threads_share_a_plan_without_mixing_their_pointers(fake: FakeDispatch) -> None:
    calls = [Call() for _ in range(4)]
    for index, call in enumerate(calls):
        call.q = call.q + index
    expected = [call() for call in calls]
    wrong: list[Call] = []

    def work(call: Call, exact: attention_plan.Gradients) -> None:
        wrong.extend(call for _ in range(50) if not gradients.same_bits(call(), exact))

    in_threads(work, zip(calls, expected, strict=True))
    assert not wrong
    assert len(attention_plan.BACKWARD_PLANS) == 1


def test_every_field_of_the_params_is_filled(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[abi.AttentionBackwardParams] = []
    kernel = fake.kernels["backward"]

    def look(address: Any, *rest: Any) -> int:
        source = abi.AttentionBackwardParams.from_address(address.value)
        seen.append(abi.AttentionBackwardParams.from_buffer_copy(bytes(source)))
        return 0

    monkeypatch.setattr(kernel, "launch_function", look)
    call = Call(causal=True, scale=0.25)
    call.q = gradients.transposed(call.q)
    dq, dk, dv = call()
    (params,) = seen
    assert params.struct_size == ctypes.sizeof(abi.AttentionBackwardParams)
    assert params.abi_version == abi.ABI_VERSION
    for name, x in (
        ("q", call.q),
        ("k", call.k),
        ("v", call.v),
        ("o", call.o),
        ("dout", call.grad_o),
        ("dq", dq),
        ("dk", dk),
        ("dv", dv),
    ):
        assert x is not None
        tensor = getattr(params, name)
        assert tensor.data == x.data_ptr(), name
        strides = (tensor.stride_batch, tensor.stride_head, tensor.stride_row)
        assert strides == x.stride()[:3], name
    assert call.grad_lse is not None
    assert (params.lse, params.dlse) == (call.lse.data_ptr(), call.grad_lse.data_ptr())
    assert params.attn_mask.data is None
    rest = [name for name, _ in params._fields_[12:] if name != "attn_mask"]
    assert {name: getattr(params, name) for name in rest} == {
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "seqlen_q": 7,
        "seqlen_k": 5,
        "dim_qk": 16,
        "dim_v": 24,
        "causal": 1,
        "causal_offset": -2,
        "softmax_scale": 0.25,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "alibi_per_batch": 0,
        "attn_mask_stride_column": 0,
        "attn_mask_kind": 0,
        "alibi_slopes": None,
        **dict.fromkeys(("sinks", "dsinks", "bias_table", "dbias_table")),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", *SPANNED, "dattn_mask")),
        **dict.fromkeys(("total_q", "total_k", "causal_from_end", "bias_distance"), 0),
        "attn_mask_summed": 0,
    }
