"""The product of two matrices: its problems, candidates and public function, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner.api.gemm.plan import lies
from attention_autotuner.arch import A100, H100, RTX4090
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import NoCandidateError, UnsupportedProblemError
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.kernels.gemm_sm90.knobs import GemmSm90Knobs
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.operations.bindings import make_inputs, ways_of
from attention_autotuner.operations.gemm.problem import of_sizes
from attention_autotuner.operations.params import params_of
from attention_autotuner.tuning.lookup import distance
from attention_autotuner.tuning.verify import variants
from benchmarks.suites import SUITES

SHAPES = [(4096, 4096, 4096), (64, 8192, 8192), (512, 8192, 8192), (24, 8, 8)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim_qk": 12}, "dim_qk must be a positive multiple of 8, got 12"),
        ({"dim_v": 2**30 + 8}, "dim_v must be at most 1073741824, got 1073741832"),
        ({"batch": 2}, "batch, heads_q and heads_kv must be 1 for gemm, got 2, 1, 1"),
        ({"seqlen_k": 8}, "as many rows everywhere, got seqlen_q 24 and seqlen_k 8"),
        ({"alignment_bytes": 2}, "alignment_bytes must be 16 for gemm"),
        ({"direction": "backward"}, "gemm is forward, got direction='backward'"),
        ({"causal": True}, "gemm is not causal"),
        ({"operands": "xy"}, "operands must be one of"),
        ({"operands": "tn", "seqlen_q": 9, "seqlen_k": 9}, "must be a multiple of 8, got 9"),
        ({"op": "attention", "operands": "nt"}, "operands is for gemm, got 'nt' for attention"),
    ],
)
def test_bad_problems_are_refused_with_their_values(changes: dict[str, Any], message: str) -> None:
    values = dataclasses.asdict(of_sizes(24, 32, 40)) | {"dim_qk": 64, "dim_v": 64} | changes
    with pytest.raises(UnsupportedProblemError, match=message):
        Problem(**values)


def test_a_problem_says_its_sizes() -> None:
    problem = of_sizes(300, 4096, 1024, dtype="bf16", operands="nt")
    assert problem.flops == 2 * 300 * 4096 * 1024
    assert problem.bytes_moved == 2 * (300 * (1024 + 4096) + 4096 * 1024)
    assert problem.describe() == "gemm forward bf16 b1 h1 s300 d1024/4096 nt"
    bucketed = problem.bucketed()
    assert (bucketed.seqlen_q, bucketed.dim_qk, bucketed.dim_v) == (512, 1024, 4096)
    params = params_of(problem)
    assert (params.m, params.n, params.k) == (300, 4096, 1024)
    odd = variants(
        dataclasses.replace(problem, operands="tn", seqlen_q=304, seqlen_k=304),
        block_m=128,
        block_n=256,
        num_sms=132,
    )
    assert [shape.seqlen_q for shape in odd] == [304, 288]


def test_a_record_stands_in_for_problems_of_a_like_size_and_layout() -> None:
    recorded = of_sizes(4096, 4096, 4096)
    assert distance(of_sizes(4096, 4096, 4096, operands="nt"), recorded) is None
    assert distance(of_sizes(4096, 4096, 128), recorded) is None
    near = distance(of_sizes(4096, 8192, 4096), recorded)
    assert near is not None
    assert 1 <= near < 2


@pytest.mark.parametrize("shape", SHAPES)
def test_an_h100_offers_candidates_and_others_none(shape: tuple[int, int, int]) -> None:
    problem, policy = of_sizes(*shape, dtype="bf16", operands="tt"), H100()
    legal = policy.legal(problem)
    names = {candidate.name for candidate in legal}
    assert len(names) == len(legal) < 200
    default = policy.default(problem)
    assert default.name in names
    assert default.knobs.cluster == 1
    for candidate, estimate in rank(problem, legal, policy.spec):
        assert 0 < estimate.us < float("inf")
        assert candidate.knobs.transposed_a
        assert candidate.knobs.transposed_b
        assert candidate_from_config(candidate.config) == candidate
    assert len({candidate.compiled.name for candidate in legal}) <= 32
    for other in (A100(), RTX4090()):
        assert other.candidates(problem) == []
        with pytest.raises(NoCandidateError):
            other.default(problem)


def test_launch_knobs_make_no_other_kernel_and_splits_take_a_workspace() -> None:
    problem, policy = of_sizes(64, 8192, 8192), H100()
    split = next(c for c in policy.legal(problem) if c.knobs.splits == 4)
    assert split.compiled.knobs.splits == 1
    assert kernel_of(split).workspace_bytes(problem, split) == 4 * 4 * 64 * 8192
    with pytest.raises(ValueError, match="splits must be at least 1, got 0"):
        dataclasses.replace(split.knobs, splits=0)


def test_what_cannot_be_compiled_is_rejected() -> None:
    rejected = {
        entry.predicate
        for entry in H100().candidates(of_sizes(4096, 4096, 4096))
        if isinstance(entry, Rejection)
    }
    assert rejected == {"cluster_splits_columns"}


@pytest.mark.parametrize("operands", ["nn", "tt"])
def test_the_reference_reads_matrices_as_they_lie(operands: Any) -> None:
    problem = of_sizes(16, 24, 40, operands=operands)
    inputs = make_inputs(problem, seed=0, device="cpu")
    a, b = (inputs.tensors[name][0, 0].float() for name in "ab")
    if operands == "tt":
        a, b = a.T, b.T
    ((name, ref, low),) = ways_of(problem)[0].references(problem, inputs)
    assert (name, ref.shape, low.dtype) == ("o", (1, 1, 16, 24), torch.float16)
    torch.testing.assert_close(ref[0, 0], a @ b)


def test_the_function_multiplies_and_differentiates_on_the_cpu() -> None:
    a = torch.randn(20, 40, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(24, 40, dtype=torch.bfloat16, requires_grad=True)
    product = attention_autotuner.matmul(a, b.T)
    assert torch.equal(product, a @ b.T)
    grad = torch.randn_like(product)
    ours = torch.autograd.grad(product, (a, b), grad)
    theirs = torch.autograd.grad(a @ b.T, (a, b), grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    assert not attention_autotuner.matmul(a[:, :0], b.T[:0]).any()
    for bad, message in [
        ((a, b), "as many columns as b has rows"),
        ((a[0], b.T), "a must have 2 dimensions, got 1"),
        ((a, b.T.half()), "b must be of a's dtype"),
        ((a.float(), b.T.float()), "a must be one of"),
    ]:
        with pytest.raises(UnsupportedProblemError, match=message):
            attention_autotuner.matmul(*bad)


def test_layouts_are_read_off_strides() -> None:
    x = torch.empty(32, 64, dtype=torch.float16)
    assert (lies("a", x), lies("a", x.T), lies("a", x[:, 8:16])) == ("n", "t", "n")
    for bad in (x[:, ::2], x[:, 1:], x.view(-1)[:600].view(20, 30)):
        with pytest.raises(UnsupportedProblemError, match="a must lie by rows or by columns"):
            lies("a", bad)


@pytest.mark.parametrize("op", ["attention", "retnet", "retention", "gemm"])
def test_tune_takes_the_defaults_of_any_operation(op: str) -> None:
    problem = attention_autotuner.tune(device_type="H100", op=op, effort="none").problem
    assert problem.op == op
    assert (problem.batch, problem.heads_q) == ((1, 1) if op == "gemm" else (4, 16))


def test_the_suite_has_the_sizes_of_the_bar() -> None:
    sizes = [(p.seqlen_q, p.dim_v, p.dim_qk) for p in (c.shape for c in SUITES["gemm"].cases)]
    assert len(sizes) == 8
    assert (4096, 16384, 1024) in sizes
    assert SUITES["gemm"].bars["cublas forward"]["geometric_mean"] == 0.95


def test_knobs_are_of_one_kernel() -> None:
    knobs = GemmSm90Knobs(block_m=128, block_n=256, stages=4)
    with pytest.raises(TypeError, match="gemm_sm90 does not compute attention"):
        Candidate(dtype="fp16", padded_dim_qk=64, padded_dim_v=64, knobs=knobs)
