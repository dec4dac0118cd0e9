"""The public op on a GPU, forward: results, streams, graphs, arrays of other libraries, and no waiting."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.arch import A100
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import (
    NotWarmError,
    UnsupportedArchitectureError,
    UnsupportedProblemError,
)
from attention_autotuner.reference import Bands, attention, attention_low, check
from attention_autotuner.serving import dispatch
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu

HALF = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=129, seqlen_k=191, dim_qk=64, dim_v=64)
# Problems whose default kernels these tests run.
PROBLEMS = (
    HALF,
    replace(HALF, causal=True),
    replace(HALF, dtype="bf16"),
    replace(HALF, alignment_bytes=2),
)
LONG_CYCLES = 2_000_000_000  # a second on any present GPU
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


def make(
    problem: Problem = HALF, *, seed: int = 0, requires_grad: bool = False, device: str = "cuda"
) -> Tensors:
    torch.manual_seed(seed)
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    p = problem
    shapes = (
        (p.batch, p.heads_q, p.seqlen_q, p.dim_qk),
        (p.batch, p.heads_kv, p.seqlen_k, p.dim_qk),
        (p.batch, p.heads_kv, p.seqlen_k, p.dim_v),
    )
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)
        for shape in shapes
    )
    return q, k, v


def assert_right(o: torch.Tensor, tensors: Tensors, **mask: Any) -> None:
    tensors = tuple(x.detach() for x in tensors)  # type: ignore[assignment]
    problem = Problem(seqlen_q=tensors[0].shape[2], seqlen_k=tensors[1].shape[2], **mask)
    bands = Bands.of(problem, "o", o.dim())
    ref, low = attention(*tensors, **mask)[0], attention_low(*tensors, **mask)[0]
    comparison = check(o.detach(), ref, low, bands)
    assert comparison.ok, comparison.reason


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.detach().view(torch.int16), b.detach().view(torch.int16))


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=Problem.describe)
def test_results_match_the_reference(problem: Problem) -> None:
    tensors = make(problem)
    o, lse = flash_attn_func(*tensors, causal=problem.causal, return_lse=True)
    assert_right(o, tensors, causal=problem.causal)
    lse_ref = attention(*tensors, causal=problem.causal)[1]
    lse_low = attention_low(*tensors, causal=problem.causal)[1]
    assert check(lse, lse_ref, lse_low).ok
    again = flash_attn_func(*tensors, causal=problem.causal, deterministic=True)
    assert same_bits(o, again)


def test_transposed_and_unaligned_views_are_read_without_a_copy() -> None:
    q, k, v = make()
    expected = flash_attn_func(q, k, v)
    qt, kt, vt = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    o = flash_attn_func(qt, kt, vt)
    assert o.stride() == qt.stride()
    assert same_bits(o.contiguous(), expected)
    qu, ku, vu = (torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device) for x in (q, k, v))
    qu, ku, vu = (
        flat[1:].copy_(x.flatten()).view_as(x)
        for flat, x in zip((qu, ku, vu), (q, k, v), strict=True)
    )
    assert qu.data_ptr() % 16 == 2
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    unaligned = flash_attn_func(qu, ku, vu)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * unaligned.nbytes
    assert_right(unaligned, (q, k, v))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["batch", "heads"])
def test_empty_batch_or_heads_give_empty_outputs(shape: tuple[int, int]) -> None:
    q, k, v = (torch.empty(*shape, n, 64, device="cuda", dtype=torch.float16) for n in (5, 7, 7))
    o, lse = flash_attn_func(q, k, v, return_lse=True)
    assert o.shape == (*shape, 5, 64)
    assert lse.shape == (*shape, 5)
    assert o.is_cuda


@pytest.mark.parametrize("device_type", ["A100", "RTX 4090", A100, A100()], ids=str)
def test_other_policies_run_on_this_gpu(device_type: Any) -> None:
    tensors = make()
    assert_right(flash_attn_func(*tensors, device_type), tensors)


def test_bad_arguments_are_refused() -> None:
    q, k, v = make()
    with pytest.raises(UnsupportedProblemError, match="one device"):
        flash_attn_func(q, k.cpu(), v)
    with pytest.raises(UnsupportedProblemError, match="unit stride"):
        flash_attn_func(q.mT.contiguous().mT, k, v)
    with pytest.raises(UnsupportedProblemError, match="float16 or bfloat16"):
        flash_attn_func(q.float(), k.float(), v.float())
    with pytest.raises(UnsupportedArchitectureError, match="unknown device_type"):
        flash_attn_func(q, k, v, "V9000")


# --- streams and devices --------------------------------------------------------------------------


def test_the_kernel_runs_on_the_current_stream() -> None:
    tensors = make()
    flash_attn_func(*tensors)
    q, k, v = (torch.full_like(x, float("nan")) for x in tensors)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES // 10)
        for x, value in zip((q, k, v), tensors, strict=True):
            x.copy_(value)
        o = flash_attn_func(q, k, v)  # on any other stream it would read NaN
    stream.synchronize()
    assert_right(o, tensors)


def test_threads_on_their_own_streams_do_not_mix() -> None:
    inputs = [make(seed=seed) for seed in range(4)]
    expected = [flash_attn_func(*tensors) for tensors in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                o = flash_attn_func(*inputs[index])
            torch.cuda.current_stream().synchronize()
            if not same_bits(o, expected[index]):
                wrong.append(index)

    torch.cuda.synchronize()
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, index))
        for index in range(len(inputs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_kernel_runs_on_the_device_of_its_tensors() -> None:
    tensors = make(device="cuda:1")
    with torch.cuda.device(0):
        o = flash_attn_func(*tensors)
        assert torch.cuda.current_device() == 0
    assert o.device == torch.device("cuda", 1)
    assert_right(o, tensors)


# --- warm calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
def test_a_warm_call_waits_for_nothing(requires_grad: bool) -> None:
    tensors = make(requires_grad=requires_grad)
    kept = [flash_attn_func(*tensors, return_lse=True) for _ in range(12)]  # memory for all of them
    kept.clear()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    done = torch.cuda.Event()
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = [flash_attn_func(*tensors, return_lse=True) for _ in range(10)]
        assert not done.query(), "the calls came back only after the work before them was done"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(kept[-1][0], tensors)


_watched: list[str] | None = None
_FILE_EVENTS = ("open", "os.", "import", "subprocess.", "ctypes.dlopen")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and event.startswith(_FILE_EVENTS):
        _watched.append(f"{event}{arguments}")


def test_a_warm_call_touches_no_file() -> None:
    global _watched
    tensors = make()
    flash_attn_func(*tensors)
    sys.addaudithook(_watch)  # stays for the rest of the process, idle unless _watched is a list
    _watched = []
    try:
        for _ in range(3):
            flash_attn_func(*tensors)
        seen = list(_watched)
    finally:
        _watched = None
    assert seen == []


# --- CUDA graphs ----------------------------------------------------------------------------------


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def test_a_graph_replays_on_new_inputs() -> None:
    tensors = make()
    flash_attn_func(*tensors, return_lse=True)
    graph, (o, lse) = capture(lambda: flash_attn_func(*tensors, return_lse=True))
    fresh = make(seed=7)
    for x, value in zip(tensors, fresh, strict=True):
        x.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    expected_o, expected_lse = flash_attn_func(*fresh, return_lse=True)
    assert same_bits(o, expected_o)
    assert torch.equal(lse, expected_lse)


def test_a_graph_may_hold_a_new_shape_of_a_warm_kernel() -> None:
    flash_attn_func(*make())
    other = make(replace(HALF, batch=1, seqlen_q=77, seqlen_k=300))
    torch.cuda.synchronize()
    graph, o = capture(lambda: flash_attn_func(*other))
    graph.replay()
    torch.cuda.synchronize()
    assert_right(o, other)


def test_a_cold_call_under_capture_is_refused_and_leaves_the_capture_alone() -> None:
    cold = make(replace(HALF, dim_qk=24, dim_v=24))
    warm = make()
    flash_attn_func(*warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(NotWarmError, match="outside graph capture"):
            flash_attn_func(*cold)
        o = flash_attn_func(*warm)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(o, warm)


# --- arrays of other libraries --------------------------------------------------------------------


def test_cupy_arrays_come_and_go_on_cupys_stream() -> None:
    cupy = pytest.importorskip("cupy")
    tensors = make()
    arrays = [cupy.from_dlpack(x) for x in tensors]
    expected = flash_attn_func(*tensors)
    flash_attn_func(*arrays)
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        copies = [array.copy() for array in arrays]
        o, lse = flash_attn_func(*copies, return_lse=True)
        doubled = o + o
        stream.synchronize()
    torch.cuda.synchronize()
    assert isinstance(o, cupy.ndarray)
    assert isinstance(lse, cupy.ndarray)
    assert lse.dtype == cupy.float32
    assert same_bits(torch.utils.dlpack.from_dlpack(o), expected)
    assert torch.equal(torch.utils.dlpack.from_dlpack(doubled), expected + expected)
    with pytest.raises(UnsupportedProblemError, match="one library"):
        flash_attn_func(arrays[0], *tensors[1:])


def test_dispatch_names_the_source_of_a_pick(pool: KernelPool) -> None:
    pick = dispatch.lookup(HALF, pool.present)
    assert (pick.layer, pick.candidate) == ("default", pool.present.default(HALF.rounded()))
    assert "mode is off" in pick.reason
