"""Attention backward on hundreds of shapes: results by the error rule, determinism and memory bounds."""

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

CASES = cases.make_cases("backward")
PLAIN = Case(
    problem=Problem(
        direction="backward",
        batch=2,
        heads_q=2,
        heads_kv=2,
        seqlen_q=40,
        seqlen_k=40,
        dim_qk=64,
        dim_v=64,
    )
)
# On Hopper CTAs of three and of two heads share a block of keys.
UNEVEN = replace(
    PLAIN,
    problem=replace(PLAIN.problem, batch=4, heads_q=10, seqlen_q=2048, seqlen_k=2048, causal=True),
)
MISFITS = {
    "copy width": replace(PLAIN, gradient="unaligned"),
    "outside what this kernel was compiled for": replace(
        PLAIN, problem=replace(PLAIN.problem, dim_v=80)
    ),
}


def test_few_builds_serve_all_shapes(pool: KernelPool) -> None:
    assert len(CASES) >= 200
    assert len(cases.builds(CASES, pool.present)) <= cases.MAX_BUILDS


@pytest.mark.parametrize("case", [UNEVEN], ids=lambda case: case.name)
def test_parts_of_a_group(pool: KernelPool, case: Case, device: torch.device) -> None:
    test_shape(pool, case, device)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shape(pool: KernelPool, case: Case, device: torch.device) -> None:
    candidate = case.candidate(pool.present)
    kernel = pool.kernel(candidate)
    for seed in harness.SEEDS:
        errors = harness.errors_of(
            kernel, case, seed=seed, device=device, deterministic=candidate.deterministic
        )
        assert errors == [], candidate.name


@pytest.mark.parametrize("axis", large_offsets.STRIDES)
@pytest.mark.parametrize("case", [PLAIN], ids=["d64"])
def test_offsets_beyond_32_bits(
    pool: KernelPool, case: Case, axis: str, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    assert large_offsets.errors_of(kernel, case, axis, device) == []


@pytest.mark.parametrize("case", [PLAIN], ids=["d64"])
@pytest.mark.parametrize("reason", MISFITS)
def test_a_kernel_refuses_unsupported_tensors(
    pool: KernelPool, case: Case, reason: str, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    with pytest.raises(ArtifactError, match=reason):
        harness.errors_of(kernel, MISFITS[reason], seed=0, device=device)
