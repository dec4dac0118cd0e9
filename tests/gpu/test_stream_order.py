"""Calls behind a kernel that lets the next one begin at once and brings what they read much later.

That is what programmatic dependent launch allows any kernel to do. Tests of results do not show a call that begins too
soon: ahead of it everything has long been done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attention_autotuner import (
    flash_attn_func,
    flash_attn_varlen_func,
    matmul,
    retention_func,
    retnet_attn_func,
    settings,
)
from attention_autotuner.core.problem import Problem
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu

LATE = r"""
extern "C" __global__ void late(unsigned int* target, unsigned int const* source, long long words, long long cycles) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (long long const begin = clock64(); clock64() - begin < cycles;) {}
  for (long long word = threadIdx.x; word < words; word += blockDim.x) target[word] = source[word];
}
"""
CYCLES = 4_000_000  # 2 ms, in which the host has launched every call here, and it would have ended
ATTENTION = Problem(batch=1, heads_q=4, heads_kv=4, seqlen_q=256, seqlen_k=256, dim_qk=64, dim_v=64)
CLAIMED = replace(
    ATTENTION,
    heads_q=8,
    heads_kv=2,
    seqlen_q=4096,
    seqlen_k=4096,
    dim_qk=128,
    dim_v=128,
    causal=True,
)
DOCUMENTS = replace(
    ATTENTION,
    heads_q=32,
    heads_kv=32,
    seqlen_q=1024,
    seqlen_k=1024,
    causal=True,
    modifications=("document_ids",),
)
RETENTION = replace(ATTENTION, op="retention", causal=True)
RETNET = replace(ATTENTION, op="retnet", mask="explicit")
PRODUCT = replace(ATTENTION, op="gemm", dtype="bf16", heads_q=1, heads_kv=1, dim_qk=256, dim_v=256)
PACKED = replace(ATTENTION, batch=3, packed_rows=(600, 600), causal=True)
BOTH = (ATTENTION, CLAIMED, DOCUMENTS, RETENTION, RETNET)
# Problems whose default kernels these tests run.
PROBLEMS = (
    *BOTH,
    *(replace(problem, direction="backward") for problem in BOTH),
    replace(ATTENTION, seqlen_q=1, seqlen_k=4096),
    replace(RETENTION, form="recurrent", seqlen_q=1, seqlen_k=1),
    PACKED,
    replace(PACKED, direction="backward"),
    PRODUCT,
)
FORWARD = [p for p in PROBLEMS if p.direction == "forward" and p not in (PACKED, PRODUCT)]
Function = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


def behind(
    late: torch.Tensor, call: Callable[[], torch.Tensor], side: torch.cuda.Stream | None = None
) -> torch.Tensor:
    """The result of a call behind a kernel that brings a tensor late; it is full of NaN before, integers of -1.

    That kernel is in the same stream, or in another one that the call's waits for.
    """
    cupy = pytest.importorskip("cupy")
    bring = cupy.RawKernel(LATE, "late")
    data = late.data.view(torch.uint8)  # whose version autograd does not count
    kept, words = data.clone(), data.numel() // 4
    data.fill_(0xFF)
    torch.cuda.synchronize()
    stream = side or torch.cuda.current_stream()
    with cupy.cuda.ExternalStream(stream.cuda_stream):
        sizes = (cupy.int64(words), cupy.int64(CYCLES))
        bring((1,), (1024,), (data.data_ptr(), kept.data_ptr(), *sizes))
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    result = call()
    torch.cuda.synchronize()
    assert torch.equal(data, kept)
    return result


def inputs(problem: Problem) -> list[torch.Tensor]:
    """q, k and v."""
    torch.manual_seed(0)
    p = problem
    dtype = torch.bfloat16 if p.dtype == "bf16" else torch.float16
    shapes = [
        (p.batch, p.heads_q, p.seqlen_q, p.dim_qk),
        (p.batch, p.heads_kv, p.seqlen_k, p.dim_qk),
        (p.batch, p.heads_kv, p.seqlen_k, p.dim_v),
    ]
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def document_ids(problem: Problem) -> torch.Tensor:
    """Documents of 300 rows."""
    ids = torch.arange(problem.seqlen_k, device="cuda", dtype=torch.int32) // 300
    return ids[None].expand(problem.batch, -1).contiguous()


def function_of(problem: Problem) -> Function:
    """The public function, of q, k and v, and a tensor that has no gradient."""
    if problem.op == "retention":
        form = problem.form
        return lambda q, k, v: retention_func(q, k, v, form=form, output_final_state=False)[0]
    if problem.op == "retnet":
        shape = (problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        mask = torch.rand(shape, device="cuda", dtype=torch.float16)
        return lambda q, k, v: retnet_attn_func(q, k, v, mask, scale=problem.dim_qk**-0.5)
    options: dict[str, Any] = {"causal": problem.causal}
    if problem.modifications:
        options["document_ids"] = document_ids(problem)
    return partial(flash_attn_func, **options)


def gradients_of(
    o: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A call that makes all gradients again, as one tensor."""

    def gradients() -> torch.Tensor:
        results = torch.autograd.grad(o, leaves, dout, retain_graph=True)
        return torch.cat([x.flatten() for x in results])

    return gradients


@pytest.mark.parametrize("problem", FORWARD)
@pytest.mark.parametrize("late", range(3), ids=["q", "k", "v"])
def test_a_forward_call_waits_for_what_is_ahead(problem: Problem, late: int) -> None:
    function, tensors = function_of(problem), inputs(problem)
    expected = function(*tensors)
    assert torch.equal(behind(tensors[late], lambda: function(*tensors)), expected)


@pytest.mark.parametrize("problem", [ATTENTION, CLAIMED])
def test_a_call_waits_for_another_stream(problem: Problem) -> None:
    function, tensors = function_of(problem), inputs(problem)
    expected = function(*tensors)
    result = behind(tensors[0], lambda: function(*tensors), torch.cuda.Stream())
    assert torch.equal(result, expected)


@pytest.mark.parametrize("problem", [ATTENTION, CLAIMED])
def test_a_call_joins_two_branches_of_a_graph(problem: Problem) -> None:
    function, (q, k, v) = function_of(problem), inputs(problem)
    sources, side = [q.clone(), k.clone()], torch.cuda.Stream()
    made = [torch.empty_like(x) for x in sources]
    expected = function(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.mul(sources[0], 1, out=made[0])
        torch.mul(sources[1], 1, out=made[1])
        torch.cuda.current_stream().wait_stream(side)
        result = function(*made, v)
    for _ in range(3):
        for x in made:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_documents_may_come_late() -> None:
    q, k, v = inputs(DOCUMENTS)
    ids = document_ids(DOCUMENTS)
    call = partial(flash_attn_func, q, k, v, causal=True, document_ids=ids)
    expected = call()
    assert torch.equal(behind(ids, call), expected)


def test_lengths_of_packed_sequences_may_come_late() -> None:
    made = (torch.randn(600, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    q, k, v = (x.requires_grad_() for x in made)
    ends = torch.tensor([0, 100, 350, 600], device="cuda", dtype=torch.int32)

    def call() -> torch.Tensor:
        o: torch.Tensor = flash_attn_varlen_func(q, k, v, ends, ends, 256, 256, causal=True)
        return o

    o = call()
    assert torch.equal(behind(ends, call), o)
    gradients = gradients_of(o, [q, k, v], torch.randn_like(o))
    expected = gradients()
    torch.testing.assert_close(behind(ends, gradients), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("late", range(2), ids=["a", "b"])
def test_a_product_waits_for_what_is_ahead(late: int) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = matmul(a, b)
    assert torch.equal(behind((a, b)[late], lambda: matmul(a, b)), expected)


@pytest.mark.parametrize("problem", BOTH)
@pytest.mark.parametrize("late", ["dout", "k"])
def test_a_backward_call_waits_for_what_is_ahead(problem: Problem, late: str) -> None:
    function, tensors = function_of(problem), inputs(problem)
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = function(*leaves)
    dout = torch.randn_like(o)
    gradients = gradients_of(o, leaves, dout)
    expected = gradients()
    result = behind(dout if late == "dout" else tensors[1], gradients)
    # Shares of dQ are added in any order.
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
