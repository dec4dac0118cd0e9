"""Launch plans of the forward, driven on the CPU: a host-side library stands in for a GPU kernel, all else is real."""

from __future__ import annotations

import ctypes
import gc
import math
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.attention import torch_op as library
from attention_autotuner.api.shared import launch
from attention_autotuner.api.shared.planning import strided_params
from attention_autotuner.core import abi
from attention_autotuner.core.modifications import SPANNED
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ArtifactError, NotWarmError, UnsupportedProblemError
from attention_autotuner.reference import attention_low, attention_naive, check
from attention_autotuner.serving import dispatch
from tests.fake_kernels import CPU, STREAM, FakeDispatch, in_threads, refuse_cold_calls, serve_fakes

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


@pytest.fixture
def fake(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[FakeDispatch]:
    with serve_fakes(fake_kernel, monkeypatch, getattr(request, "param", ())) as fake:
        yield fake


def make(
    b: int = 2, hq: int = 4, hkv: int = 2, sq: int = 7, sk: int = 5, dqk: int = 16, dv: int = 24
) -> list[torch.Tensor]:
    torch.manual_seed(b + hq + sq + sk)
    shapes = ((b, hq, sq, dqk), (b, hkv, sk, dqk), (b, hkv, sk, dv))
    return [torch.randn(shape, dtype=torch.float16) for shape in shapes]


def run(
    tensors: list[torch.Tensor],
    scale: float | None = None,
    causal: bool = False,
    top_left: bool = False,
    device_type: str = "",
    return_lse: bool = True,
) -> Any:
    q, k, v = tensors
    return attention_plan.attention_forward(
        q, k, v, (scale, causal, top_left, device_type), return_lse
    )


def check_results(tensors: list[torch.Tensor], results: Any, **options: Any) -> None:
    q, k, v = tensors
    ref, low = attention_naive(q, k, v, **options), attention_low(q, k, v, **options)
    for out, exact, rounded in zip(results, ref, low, strict=True):
        comparison = check(out, exact, rounded)
        assert comparison, comparison.reason


@pytest.mark.parametrize("scale", [None, -0.7, 0.0, 3])
@pytest.mark.parametrize("mask", [(False, False), (True, False), (True, True)])
def test_results_through_the_c_abi(
    fake: FakeDispatch, scale: float | None, mask: tuple[bool, bool]
) -> None:
    tensors = make()
    alignment = "top_left" if mask[1] else "bottom_right"
    options = {"softmax_scale": scale, "causal": mask[0], "causal_alignment": alignment}
    for _ in range(3):  # cold, then warm
        check_results(tensors, run(tensors, scale, *mask), **options)
    assert len(fake.asked) == 1
    assert fake.read("launch_count") == 3
    assert fake.read("last_stream", ctypes.c_void_p) == STREAM


def test_layouts_reach_the_kernel(fake: FakeDispatch) -> None:
    q, k, v = make(3, 4, 4, 6, 6, 16, 16)
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=3)
    views = [x.transpose(1, 2) for x in packed.unbind(3)]
    results = run(views)
    check_results(views, results)
    assert results[0].transpose(1, 2).is_contiguous()
    broadcast = [q, k[:, :1].expand(-1, 4, -1, -1), v[:1].expand(3, -1, -1, -1)]
    check_results(broadcast, run(broadcast))
    precise = torch.randn(3, 4, 6, 40, dtype=torch.float16)[..., :16]
    check_results([precise, k, v], run([precise, k, v]))


def test_the_problem_is_described_to_dispatch(fake: FakeDispatch) -> None:
    run(make(2, 4, 2, 7, 5, 16, 24), None, True, True, "A100")
    problem, policy, must_be_warm = fake.asked[0]
    assert problem == Problem(
        dtype="fp16",
        batch=2,
        heads_q=4,
        heads_kv=2,
        seqlen_q=7,
        seqlen_k=5,
        dim_qk=16,
        dim_v=24,
        causal=True,
        causal_alignment="top_left",
        alignment_bytes=16,
    )
    assert policy == ("A100", CPU)
    assert not must_be_warm


def test_unaligned_pointers_and_strides_ask_for_narrow_copies(fake: FakeDispatch) -> None:
    q, k, v = make(2, 4, 4, 6, 6, 16, 16)
    shifted = torch.zeros(q.numel() + 1, dtype=torch.float16)[1:].view(q.shape).copy_(q)
    odd_rows = torch.zeros((2, 4, 6, 20), dtype=torch.float16)[..., :16].copy_(k)
    for tensors, expected in (
        ([q, k, v], 16),
        ([shifted, k, v], 2),
        ([q, odd_rows, v], 2),
        ([q, k, shifted], 2),
        ([q, k, odd_rows], 2),
    ):
        check_results(tensors, run(tensors))
        assert fake.asked[-1][0].alignment_bytes == expected
    single = make(1, 1, 1, 1, 6, 16, 16)
    single[0] = torch.zeros((1, 1, 1, 16), dtype=torch.float16).as_strided(
        (1, 1, 1, 16), (3, 5, 7, 1)
    )
    check_results(single, run(single))
    assert fake.asked[-1][0].alignment_bytes == 16


def test_anything_that_matters_makes_another_plan(fake: FakeDispatch) -> None:
    base = make(2, 4, 4, 6, 6, 16, 16)
    q, k, v = base
    calls: list[tuple[Any, ...]] = [
        (base,),
        (base, 0.5),
        (base, None, True),
        (base, None, True, True),
        (base, None, False, False, "A100"),
        (base, None, False, False, "", False),
        ([q.transpose(1, 2).contiguous().transpose(1, 2), k, v],),
        ([q, k, v[:, :, :, :8].contiguous()],),
        ([q[:, :2], k[:, :2], v[:, :2]],),
        ([q, k[:, :, :5], v[:, :, :5]],),
    ]
    for index, call in enumerate(calls):
        run(*call)
        run(*call)
        assert len(attention_plan.FORWARD_PLANS) == index + 1
    with settings.override(mode="off"):
        run(base)
        run(base)
    assert len(attention_plan.FORWARD_PLANS) == len(calls) + 1
    dispatch.invalidate()
    run(base)
    assert len(fake.asked) == len(calls) + 2


def test_plans_keep_no_tensor_alive_and_are_bounded(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan.FORWARD_PLANS, "bound", 3)
    held = []
    for length in range(1, 9):
        tensors = make(1, 1, 1, length, 3, 8, 8)
        o, lse = run(tensors)
        held += [weakref.ref(x) for x in (*tensors, o, lse)]
        del tensors, o, lse
    gc.collect()
    assert all(reference() is None for reference in held)
    assert len(attention_plan.FORWARD_PLANS) == 3
    assert [key[0][0][2] for key in attention_plan.FORWARD_PLANS] == [6, 7, 8]


def test_without_lse_none_is_written(fake: FakeDispatch) -> None:
    tensors = make()
    o, lse = run(tensors, return_lse=False)
    assert lse is None
    assert torch.equal(o, run(tensors)[0])


def test_empty_outputs_need_no_kernel(fake: FakeDispatch) -> None:
    o, lse = run(make(0, 4, 2))
    assert (o.shape, lse.shape) == ((0, 4, 7, 24), (0, 4, 7))
    o, lse = run(make(2, 0, 0))
    assert (o.shape, lse.shape) == ((2, 0, 7, 24), (2, 0, 7))
    assert not fake.asked


def test_outputs_are_torchs_own_with_and_without_its_shortcut(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make()
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)
    quick = run(tensors)
    with torch.inference_mode():
        assert all(x.is_inference() for x in run(tensors))
    attention_plan.FORWARD_PLANS.clear()
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    general = run(tensors)
    for fast, slow in zip(quick, general, strict=True):
        assert torch.equal(fast, slow)
        assert (fast.stride(), fast.dtype, fast.device) == (slow.stride(), slow.dtype, slow.device)
        assert torch._C._dispatch_keys(fast).raw_repr() == torch._C._dispatch_keys(slow).raw_repr()


def test_rows_that_see_no_key(fake: FakeDispatch) -> None:
    o, lse = run(make(1, 2, 2, 6, 2), None, True)
    assert torch.equal(o[:, :, :4], torch.zeros(1, 2, 4, 24).half())
    assert (lse[:, :, :4] == -math.inf).all()
    assert lse[:, :, 4:].isfinite().all()


@pytest.mark.parametrize("fake", [("-DWORKSPACE_BYTES=4096",)], indirect=True)
def test_workspace_comes_from_torch(fake: FakeDispatch) -> None:
    tensors = make()
    check_results(tensors, run(tensors))
    assert fake.read("last_workspace", ctypes.c_void_p)


def test_no_workspace_is_null(fake: FakeDispatch) -> None:
    run(make())
    assert fake.read("last_workspace", ctypes.c_void_p) is None


@pytest.mark.parametrize("fake", [("-DLAUNCH_STATUS=2",)], indirect=True)
def test_a_failed_launch_is_typed(fake: FakeDispatch) -> None:
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"launch it on cuda:-1: a bad shape \(status 2"):
            run(make())


def test_capture_is_passed_on_and_a_cold_call_leaves_nothing(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tensors = make()
    with refuse_cold_calls(monkeypatch), pytest.raises(NotWarmError):
        run(tensors)
    assert not attention_plan.FORWARD_PLANS
    assert fake.read("launch_count") == 0
    run(tensors)
    assert fake.asked[0][2]


def test_bad_tensors_make_no_plan(fake: FakeDispatch) -> None:
    q, k, v = make()
    with pytest.raises(UnsupportedProblemError, match="same dim"):
        run([q[..., :8], k, v])
    with pytest.raises(UnsupportedProblemError, match="finite"):
        run([q, k, v], math.nan)
    assert not attention_plan.FORWARD_PLANS
    assert not fake.asked


def test_threads_share_a_plan_without_mixing_their_pointers(fake: FakeDispatch) -> None:
    cases = [make(2, 4, 2, 33, 29) for _ in range(4)]
    for index, case in enumerate(cases):
        case[0] += index
    expected = [run(case) for case in cases]
    wrong = []

    def work(case: list[torch.Tensor], exact: Any) -> None:
        for _ in range(50):
            o, lse = run(case)
            if not (torch.equal(o, exact[0]) and torch.equal(lse, exact[1])):
                wrong.append(case)

    in_threads(work, [*zip(cases, expected, strict=True)] * 2)
    assert not wrong
    assert len(attention_plan.FORWARD_PLANS) == 1


def test_the_cuda_op_gives_a_pair_whether_lse_is_wanted_or_not(fake: FakeDispatch) -> None:
    q, k, v = make()
    o, lse = library._forward_cuda(library.Forward(q, k, v, None, False, False, "", True, False))
    alone, nothing = library._forward_cuda(
        library.Forward(q, k, v, None, False, False, "", False, False)
    )
    assert torch.equal(o, alone)
    assert lse.shape == (2, 4, 7)
    assert nothing.shape == (0,)
    assert nothing.dtype == torch.float32


def test_every_field_of_the_params_is_filled(fake: FakeDispatch) -> None:
    q, k, v = make()
    problem = Problem(
        batch=2, heads_q=4, heads_kv=2, seqlen_q=7, seqlen_k=5, dim_qk=16, dim_v=24, causal=True,
        key_bounds=True,
    )  # fmt: skip
    read = [(name, x.shape, x.stride()) for name, x in {"q": q, "k": k, "v": v}.items()]
    params = strided_params(problem, 0.25, [*read, launch.output(q, v)[:3]])
    values = {name: getattr(params, name) for name, _ in abi.AttentionForwardParams._fields_}
    assert values.pop("struct_size") == ctypes.sizeof(abi.AttentionForwardParams)
    assert values.pop("abi_version") == abi.ABI_VERSION
    for name, expected in (
        ("q", (448, 112, 16)),
        ("k", (160, 80, 16)),
        ("v", (240, 120, 24)),
        ("o", (672, 168, 24)),
    ):
        tensor = values.pop(name)
        assert (tensor.stride_batch, tensor.stride_head, tensor.stride_row) == expected
        assert tensor.data is None
    pointers = ("lse", "seqlens_k", "starts_k", "alibi_slopes", "sinks", "cu_seqlens_q")
    for name in (*pointers, "cu_seqlens_k", "bias_table", *SPANNED):
        assert values.pop(name) is None
    assert values.pop("attn_mask").data is None
    assert values == {
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
        "causal_from_end": 1,
        "splits": 0,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "alibi_per_batch": 0,
        "attn_mask_stride_column": 0,
        "attn_mask_kind": 0,
        "total_q": 0,
        "total_k": 0,
        "bias_distance": 0,
    }
