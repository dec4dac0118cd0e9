"""Attention forward on hundreds of shapes, by the error rule and beyond it: see ``tests/numerics``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.codegen.problem import Problem
from attention_autotuner.errors import ArtifactError
from attention_autotuner.reference import attention, attention_low, check
from tests.numerics import cases, harness
from tests.numerics.cases import Case
from tests.numerics.workshop import Workshop

pytestmark = pytest.mark.gpu

CASES = cases.make_cases()
PLAIN = Case(
    problem=Problem(batch=2, heads_q=2, heads_kv=2, seqlen_q=40, seqlen_k=40, dim_qk=64, dim_v=64)
)
NARROW = replace(PLAIN, problem=replace(PLAIN.problem, alignment_bytes=2))
FAR_BYTES = 14 * 2**30  # of the two storages whose offsets pass 2**31 elements


def test_few_builds_serve_all_shapes(workshop: Workshop) -> None:
    assert len(CASES) >= 300
    assert len(cases.builds(CASES, workshop.present)) <= cases.MAX_BUILDS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shape(workshop: Workshop, case: Case, device: torch.device) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    for seed in harness.SEEDS:
        assert harness.judge(kernel, case, seed=seed, device=device) == []


# Strides [batch, head, row] of a tensor whose last element lies more than 2**31 elements from its first.
FAR = {
    "batch": (2**31, 4096, 64),
    "head": (8192, 2**31, 64),
    "row": (8192, 64, 2**26),
}


@pytest.mark.parametrize("axis", FAR)
@pytest.mark.parametrize("case", [PLAIN], ids=["d64"])
def test_offsets_beyond_32_bits(
    workshop: Workshop, case: Case, axis: str, device: torch.device
) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < FAR_BYTES:
        pytest.skip(f"needs {FAR_BYTES} bytes of device memory, {free} are free")
    kernel = workshop.kernel(case.candidate(workshop.present))
    p, strides = case.problem, (*FAR[axis], 1)
    shape = (p.batch, p.heads_q, p.seqlen_q, p.dim_qk)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    assert extent > 2**31
    span = (
        3 * 2**16
    )  # q, k and v beside each other: none is longer than 2**16 elements but for its far axis
    given = torch.full((extent + span,), float("nan"), dtype=torch.float16, device=device)
    taken = torch.full_like(given, float("nan"))
    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v = (given.as_strided(shape, strides, i * 2**16) for i in range(3))
    for x in (q, k, v):
        x.copy_(torch.randn(shape, dtype=x.dtype, device=device, generator=generator))
    o = taken.as_strided(shape, strides, 0)
    harness.launch(kernel, replace(case, lse=False), q, k, v, o, None)
    near = [x.contiguous() for x in (q, k, v)]
    assert check(o.contiguous(), attention(*near)[0], attention_low(*near)[0]).reason == ""
    assert int(taken.isfinite().sum()) == o.numel()


@pytest.mark.parametrize("case", [PLAIN], ids=["d64"])
def test_an_aligned_kernel_refuses_unaligned_tensors(
    workshop: Workshop, case: Case, device: torch.device
) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    unaligned = replace(case, inputs="unaligned")
    with pytest.raises(ArtifactError, match="copy width"):
        harness.judge(kernel, unaligned, seed=0, device=device)


@pytest.mark.parametrize("case", [NARROW], ids=["d64"])
def test_every_kernel_refuses_dims_of_another_class(
    workshop: Workshop, case: Case, device: torch.device
) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    wider = replace(case, problem=replace(case.problem, dim_qk=80))
    with pytest.raises(ArtifactError, match="outside what this kernel was compiled for"):
        harness.judge(kernel, wider, seed=0, device=device)
