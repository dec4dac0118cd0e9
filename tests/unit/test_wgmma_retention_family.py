"""Retention's kernels of warpgroup products: where they are offered, what of, and what the model makes of them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import arch
from attention_autotuner.arch import A100, H100
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.arch.measured_specs import read
from attention_autotuner.arch.resolution import policy_with
from attention_autotuner.cli.names import knob_headings, knobs
from attention_autotuner.codegen.render import include_closure, render
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_backward_sm90.knobs import ChunkwiseBackwardSm90Knobs
from attention_autotuner.kernels.chunks_backward_sm90.resources import shapes_of
from attention_autotuner.kernels.chunks_sm80.knobs import ChunksKnobs
from attention_autotuner.kernels.chunks_sm90.knobs import ChunkwiseSm90Knobs
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.registry import families, kernel_of
from attention_autotuner.tuning.shortlist import kind_of, shape_of
from benchmarks.exhaustive import stratum_of

POLICY = H100(H200_SPEC)
H200_AS_MEASURED = policy_with(
    read(Path(arch.__file__).with_name("measured") / "nvidia-h200.json")
).spec
DECAYED = Problem(
    op="retention",
    causal=True,
    batch=8,
    heads_q=8,
    heads_kv=8,
    seqlen_q=2048,
    seqlen_k=2048,
    dim_qk=256,
    dim_v=512,
)
# (dim_qk, dim_v, batch, heads, tokens): microseconds by (warpgroups, stages, CTAs an SM, super-chunk), on one H200, in
# fp16. Races of bf16 since then (tests/unit/test_retention_defaults.py) have a head dim of 256 faster by up to a tenth.
MEASURED_US: dict[tuple[int, int, int, int, int], dict[tuple[int, int, int, int], float]] = {
    (256, 512, 8, 8, 2048): {(2, 2, 1, 0): 172.7, (1, 2, 1, 0): 280.3},
    (256, 512, 4, 8, 4096): {(2, 2, 1, 0): 173.4, (2, 2, 1, 2048): 244.3},
    (256, 512, 2, 8, 8192): {(1, 2, 1, 0): 289.0, (2, 2, 1, 4096): 231.8, (2, 2, 1, 2048): 292.4},
    (256, 512, 1, 8, 16384): {(2, 2, 1, 4096): 254.8, (2, 2, 1, 8192): 421.6, (2, 2, 1, 0): 677.8},
    (256, 256, 8, 8, 2048): {(2, 2, 1, 0): 102.7, (1, 2, 1, 0): 149.3},
    (128, 256, 8, 16, 2048): {(2, 3, 1, 0): 137.6},
    (128, 128, 8, 16, 4096): {(2, 3, 1, 0): 141.5},
    (64, 64, 8, 32, 2048): {(1, 3, 2, 0): 72.2},
}


def wide_candidate(problem: Problem, **changes: Any) -> Candidate:
    candidate = POLICY.default(problem)
    assert isinstance(candidate.knobs, ChunkwiseSm90Knobs)
    return replace(candidate, knobs=replace(candidate.knobs, **changes))


def sized(dim_qk: int, dim_v: int, batch: int, heads: int, tokens: int) -> Problem:
    return replace(
        DECAYED,
        dim_qk=dim_qk,
        dim_v=dim_v,
        batch=batch,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=tokens,
        seqlen_k=tokens,
    )


def test_a_forward_of_some_length_has_it_first_on_an_h100_and_nowhere_else() -> None:
    for problem in (DECAYED, replace(DECAYED, form="chunkwise", dtype="bf16", heads_kv=2)):
        default = H100().default(problem)
        assert (default.family, default.form) == ("sm90", "chunkwise")
        assert {selected.family for selected in H100().legal(problem)} == {"sm80", "sm90"}
        assert {selected.family for selected in A100().legal(problem)} == {"sm80"}
    others = (
        replace(DECAYED, form="parallel"),
        replace(DECAYED, form="recurrent"),
        replace(DECAYED, seqlen_q=63, seqlen_k=63),
        replace(DECAYED, alignment_bytes=2),
    )
    for problem in others:
        assert {selected.family for selected in H100().legal(problem)} == {"sm80"}, (
            problem.describe()
        )
        assert H100().default(problem).family == "sm80"
    assert families("retention", "forward") == ("sm80", "sm90")
    assert families("retention", "backward") == ("sm80", "sm90")


def test_what_it_cannot_take_is_rejected_with_the_reason() -> None:
    narrow = replace(DECAYED, alignment_bytes=2)
    reasons = {
        selected.reason
        for selected in H100().candidates(narrow)
        if isinstance(selected, Rejection) and selected.config["family"] == "sm90"
    }
    assert reasons == {"TMA needs tensors aligned to 16 bytes, got 2"}
    refused = {
        (selected.predicate, selected.reason)
        for selected in H100().candidates(DECAYED)
        if isinstance(selected, Rejection) and selected.config["family"] == "sm90"
    }
    assert {predicate for predicate, _ in refused} == {"state_fits_warpgroup", "smem_fits_block"}
    bound = "needs about 216 registers a thread, 2 CTAs of 1 warpgroups leave 184"
    assert ("state_fits_warpgroup", bound) in refused


@pytest.mark.parametrize(
    "dims", [(16, 16), (80, 96), (192, 192), (248, 264), (256, 64), (64, 400), (256, 512)]
)
def test_every_aligned_pair_of_head_dims_has_a_candidate(dims: tuple[int, int]) -> None:
    problem = replace(DECAYED, dim_qk=dims[0], dim_v=dims[1])
    default = H100().default(problem)
    assert default.family == "sm90"
    assert candidate_from_config(default.config) == default
    assert default in H100().legal(problem)


@pytest.mark.parametrize(
    ("batch", "tokens", "wanted"),
    [
        (8, 2048, (2, 0)),  # 256 CTAs of two warpgroups
        (3, 4096, (2, 0)),  # 96
        (2, 4096, (1, 0)),  # 64, or 128 of one
        (2, 8192, (2, 4096)),  # as few, but long
        (1, 16384, (2, 4096)),  # 32, or 64
        (1, 1024, (2, 256)),  # 32, or 64, or 128 of four super-chunks
    ],
)
def test_few_heads_of_long_sequences_are_divided(
    batch: int, tokens: int, wanted: tuple[int, int]
) -> None:
    prediction = POLICY.default(sized(256, 512, batch, 8, tokens)).knobs
    assert isinstance(prediction, ChunkwiseSm90Knobs)
    assert (prediction.warpgroups, prediction.super_chunk) == wanted
    assert prediction.ctas_per_sm == 1


def test_it_stands_on_headers_of_its_own_and_is_told_in_its_own_words() -> None:
    default = POLICY.default(DECAYED)
    assert default.kernel == "chunks_sm90"
    assert kernel_of(default).entry(default).cpp_type == "ChunksSm90Entry"
    closure = include_closure(render(default).text)
    assert any(path.endswith("chunks_sm90/mainloop.cuh") for path in closure)
    cells = knobs(wide_candidate(DECAYED, super_chunk=1024))
    assert len(cells) == len(knob_headings(DECAYED))
    assert cells == ["sm90", "chunkwise", "64 of 1024", "128 columns 2 groups 2 stages", "-"]
    assert knobs(wide_candidate(DECAYED, ctas_per_sm=2))[-1] == "2 CTAs/SM"
    other = wide_candidate(DECAYED, num_stages=3)
    assert shape_of(default) == shape_of(other)
    assert kind_of(default) != kind_of(other)
    assert stratum_of(default) != stratum_of(other)


@pytest.mark.parametrize("shape", MEASURED_US, ids=str)
def test_the_model_meets_what_was_measured(shape: tuple[int, int, int, int, int]) -> None:
    problem = sized(*shape)
    for (groups, stages, ctas, size), us in MEASURED_US[shape].items():
        selected = wide_candidate(
            problem, warpgroups=groups, num_stages=stages, ctas_per_sm=ctas, super_chunk=size
        )
        assert 0.83 < estimate(problem, selected, H200_AS_MEASURED).us / us < 1.1, selected.name


def test_the_model_knows_that_warpgroups_are_faster_than_warps() -> None:
    ranked = rank(DECAYED, POLICY.legal(DECAYED), POLICY.spec)
    assert ranked[0][0] == POLICY.default(DECAYED)
    best_old = next(
        prediction for selected, prediction in ranked if isinstance(selected.knobs, ChunksKnobs)
    )
    assert ranked[0][1].us < 0.7 * best_old.us


def test_states_of_super_chunks_cost_what_pays_only_where_sms_are_idle() -> None:
    busy, idle = DECAYED, sized(256, 512, 1, 8, 16384)
    for problem, pays in ((busy, False), (idle, True)):
        whole, divided = (
            estimate(problem, wide_candidate(problem, super_chunk=size), POLICY.spec)
            for size in (0, 4096)
        )
        if problem is busy:  # one stretch: there is nothing to divide
            assert whole == divided
            divided = estimate(problem, wide_candidate(problem, super_chunk=1024), POLICY.spec)
        assert (divided.us < whole.us) == pays
        assert divided.terms["auxiliary_us"] > 0


def test_a_gpu_without_such_products_takes_forever() -> None:
    prediction = estimate(DECAYED, H100().default(DECAYED), A100().spec)
    assert (prediction.us, prediction.limiter) == (inf, "residency")


BACKWARD = replace(DECAYED, direction="backward", dim_v=256)


def test_gradients_are_offered_where_hopper_is_and_by_default() -> None:
    assert {selected.family for selected in H100().legal(BACKWARD)} == {"sm80", "sm90"}
    assert H100().default(BACKWARD).kernel == "chunks_backward_sm90"
    assert {selected.family for selected in A100().legal(BACKWARD)} == {"sm80"}


def test_gradients_of_what_it_cannot_take_are_left_to_warps() -> None:
    others = (
        replace(BACKWARD, seqlen_q=63, seqlen_k=63),
        replace(BACKWARD, alignment_bytes=2),
    )
    for problem in others:
        assert {selected.family for selected in H100().legal(problem)} == {"sm80"}
        assert H100().default(problem).kernel == "chunks_sm80"


def test_a_depth_beyond_256_is_for_two_warpgroups() -> None:
    deep = replace(BACKWARD, dim_v=512)
    reasons = {
        selected.reason
        for selected in H100().candidates(deep)
        if isinstance(selected, Rejection) and selected.config["kernel"] == "chunks_backward_sm90"
    }
    assert "dq: needs about 344 registers a thread, 1 CTAs of 1 warpgroups leave 240" in reasons
    knobs = [
        selected.knobs
        for selected in H100().legal(deep)
        if isinstance(selected.knobs, ChunkwiseBackwardSm90Knobs)
    ]
    assert {selected.warpgroups for selected in knobs} == {2}
    default = POLICY.default(deep)
    shapes = shapes_of(default)
    assert [shapes[name].slices for name in ("dq", "dk", "dv")] == [4, 4, 4]
    assert [shapes[name].depth for name in ("dq", "dk", "dv")] == [512, 512, 256]
    assert default.knobs in knobs
    assert POLICY.default(replace(deep, dim_v=320)).kernel == "chunks_sm80"


@pytest.mark.parametrize(
    "dims", [(16, 16), (80, 96), (192, 128), (64, 256), (256, 256), (256, 384), (256, 512)]
)
def test_gradients_of_every_other_pair_of_head_dims_have_a_candidate(
    dims: tuple[int, int],
) -> None:
    problem = replace(BACKWARD, dim_qk=dims[0], dim_v=dims[1], heads_kv=2)
    default, legal = H100().default(problem), H100().legal(problem)
    assert isinstance(default.knobs, ChunkwiseBackwardSm90Knobs)
    assert default in legal
    assert candidate_from_config(default.config) == default
    assert default.form == "auto"


@pytest.mark.parametrize(
    ("batch", "tokens", "wanted"),
    [
        (8, 2048, (2, 0)),  # 384 CTAs of two warpgroups, three passes side by side
        (4, 4096, (2, 0)),  # 192
        (2, 8192, (2, 0)),  # 96
        (
            1,
            16384,
            (2, 2048),
        ),  # 48, or 96 of one, which take longer than three passes of eight parts
        (1, 1024, (1, 0)),  # as few
    ],
)
def test_gradients_keep_sequences_whole_where_that_employs_the_gpu(
    batch: int, tokens: int, wanted: tuple[int, int]
) -> None:
    problem = replace(BACKWARD, batch=batch, seqlen_q=tokens, seqlen_k=tokens)
    chosen = POLICY.default(problem)
    assert isinstance(chosen.knobs, ChunkwiseBackwardSm90Knobs)
    assert (chosen.knobs.warpgroups, chosen.knobs.super_chunk) == wanted
    others = [other for other in POLICY.legal(problem) if other.kernel == chosen.kernel]
    best = min(estimate(problem, other, POLICY.spec).us for other in others)
    assert estimate(problem, chosen, POLICY.spec).us < 1.1 * best


def test_gradients_take_the_time_of_three_passes() -> None:
    default = POLICY.default(BACKWARD)
    forward = replace(DECAYED, dim_v=256)
    pass_us = estimate(forward, wide_candidate(forward), POLICY.spec).us
    whole = estimate(BACKWARD, default, POLICY.spec).us
    assert 2.5 * pass_us < whole < 4.0 * pass_us
    grouped = replace(BACKWARD, heads_kv=2)
    assert estimate(grouped, default, POLICY.spec).us > whole
