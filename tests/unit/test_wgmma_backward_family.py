"""Retnet's backward of family sm90: where it is offered, what its passes are, what they should take."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.cli import names
from attention_autotuner.codegen.render import include_closure, render
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import resources
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.legality import check, check_kernel
from attention_autotuner.kernels.registry import families
from attention_autotuner.kernels.scores_backward_sm90.knobs import BackwardSm90Knobs
from attention_autotuner.kernels.scores_backward_sm90.resources import (
    ScoreBands,
    computing_shapes,
    smem_bytes,
)
from attention_autotuner.kernels.scores_backward_sm90.rules import MAX_STAGES
from attention_autotuner.kernels.scores_backward_sm90.space import fit
from attention_autotuner.tuning.shortlist import kind_of, shape_of
from benchmarks.exhaustive import stratum_of
from tests.pass_names import pass_named

MASKED = Problem(
    op="retnet",
    direction="backward",
    mask="explicit",
    batch=8,
    heads_q=8,
    heads_kv=8,
    seqlen_q=2048,
    seqlen_k=2048,
    dim_qk=256,
    dim_v=512,
)
FEW_HEADS = replace(MASKED, batch=2)
POLICY = H100(H200_SPEC)


def knobs_of(candidate: Candidate) -> BackwardSm90Knobs:
    assert isinstance(candidate.knobs, BackwardSm90Knobs)
    return candidate.knobs


def test_a_masked_backward_has_it_first_on_an_h100_and_nowhere_else() -> None:
    assert POLICY.default(MASKED).family == "sm90"
    assert {selected.family for selected in POLICY.legal(MASKED)} == {"sm80", "sm90"}
    assert {selected.family for selected in A100().legal(MASKED)} == {"sm80"}
    assert POLICY.on((12, 0)).default(MASKED).family == "sm80"
    for problem in (
        replace(MASKED, alignment_bytes=2),
        replace(MASKED, op="attention", mask="none"),  # values too wide
    ):
        assert POLICY.default(problem).family == "sm80"
    assert families("retnet", "backward") == ("sm80", "sm90")


def test_it_serves_deterministic_problems_with_the_same_kernels() -> None:
    strict = replace(MASKED, deterministic=True)
    assert POLICY.default(strict) == POLICY.default(MASKED)
    assert POLICY.default(strict).deterministic


@pytest.mark.parametrize("dims", [(16, 16), (80, 96), (128, 64), (256, 512), (248, 264), (64, 400)])
def test_every_aligned_pair_of_head_dims_has_a_legal_default(dims: tuple[int, int]) -> None:
    problem = replace(MASKED, dim_qk=dims[0], dim_v=dims[1])
    prediction = POLICY.default(problem)
    assert prediction.family == "sm90"
    assert check(prediction, POLICY.spec) is None


def test_scores_of_wide_heads_come_in_parts_and_their_values_in_slices() -> None:
    knobs = knobs_of(POLICY.default(FEW_HEADS))
    assert knobs.dk is not None
    assert (knobs.dq.depth_slices, knobs.dk.depth_slices, knobs.dv.depth_slices) == (8, 8, 2)
    assert (knobs.dq.slices, knobs.dv.slices) == (1, 2)
    assert not any(selected.ping_pong for selected in knobs.passes.values())
    narrow = knobs_of(POLICY.default(replace(MASKED, dim_qk=128, dim_v=128)))
    assert narrow.dk is not None
    assert narrow.dk.ping_pong
    assert narrow.dk.depth_slices == 1


@pytest.mark.parametrize(("dim", "stages"), [(64, 3), (128, 2)])
def test_a_pass_takes_all_the_stages_that_fit(dim: int, stages: int) -> None:
    narrow = POLICY.default(replace(MASKED, dim_qk=dim, dim_v=dim, deterministic=True))
    for shape in computing_shapes(narrow):
        prediction = fit(shape, POLICY.spec)
        assert prediction == shape.knobs
        assert prediction.num_stages == prediction.slice_stages == stages
        more = replace(
            shape, knobs=replace(prediction, num_stages=stages + 1, slice_stages=stages + 1)
        )
        assert stages == MAX_STAGES or smem_bytes(more) > POLICY.spec.smem_per_block_bytes


def test_what_it_cannot_take_is_rejected_with_the_reason() -> None:
    unaligned = POLICY.candidates(replace(MASKED, alignment_bytes=2))
    reasons = {
        selected.reason
        for selected in unaligned
        if isinstance(selected, Rejection) and selected.config["family"] == "sm90"
    }
    assert reasons == {"TMA needs tensors aligned to 16 bytes, got 2"}
    default = POLICY.default(MASKED)
    knobs = knobs_of(default)
    turning = replace(default, knobs=replace(knobs, dq=replace(knobs.dq, ping_pong=True)))
    rejection = check_kernel(turning)
    assert rejection is not None
    assert rejection.predicate == "sliced_depth_has_no_ping_pong"
    assert "MMAs of 8 depth slices" in rejection.reason


def test_it_is_told_in_its_own_words_and_told_apart() -> None:
    selected = POLICY.default(replace(MASKED, dim_qk=128, dim_v=128))
    cells = names.knobs(selected)
    assert len(cells) == len(names.knob_headings(MASKED))
    assert cells[:2] == ["sm90", "three_kernels"]
    assert cells[2].startswith("dq:g2c128s2p1x2v1tk64 dk:g2c128s2p1x2v1tk64 dv:")
    assert cells[3:] == ["raster", "deterministic"]
    known = knobs_of(selected)
    dq, dk, dv = (replace(variant, ping_pong=False) for variant in known.passes.values())
    calm = replace(known, dq=dq, dk=dk, dv=dv)
    other = replace(selected, knobs=calm)
    assert shape_of(selected) == shape_of(other)
    assert kind_of(selected) != kind_of(other)
    small = POLICY.default(replace(MASKED, dim_qk=256, dim_v=256))
    assert shape_of(selected) != shape_of(small)
    assert stratum_of(selected) != stratum_of(small)


def test_no_slices_at_all_are_refused_with_a_reason() -> None:
    default = POLICY.default(MASKED)
    known = knobs_of(default)
    none = replace(default, knobs=replace(known, dv=replace(known.dv, slices=0)))
    rejection = check_kernel(none)
    assert rejection is not None
    assert rejection.reason == "slices must be at least 1, got 0"


def test_its_candidates_survive_json_and_name_their_passes() -> None:
    for selected in POLICY.legal(MASKED):
        assert candidate_from_config(selected.config) == selected
    for problem, words in (
        (FEW_HEADS, "_dq_g2c64s1p8x6v1k64_dk_g2c64s1p8x6v1k64_"),
        (MASKED, "_dq_g2c64s1p8x6v1_stored_dk_g2r64s4_"),
    ):
        default = POLICY.default(problem)
        assert words in default.name
        assert default.name.endswith("_dv_g2c64s1p2x8v2e1_raster_gathered_c16")
        assert [kernel.name for kernel in resources.kernels(default)] == ["dq", "dk", "dv"]


@pytest.mark.parametrize(
    ("problem", "stored"),
    [
        ({}, "g2r64s4"),
        ({"seqlen_q": 512, "seqlen_k": 512, "batch": 32}, "g2r64s4"),
        ({"dim_v": 256}, "g2r64s4"),
        ({"dim_v": 256, "seqlen_q": 512, "seqlen_k": 512, "batch": 32}, None),
        ({"dim_qk": 128, "dim_v": 256}, "g2r128s4"),
        ({"dim_qk": 192, "dim_v": 192}, "g2r64s5"),
        ({"dim_qk": 128, "dim_v": 128}, None),
        ({"causal": True}, None),
        ({"batch": 2}, None),
        ({"seqlen_q": 32768, "seqlen_k": 32768}, None),
    ],
)
def test_stored_scores_are_the_default_where_they_were_faster(
    problem: dict[str, Any], stored: str | None
) -> None:
    selected = POLICY.default(replace(MASKED, **problem))
    knobs = knobs_of(selected)
    assert (knobs.stored_dk and knobs.stored_dk.label) == stored
    assert check(selected, POLICY.spec) is None


def test_stored_scores_take_half_of_all_at_most() -> None:
    for problem in (MASKED, replace(MASKED, batch=6, heads_q=24, heads_kv=12, seqlen_q=1000)):
        everything = 2 * problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
        storing = [c for c in POLICY.legal(problem) if getattr(c.knobs, "stored_dk", None)]
        assert storing
        for selected in storing:
            bands = ScoreBands.of(problem, selected)
            assert 2 * bands.num_bytes <= 0.5 * everything
            assert bands.count * bands.num_bytes >= everything


def test_kernels_are_told_apart_by_their_names() -> None:
    mangled = (
        "_ZN19attention_autotuner20scores_backward_sm90INS_14PassSm90TraitsINS0_6ConfigENS1_2Dk"
        "ELNS_6ResultE1EEEEEvNS_17PassSm90ArgumentsENS_8TileListE"
    )
    selected = POLICY.default(replace(MASKED, dim_qk=128, dim_v=128))
    assert pass_named(selected, mangled) == "dk"
    assert pass_named(selected, mangled.replace("ResultE1", "ResultE0")) == "dq"
    stored = (
        "_ZN19attention_autotuner27scores_backward_sm90_storedINS_20StoredPassSm90TraitsIN12_GLOBAL__N_1"
        "6ConfigEEEEEvNS_19StoredSm90ArgumentsENS_8TileListE"
    )
    assert pass_named(POLICY.default(MASKED), stored) == "dk"
    assert pass_named(selected, stored) is None


def test_it_stands_on_headers_of_its_own() -> None:
    closure = include_closure(render(POLICY.default(MASKED)).text)
    assert any(path.endswith("scores_backward_sm90/mainloop.cuh") for path in closure)
    assert not any("sm80" in path for path in closure)


def test_the_model_knows_that_warpgroups_are_faster() -> None:
    ranked = rank(MASKED, POLICY.legal(MASKED), POLICY.spec)
    assert ranked[0][0].family == "sm90"
    best_old = next(prediction for selected, prediction in ranked if selected.family == "sm80")
    assert ranked[0][1].us < 0.7 * best_old.us
    best = next(
        prediction.us
        for selected, prediction in ranked
        if selected.family == "sm90" and knobs_of(selected).stored_dk is None
    )
    assert ranked[0][1].us < best
    causal = replace(MASKED, causal=True)
    assert estimate(causal, POLICY.default(causal), POLICY.spec).us < 0.7 * best
    untuned = estimate(MASKED, POLICY.default(MASKED), POLICY.spec).us
    longer = replace(MASKED, seqlen_q=4096)
    assert 1.8 < estimate(longer, POLICY.default(longer), POLICY.spec).us / untuned < 2.2


def test_slices_of_dv_that_share_scores_are_the_default_where_they_were_faster() -> None:
    sharing = [
        selected
        for selected in POLICY.legal(MASKED)
        if selected.family == "sm90" and knobs_of(selected).dv.exchange_stages
    ]
    assert len(sharing) == 24
    assert sum(knobs_of(selected).stored_dk is not None for selected in sharing) == 12
    assert {knobs_of(selected).dv.step_columns for selected in sharing} == {128}
    default = POLICY.default(MASKED)
    assert default in sharing
    alone = next(
        selected
        for selected in POLICY.legal(MASKED)
        if selected.family == "sm90" and not knobs_of(selected).dv.exchange_stages
    )
    shorter = [estimate(MASKED, selected, POLICY.spec).us for selected in sharing]
    assert max(shorter) < estimate(MASKED, alone, POLICY.spec).us
    for other in (replace(MASKED, causal=True), replace(MASKED, batch=1, heads_q=1, heads_kv=1)):
        assert knobs_of(POLICY.default(other)).dv.exchange_stages == 0
    assert not any("e1_" in c.name for c in POLICY.legal(replace(MASKED, dim_v=256)))


@pytest.mark.parametrize(
    ("dims", "kept"),
    [
        ((128, 128), {"dq": 64, "dk": 64, "dv": 64}),
        ((96, 96), {"dq": 64, "dk": 64, "dv": 64}),
        ((64, 128), {"dq": 64, "dk": 64, "dv": 0}),  # dV's depth is one block, which stays anyhow
        ((256, 128), {"dq": 0, "dk": 0, "dv": 0}),
    ],
)
def test_passes_of_two_blocks_of_columns_keep_one_of_them(
    dims: tuple[int, int], kept: dict[str, int]
) -> None:
    problem = replace(MASKED, seqlen_q=512, seqlen_k=512, dim_qk=dims[0], dim_v=dims[1])
    default = knobs_of(POLICY.default(problem))
    assert {name: made.kept_depth for name, made in default.passes.items()} == kept
    alike = [
        knobs_of(selected)
        for selected in POLICY.legal(problem)
        if selected.kernel == "scores_backward_sm90"
        and knobs_of(selected).dq.block_columns == 128
        and knobs_of(selected).gathered_stores
    ]
    assert {knobs.dq.kept_depth for knobs in alike} == ({0, 64} if dims[0] <= 128 else set())


def test_shared_heads_walk_as_many_queries() -> None:
    selected = POLICY.default(MASKED)
    alone, shared = (
        estimate(variant, selected, POLICY.spec).terms["tensor_us"]
        for variant in (MASKED, replace(MASKED, heads_kv=2))
    )
    assert shared == pytest.approx(alone)


def test_a_gpu_without_such_products_takes_forever() -> None:
    prediction = estimate(MASKED, POLICY.default(MASKED), A100().spec)
    assert (prediction.us, prediction.limiter) == (inf, "residency")
