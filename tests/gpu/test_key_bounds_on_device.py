"""Attention forward with key bounds on a GPU: every family, every mask, NaN beyond the bounds, and captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.arch import probe
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.reference import check
from tests.launchers import verify
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.key_bounds import (
    BASE,
    BoundedCase,
    formula,
    make_bounds,
    make_cases,
    make_tensors,
)

pytestmark = pytest.mark.gpu

CASES = make_cases()
PROBLEM = replace(BASE, batch=9)
PROBLEMS = (PROBLEM, replace(PROBLEM, causal=True))
WGMMA = KERNELS["attention_forward_sm90"]


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem.describe())
def test_the_default_kernel(pool: KernelPool, case: BoundedCase, device: torch.device) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    outcome = verify(case.problem, kernel, deterministic=True, seeds=range(9), device=device)
    assert outcome.ok, outcome


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.problem.describe())
def test_the_kernels_of_wgmma(pool: KernelPool, case: BoundedCase, device: torch.device) -> None:
    if probe().compute_capability != (9, 0):
        pytest.skip("wgmma exists for compute capability 9.0 alone")
    problem = replace(case.problem, alignment_bytes=16)
    knobs = [
        point
        for point in WGMMA.points(problem, pool.present.spec)
        if not isinstance(point, Rejection)
    ]
    for point in {point.mainloop: point for point in knobs}.values():
        kernel = pool.kernel(Candidate.of(problem, point))
        outcome = verify(problem, kernel, deterministic=True, seeds=range(9), device=device)
        assert outcome.ok, (point, outcome)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_seen_keys(causal: bool, device: torch.device) -> None:
    """Beside the reference on the CPU, with NaN beyond the bounds."""
    starts, ends = make_bounds(PROBLEM.seqlen_k, device)
    tensors = make_tensors(PROBLEM, starts, ends)
    results = []
    for place in (device, torch.device("cpu")):
        q, k, v = (x.detach().to(place).requires_grad_() for x in tensors)
        bounds: dict[str, Any] = {"seqlens_k": ends.to(place), "starts_k": starts.to(place)}
        o = flash_attn_func(q, k, v, causal=causal, **bounds)
        gradients = torch.autograd.grad(o.float().square().sum(), (q, k, v))
        results.append([x.detach().cpu() for x in (o, *gradients)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_follows_the_bounds(causal: bool, device: torch.device) -> None:
    starts, ends = make_bounds(PROBLEM.seqlen_k, device)
    tensors = make_tensors(PROBLEM, starts, ends)
    bounds: dict[str, Any] = {"seqlens_k": ends, "starts_k": starts}
    flash_attn_func(*tensors, causal=causal, return_lse=True, **bounds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = flash_attn_func(*tensors, causal=causal, return_lse=True, **bounds)
    for turned in (False, True):
        if turned:
            for x in (starts, ends):
                x.copy_(x.flip(0))
            for x, value in zip(tensors, make_tensors(PROBLEM, starts, ends, seed=1), strict=True):
                x.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        for out, (exact, rounded) in zip(
            results, formula(*tensors, starts, ends, causal), strict=True
        ):
            comparison = check(out, exact, rounded)
            assert comparison, comparison.reason
