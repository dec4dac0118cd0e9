"""Attention forward on hundreds of shapes: results by the error rule, determinism and memory bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ArtifactError
from tests.numerics import cases, harness, large_offsets
from tests.numerics.cases import Case
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu

CASES = cases.make_cases("forward")
PLAIN = Case(
    problem=Problem(batch=2, heads_q=2, heads_kv=2, seqlen_q=40, seqlen_k=40, dim_qk=64, dim_v=64),
    lse=False,
)
NARROW = replace(PLAIN, problem=replace(PLAIN.problem, alignment_bytes=2))


def test_few_builds_serve_all_shapes(pool: KernelPool) -> None:
    assert len(CASES) >= 300
    assert len(cases.builds(CASES, pool.present)) <= cases.MAX_BUILDS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shape(pool: KernelPool, case: Case, device: torch.device) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    for seed in harness.SEEDS:
        assert harness.errors_of(kernel, case, seed=seed, device=device) == []


@pytest.mark.parametrize("axis", large_offsets.STRIDES)
@pytest.mark.parametrize("case", [PLAIN], ids=["d64"])
def test_offsets_beyond_32_bits(
    pool: KernelPool, case: Case, axis: str, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    assert large_offsets.errors_of(kernel, case, axis, device) == []


@pytest.mark.parametrize("case", [PLAIN], ids=["d64"])
def test_an_aligned_kernel_refuses_unaligned_tensors(
    pool: KernelPool, case: Case, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    unaligned = replace(case, inputs="unaligned")
    with pytest.raises(ArtifactError, match="copy width"):
        harness.errors_of(kernel, unaligned, seed=0, device=device)


@pytest.mark.parametrize("case", [NARROW], ids=["d64"])
def test_every_kernel_refuses_dims_of_another_class(
    pool: KernelPool, case: Case, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    wider = replace(case, problem=replace(case.problem, dim_qk=80))
    with pytest.raises(ArtifactError, match="outside what this kernel was compiled for"):
        harness.errors_of(kernel, wider, seed=0, device=device)
