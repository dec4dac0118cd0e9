"""Attention's forward kernel of family sm90: where it is offered, what it rejects, what it should take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.codegen.render import include_closure, render
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import registry
from attention_autotuner.kernels.attention_forward_sm90.knobs import knobs_of
from attention_autotuner.kernels.attention_forward_sm90.resources import shape_of, smem_bytes
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.legality import check
from attention_autotuner.kernels.registry import KERNELS, UNVERIFIED
from tests import unverified

KERNEL = "attention_forward_sm90"
SHIPPED = UNVERIFIED  # before the fixture below offers all
POLICY = H100(H200_SPEC)
PROBLEM = Problem(batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_k=4096)
DIMS = [
    (16, 16), (32, 32), (56, 56), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (120, 120), (128, 128),
    (160, 160), (176, 176), (192, 192), (240, 240), (256, 256), (192, 128), (128, 256), (256, 128), (64, 128),
    (128, 64),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _offered() -> Iterator[None]:
    with unverified.offered():
        yield


def with_dims(dims: tuple[int, int], **options: Any) -> Problem:
    return replace(PROBLEM, dim_qk=dims[0], dim_v=dims[1], **options)


def offered(problem: Problem) -> list[Candidate]:
    return [candidate for candidate in POLICY.legal(problem) if candidate.kernel == KERNEL]


@pytest.mark.parametrize("dims", DIMS)
def test_all_head_dims_have_a_default_and_few_candidates(dims: tuple[int, int]) -> None:
    problem = with_dims(dims)
    candidates = offered(problem)
    assert 10 < len(candidates) <= 48
    assert POLICY.default(problem) in candidates
    causal = POLICY.default(replace(problem, causal=True))
    assert causal in candidates
    assert knobs_of(causal).schedule == "dynamic"
    assert all(smem_bytes(shape_of(candidate)) <= 227 * 1024 for candidate in candidates)
    assert len({candidate.name for candidate in candidates}) == len(candidates)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((64, 64), "g4n64_serial_optimistic_turns_q2k3v3_oq"),
        ((80, 80), "g3n96_serial_optimistic_free_q2k2v2_oq"),
        ((96, 96), "g3n80_serial_optimistic_free_q2k3v3_oq"),
        ((112, 112), "g3n64_serial_optimistic_free_q2k3v3_oq"),
        ((128, 128), "g2n128_overlap_optimistic_free_q2k2v2_oq"),
        ((128, 256), "g2n80_overlap_optimistic_free_q2k2v2_od"),
        ((256, 128), "g2n96_overlap_optimistic_free_q1k2v2_od"),
        ((256, 256), "g2n64_overlap_optimistic_free_q1k2v2_od"),
    ],
)
def test_defaults_are_those_that_were_measured(dims: tuple[int, int], words: str) -> None:
    assert POLICY.default(with_dims(dims)).knobs.label == f"{words}_static"


def test_every_main_loop_and_schedule_is_offered() -> None:
    knobs = [knobs_of(candidate) for dims in DIMS for candidate in offered(with_dims(dims))]
    assert {k.mainloop for k in knobs} == {"strict", "serial", "overlap", "overlap_flat"}
    assert {k.schedule for k in knobs} == {"grid", "static", "dynamic"}
    assert {k.output for k in knobs} == {"through_q", "direct"}
    assert {k.warpgroups for k in knobs} == {2, 3, 4}


def test_it_serves_attention_forward_on_this_capability_alone() -> None:
    assert KERNELS[KERNEL].serves == {("attention", "forward", "softmax")}
    assert {candidate.family for candidate in POLICY.legal(PROBLEM)} == {"sm80", "sm90"}
    assert {candidate.family for candidate in A100().legal(PROBLEM)} == {"sm80"}
    assert POLICY.on((8, 0)).default(PROBLEM).family == "sm80"
    closure = include_closure(render(POLICY.default(PROBLEM)).text)
    assert any(path.endswith(f"{KERNEL}/mainloop.cuh") for path in closure)


@pytest.mark.parametrize(
    ("options", "rule", "reason"),
    [
        ({"alignment_bytes": 2}, "tma_needs_alignment", "aligned to 16 bytes, got 2"),
        ({"dim_v": 264}, "value_columns_fit_mma", "at most 256 columns of V, got 272"),
    ],
)
def test_the_rest_goes_to_the_other_family_with_the_reason(
    options: dict[str, Any], rule: str, reason: str
) -> None:
    problem = replace(PROBLEM, **options)
    rejections = [
        point
        for point in POLICY.candidates(problem)
        if isinstance(point, Rejection) and point.config["kernel"] == KERNEL
    ]
    assert rejections
    assert {point.predicate for point in rejections} == {rule}
    assert all(reason in point.reason for point in rejections)
    assert POLICY.default(problem).family == "sm80"


def test_a_few_queries_are_not_its_default() -> None:
    assert POLICY.default(replace(PROBLEM, seqlen_q=1)).family == "sm80"
    assert POLICY.default(replace(PROBLEM, seqlen_q=63)).family == "sm80"
    assert POLICY.default(replace(PROBLEM, seqlen_q=64)).family == "sm90"


def test_few_causal_tiles_need_no_claims() -> None:
    few = replace(PROBLEM, causal=True, batch=1, heads_q=2, heads_kv=2, seqlen_q=256, seqlen_k=256)
    default = POLICY.default(few)
    assert knobs_of(default).schedule == "static"
    kernel = KERNELS[KERNEL]
    assert kernel.workspace_bytes(few, default) == 0
    claims = replace(default, knobs=replace(default.knobs, schedule="dynamic"))
    assert kernel.workspace_bytes(few, claims) == 256


@pytest.mark.parametrize(
    ("knobs", "rule"),
    [
        ({"k_stages": 2, "v_stages": 2}, "stages_use_shared_memory"),
        ({"q_stages": 1}, "second_q_stage_pays"),
        ({"output": "direct"}, "direct_output_pays"),
        ({"warpgroups": 2, "mainloop": "overlap", "block_n": 80}, "block_n_uses_registers"),
    ],
)
def test_variants_that_never_pay_are_left_out(knobs: dict[str, Any], rule: str) -> None:
    default = POLICY.default(with_dims((64, 64)))
    assert check(default, H200_SPEC) is None
    rejection = check(replace(default, knobs=replace(default.knobs, **knobs)), H200_SPEC)
    assert rejection is not None
    assert rejection.predicate == rule


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_model_ranks_it_first(dims: tuple[int, int], causal: bool) -> None:
    problem = with_dims(dims, causal=causal)
    ranked = rank(problem, POLICY.legal(problem), POLICY.spec)
    assert ranked[0][0].kernel == KERNEL
    best_old = next(prediction for candidate, prediction in ranked if candidate.family == "sm80")
    assert ranked[0][1].us < 0.8 * best_old.us
    default = estimate(problem, POLICY.default(problem), POLICY.spec).us
    assert default < 1.15 * ranked[0][1].us


def test_the_model_gives_what_was_measured() -> None:
    """An H200: 4 batches, 16 heads, 4096 tokens, non-causal, 672 TFLOP/s at dim 128."""
    us = estimate(PROBLEM, POLICY.default(PROBLEM), POLICY.spec).us
    flops = 4 * PROBLEM.batch * PROBLEM.heads_q * PROBLEM.seqlen_q * PROBLEM.seqlen_k * 128
    assert flops / us / 1e6 == pytest.approx(672, rel=0.1)


def test_a_gpu_without_such_products_takes_forever() -> None:
    prediction = estimate(PROBLEM, POLICY.default(PROBLEM), A100().spec)
    assert (prediction.us, prediction.limiter) == (inf, "residency")


def test_no_policy_offers_a_kernel_that_no_gpu_has_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offering = {candidate.kernel for candidate in POLICY.legal(PROBLEM)}
    monkeypatch.setattr(registry, "UNVERIFIED", SHIPPED)
    assert KERNEL in SHIPPED
    assert offering - {candidate.kernel for candidate in POLICY.legal(PROBLEM)} == {KERNEL}
    assert POLICY.default(PROBLEM).family == "sm80"
