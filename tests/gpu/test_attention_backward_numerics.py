"""Attention backward on hundreds of shapes, by the error rule and beyond it: see ``tests/numerics``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ArtifactError
from tests.numerics import cases, far, harness
from tests.numerics.cases import Case
from tests.numerics.workshop import Workshop

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
MISFITS = {
    "copy width": replace(PLAIN, gradient="unaligned"),
    "outside what this kernel was compiled for": replace(
        PLAIN, problem=replace(PLAIN.problem, dim_v=80)
    ),
}


def test_few_builds_serve_all_shapes(workshop: Workshop) -> None:
    assert len(CASES) >= 200
    assert len(cases.builds(CASES, workshop.present)) <= cases.MAX_BUILDS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shape(workshop: Workshop, case: Case, device: torch.device) -> None:
    one = case.candidate(workshop.present)
    kernel = workshop.kernel(one)
    for seed in harness.SEEDS:
        wrong = harness.judge(
            kernel, case, seed=seed, device=device, deterministic=one.deterministic
        )
        assert wrong == [], one.name


@pytest.mark.parametrize("axis", far.STRIDES)
@pytest.mark.parametrize("case", [PLAIN], ids=["d64"])
def test_offsets_beyond_32_bits(
    workshop: Workshop, case: Case, axis: str, device: torch.device
) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    assert far.judge(kernel, case, axis, device) == []


@pytest.mark.parametrize("case", [PLAIN], ids=["d64"])
@pytest.mark.parametrize("reason", MISFITS)
def test_a_kernel_refuses_what_it_cannot_read(
    workshop: Workshop, case: Case, reason: str, device: torch.device
) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    with pytest.raises(ArtifactError, match=reason):
        harness.judge(kernel, MISFITS[reason], seed=0, device=device)
