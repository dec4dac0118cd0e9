"""The family of warpgroup products: where it is offered and runs, what it is compiled for, what it should take."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from attention_autotuner.arch import A100, H100, from_properties
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.codegen.artifact import BuildTarget
from attention_autotuner.codegen.render import include_closure, render
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.registry import families
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.search import tune
from tests.devices import H200, RTX3090
from tests.fake_pipeline import FakePipeline

MASKED = Problem(
    op="retnet", mask="explicit", batch=8, heads_q=8, heads_kv=8, dim_qk=256, dim_v=256
)
KNOBS = AttentionForwardSm90Knobs(
    warpgroups=2, block_n=64, mainloop="overlap", q_stages=1, mask_stages=2
)


def test_a_masked_forward_has_it_first_on_an_h100_and_nowhere_else() -> None:
    default = H100().default(MASKED)
    assert default.family == "sm90"
    assert {selected.family for selected in H100().legal(MASKED)} == {"sm80", "sm90"}
    assert {selected.family for selected in A100().legal(MASKED)} == {"sm80"}
    others = (
        replace(MASKED, mask="decay", causal=True),
        replace(MASKED, alignment_bytes=2),
        replace(MASKED, op="attention", mask="none", alignment_bytes=2),
    )
    for problem in others:
        assert {selected.family for selected in H100().legal(problem)} == {"sm80"}, (
            problem.describe()
        )
        assert H100().default(problem).family == "sm80"


def test_what_it_cannot_take_is_rejected_with_the_reason() -> None:
    narrow = replace(MASKED, alignment_bytes=2)
    reasons = [
        selected.reason
        for selected in H100().candidates(narrow)
        if isinstance(selected, Rejection) and selected.config["family"] == "sm90"
    ]
    assert reasons
    assert set(reasons) == {"TMA needs tensors aligned to 16 bytes, got 2"}


@pytest.mark.parametrize("dims", [(16, 16), (80, 96), (256, 512), (248, 264), (64, 400)])
def test_every_aligned_pair_of_head_dims_has_a_candidate(dims: tuple[int, int]) -> None:
    problem = replace(MASKED, dim_qk=dims[0], dim_v=dims[1])
    assert H100().default(problem).family == "sm90"


def test_a_policy_keeps_to_what_a_gpu_runs() -> None:
    policy = H100()
    assert policy.on((9, 0)) is policy
    for capability in ((8, 0), (10, 0), (12, 0)):
        there = policy.on(capability)
        assert there.families == ("sm80",)
        assert there.default(MASKED).family == "sm80"
        assert {selected.family for selected in there.legal(MASKED)} == {"sm80"}
    assert policy.families == ("sm90", "sm80")
    assert A100().on((7, 5)).families == ()


def test_a_gpu_of_that_capability_without_a_policy_has_it_too() -> None:
    h20 = from_properties(replace(H200, name="NVIDIA H20", num_sms=78))
    assert (h20.name, h20.families) == ("H20", ("sm90", "sm80"))
    assert h20.default(MASKED).family == "sm90"
    assert from_properties(RTX3090).families == ("sm80",)


def test_a_search_keeps_to_what_the_gpu_at_hand_runs(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    pipeline.environment = replace(pipeline.environment, compute_capability="12.0")
    records = RecordStore(tmp_path)
    prediction = tune(MASKED, H100(), pipeline=pipeline, records=records, effort="none")
    assert {row.candidate.family for row in prediction.rows} == {"sm80"}
    pipeline.environment = replace(pipeline.environment, compute_capability="7.5")
    with pytest.raises(UnsupportedArchitectureError, match=r"H100 .* capability 7\.5"):
        tune(MASKED, H100(), pipeline=pipeline, records=records, effort="none")


def test_it_is_compiled_for_its_capability_alone_and_stands_on_headers_of_its_own() -> None:
    target = BuildTarget(arch="80")
    assert target.of_family("sm80") is target
    own_target = target.of_family("sm90")
    assert (own_target.arch, own_target.ptx, own_target.cmake_architecture) == (
        "90a",
        False,
        "90a-real",
    )
    closure = include_closure(render(H100().default(MASKED)).text)
    assert any(path.endswith("attention_forward_sm90/mainloop.cuh") for path in closure)
    assert not any("sm80" in path for path in closure)


def test_a_family_takes_its_own_knobs() -> None:
    plain = H100().default(MASKED)
    with pytest.raises(TypeError, match="attention_forward_sm90 is not of family sm80"):
        candidate_from_config(plain.config | {"family": "sm80"})
    with pytest.raises(
        TypeError, match=r"does not compute attention backward .* got AttentionForwardSm90"
    ):
        Candidate.of(replace(MASKED, op="attention", mask="none", direction="backward"), KNOBS)
    assert families("retnet", "forward") == ("sm80", "sm90")
    assert families("attention", "forward") == families("attention", "backward") == ("sm80", "sm90")
    assert candidate_from_config(plain.config) == plain
    assert isinstance(A100().default(MASKED).knobs, ForwardKnobs)


def test_the_model_knows_that_warpgroups_are_faster_and_one_stage_is_not() -> None:
    policy = H100(H200_SPEC)
    problem = replace(MASKED, seqlen_q=2048, seqlen_k=2048)
    ranked = rank(problem, policy.legal(problem), policy.spec)
    assert ranked[0][0].family == "sm90"
    best_old = next(prediction for selected, prediction in ranked if selected.family == "sm80")
    assert ranked[0][1].us < 0.7 * best_old.us
    two, selected = (
        estimate(problem, replace(policy.default(problem), knobs=knobs), policy.spec).us
        for knobs in (KNOBS, replace(KNOBS, mask_stages=1))
    )
    assert two < selected
    causal = replace(problem, causal=True)
    assert estimate(causal, policy.default(causal), policy.spec).us < 0.7 * two
    longer = replace(problem, seqlen_k=4096)
    assert 1.8 < estimate(longer, policy.default(longer), policy.spec).us / two < 2.2


def test_shared_heads_of_keys_and_values_are_moved_once() -> None:
    selected = H100().default(MASKED)
    shared = replace(MASKED, heads_kv=1)
    whole, less = (
        estimate(variant, selected, H200_SPEC).terms["hbm_us"] for variant in (MASKED, shared)
    )
    keys_and_values = 2 * 8 * 7 * MASKED.seqlen_k * (256 + 256)  # bytes of 7 heads, 8 batches
    assert whole - less == pytest.approx(keys_and_values * 1e6 / H200_SPEC.hbm_bytes_per_second)


def test_a_gpu_without_such_products_takes_forever() -> None:
    prediction = estimate(MASKED, H100().default(MASKED), A100().spec)
    assert (prediction.us, prediction.limiter) == (inf, "residency")
