"""Attention's forward kernel of family sm90: where it is offered, what it rejects, what it should take."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.codegen.render import include_closure, render
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import knobs_of
from attention_autotuner.kernels.attention_forward_sm90.resources import shape_of, smem_bytes
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.legality import check
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.kernels.shared.split_kv import row_tiles
from tests.candidates import offered_by

KERNEL = "attention_forward_sm90"
POLICY = H100(H200_SPEC)
PROBLEM = Problem(batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_k=4096)
DIMS = [
    (16, 16), (32, 32), (56, 56), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (120, 120), (128, 128),
    (160, 160), (176, 176), (192, 192), (240, 240), (256, 256), (192, 128), (128, 256), (256, 128), (64, 128),
    (128, 64),
]  # fmt: skip


def with_dims(dims: tuple[int, int], **options: Any) -> Problem:
    return replace(PROBLEM, dim_qk=dims[0], dim_v=dims[1], **options)


def offered(problem: Problem) -> list[Candidate]:
    return offered_by(KERNEL, problem, POLICY.spec)


@pytest.mark.parametrize("dims", DIMS)
def test_all_head_dims_have_a_default_and_few_candidates(dims: tuple[int, int]) -> None:
    problem = with_dims(dims)
    candidates = offered(problem)
    assert 10 < len(candidates) <= 56
    assert POLICY.default(problem) in candidates
    causal = POLICY.default(replace(problem, causal=True))
    assert causal in candidates
    assert knobs_of(causal).schedule == "dynamic"
    assert all(smem_bytes(shape_of(candidate)) <= 227 * 1024 for candidate in candidates)
    assert len({candidate.name for candidate in candidates}) == len(candidates)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((64, 64), "g4n64_scores_first_optimistic_turns_q2k3v3_oq"),
        ((80, 80), "g3n96_scores_first_optimistic_turns_q2k2v2_oq"),
        ((96, 96), "g3n96_scores_first_optimistic_turns_q2k2v2_oq"),
        ((112, 112), "g3n96_scores_first_optimistic_turns_q2k2v2_oq"),
        ((128, 128), "g3n64_scores_first_optimistic_turns_q2k3v3_oq"),
        ((192, 128), "g3n64_scores_first_optimistic_turns_q2k2v2_oq"),
        ((128, 256), "g2n64_overlap_flat_optimistic_free_q2k3v3_od"),
        ((256, 128), "g2n64_overlap_optimistic_free_q2k2v2_oq"),
        ((256, 256), "g2n64_overlap_optimistic_free_q1k2v2_od"),
    ],
)
def test_defaults_are_those_that_were_measured(dims: tuple[int, int], words: str) -> None:
    assert POLICY.default(with_dims(dims)).knobs.label == f"{words}_static"


# dim, batch, heads, tokens, causal; then the fastest tile of an H200, of those that were raced.
TILES = [
    ((32, 24, 12, 100, False), "g1n64_overlap"),
    ((32, 4, 16, 1025, False), "g3n96_scores_first"),
    ((32, 24, 12, 1025, True), "g3n128_serial"),
    ((64, 1, 12, 257, False), "g1n64_overlap"),
    ((64, 1, 12, 450, True), "g1n128_overlap"),
    ((64, 2, 20, 300, False), "g2n64_overlap"),
    ((64, 64, 12, 100, True), "g2n64_overlap"),
    ((64, 8, 12, 257, False), "g3n96_scores_first"),
    ((64, 2, 20, 6000, False), "g3n128_serial"),
    ((64, 2, 20, 4100, True), "g3n128_serial"),
    ((64, 8, 12, 197, False), "g4n64_serial"),
    ((80, 4, 16, 230, False), "g2n64_overlap"),
    ((96, 1, 12, 785, False), "g2n64_overlap"),
    ((96, 24, 12, 300, False), "g3n64_scores_first"),
    ((128, 2, 16, 160, False), "g1n64_overlap"),
    ((128, 2, 16, 300, False), "g2n64_overlap"),
    ((128, 4, 32, 197, True), "g2n64_overlap"),
    ((128, 2, 16, 1025, False), "g3n80_scores_first"),
    ((128, 4, 32, 729, False), "g3n64_scores_first"),
    ((256, 1, 12, 100, True), "g1n64_overlap"),
    ((256, 24, 12, 577, True), "g2n64_overlap"),
]


@pytest.mark.parametrize(("sizes", "words"), TILES)
def test_tiles_of_rows_suit_the_sms(sizes: tuple[int, int, int, int, bool], words: str) -> None:
    dim, batch, heads, rows, causal = sizes
    problem = with_dims(
        (dim, dim),
        batch=batch,
        heads_q=heads,
        heads_kv=heads,
        causal=causal,
        seqlen_q=rows,
        seqlen_k=rows,
    )
    assert POLICY.default(problem).knobs.label.startswith(f"{words}_")
    assert POLICY.default(problem) in offered(problem)


def test_long_uneven_tiles_are_claimed() -> None:
    """Fixed shares of 1024 tiles, of heads whose K and V come section by section, took 1.4 times as long."""
    problem = with_dims(
        (256, 256), batch=16, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024, causal=True
    )
    assert knobs_of(POLICY.default(problem)).schedule == "dynamic"
    # Of one section, the order of the list evens them out, and nothing is cleared before the launch.
    short = replace(problem, dim_qk=80, dim_v=80, batch=24, seqlen_q=256, seqlen_k=256)
    assert knobs_of(POLICY.default(short)).schedule == "static"


def test_packed_sequences_take_the_widest_tile() -> None:
    packed = with_dims((64, 64), batch=2, packed_rows=(160, 160), seqlen_q=160, seqlen_k=160)
    assert knobs_of(POLICY.default(packed)).warpgroups == 4


def test_every_main_loop_and_schedule_is_offered() -> None:
    knobs = [knobs_of(candidate) for dims in DIMS for candidate in offered(with_dims(dims))]
    assert {k.mainloop for k in knobs} == {"serial", "scores_first", "overlap", "overlap_flat"}
    assert {k.schedule for k in knobs} == {"grid", "static", "dynamic"}
    assert {k.output for k in knobs} == {"through_q", "direct"}
    assert {k.warpgroups for k in knobs} == {1, 2, 3, 4}


def test_it_serves_attention_forward_on_this_capability_alone() -> None:
    assert KERNELS[KERNEL].serves == {
        ("attention", "forward", "softmax"),
        ("retnet", "forward", "masked"),
    }
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


# batch, heads_q, heads_kv, seqlen_q, seqlen_k, dims; then warpgroups, packed, and splits of the default.
FEW_QUERIES = [
    ((64, 32, 8, 1, 8192, (128, 128)), (1, True, 1)),
    ((16, 32, 8, 1, 8192, (64, 64)), (1, True, 1)),
    ((16, 32, 8, 1, 8192, (96, 96)), (1, True, 1)),
    ((16, 32, 8, 1, 8192, (256, 256)), (1, True, 1)),
    ((16, 16, 16, 1, 8192, (192, 128)), (1, False, 1)),
    ((1, 16, 16, 128, 16384, (128, 128)), (2, False, 8)),
    ((8, 32, 8, 4, 8192, (128, 128)), (1, True, 2)),
    ((1, 32, 8, 1, 131072, (128, 128)), (1, True, 16)),
    ((1, 8, 8, 1, 100, (128, 128)), (1, False, 1)),
    ((1, 71, 1, 1, 8192, (64, 64)), (2, True, 32)),
    ((2, 16, 2, 63, 4096, (128, 128)), (1, True, 4)),
    ((16, 32, 8, 1, 8192, (16, 16)), (1, True, 1)),
    ((16, 32, 8, 1, 8192, (32, 32)), (1, True, 1)),
]


def few_queries(sizes: tuple[int, int, int, int, int, tuple[int, int]], **more: Any) -> Problem:
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, (dim_qk, dim_v) = sizes
    return Problem(
        dtype="bf16", batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_q=seqlen_q,
        seqlen_k=seqlen_k, dim_qk=dim_qk, dim_v=dim_v, causal=seqlen_q > 1, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("sizes", "wanted"), FEW_QUERIES)
def test_few_queries_stream_keys_that_ctas_split(
    sizes: tuple[int, int, int, int, int, tuple[int, int]], wanted: tuple[int, bool, int]
) -> None:
    problem = few_queries(sizes)
    default = POLICY.default(problem)
    knobs = knobs_of(default)
    assert (knobs.warpgroups, knobs.pack_gqa, knobs.splits) == wanted
    assert knobs.split_kv
    streams = [c for c in offered(problem) if knobs_of(c).split_kv]
    assert default in streams
    assert len({c.compiled for c in streams}) <= 28
    assert len({c.name for c in streams}) == len(streams)
    # Nearly all SMs have work, or as many as there are pairs of tiles of keys.
    tiles = row_tiles(problem, knobs) * knobs.splits
    key_tiles = -(-problem.seqlen_k // knobs.block_n)
    assert tiles >= 0.85 * POLICY.spec.num_sms or 2.1 * knobs.splits >= key_tiles
    for candidate in streams:
        knobs = knobs_of(candidate)
        held = knobs.k_stages * knobs.block_n * 2 * (problem.padded_dim_qk + problem.padded_dim_v)
        assert 50 * 1024 < held <= 100 * 1024 or knobs.k_stages in (2, 6)


def test_the_keys_of_a_chunk_of_few_heads_are_shared() -> None:
    chunk = Problem(batch=1, heads_q=4, heads_kv=1, seqlen_q=512, seqlen_k=32768, causal=True)
    ranked = rank(chunk, offered(chunk), POLICY.spec)
    assert knobs_of(ranked[0][0]).split_kv
    default = POLICY.default(chunk)
    assert (knobs_of(default).warpgroups, knobs_of(default).splits) == (3, 12)
    assert default in offered(chunk)
    plain = replace(default, knobs=replace(default.knobs, splits=1))
    assert ranked[0][1].us < 0.4 * estimate(chunk, plain, POLICY.spec).us
    # Some of these share them as well, in fewer splits.
    for changes in ({"batch": 4}, {"seqlen_k": 2048}, {"causal_alignment": "top_left"}):
        assert any(knobs_of(c).split_kv for c in offered(replace(chunk, **changes))), changes
    assert knobs_of(POLICY.default(replace(chunk, seqlen_k=2048))).splits == 4
    window = knobs_of(POLICY.default(replace(chunk, window_size=(1023, -1))))
    assert (window.split_kv, window.splits) == (True, 6)
    others: list[dict[str, Any]] = [
        {"batch": 9},
        {"modifications": ("prefix_lens",)},
        {"packed_rows": (512, 32768)},
    ]
    for changes in others:
        candidates = offered(replace(chunk, **changes))
        splits = [c for c in candidates if getattr(c.knobs, "split_kv", False)]
        assert splits == [], changes


def test_lone_splits_are_for_few_queries() -> None:
    problem = Problem(batch=1, heads_q=4, heads_kv=4, seqlen_q=256, seqlen_k=256)
    for seqlen in (64, 100, 256, 512, 1024, 2048):
        knobs = knobs_of(POLICY.default(replace(problem, seqlen_q=seqlen, seqlen_k=seqlen)))
        assert knobs.split_kv == (knobs.splits > 1)
    few = knobs_of(POLICY.default(replace(problem, batch=64, seqlen_q=16, seqlen_k=64)))
    assert (few.split_kv, few.splits) == (True, 1)


def test_many_queries_do_not_stream() -> None:
    assert not any(knobs_of(c).split_kv for c in offered(PROBLEM))
    assert not knobs_of(POLICY.default(replace(PROBLEM, seqlen_q=65, batch=8))).split_kv
    assert not knobs_of(POLICY.default(replace(PROBLEM, seqlen_q=65, seqlen_k=300))).split_kv
    assert knobs_of(POLICY.default(replace(PROBLEM, seqlen_q=65, batch=2))).split_kv
    assert not knobs_of(POLICY.default(replace(PROBLEM, seqlen_q=64, batch=8))).split_kv
    assert knobs_of(POLICY.default(replace(PROBLEM, seqlen_q=63, batch=8))).split_kv
    assert POLICY.default(replace(PROBLEM, seqlen_q=1, alignment_bytes=2)).family == "sm80"


@pytest.mark.parametrize("sizes", [sizes for sizes, _ in FEW_QUERIES[:8]])
def test_the_model_gives_streams_the_time_of_their_bytes(
    sizes: tuple[int, int, int, int, int, tuple[int, int]],
) -> None:
    problem = few_queries(sizes)
    default = POLICY.default(problem)
    read_us = problem.bytes_moved / POLICY.spec.hbm_bytes_per_second * 1e6
    us = estimate(problem, default, POLICY.spec).us
    assert read_us < us < 1.2 * read_us + 15.0
    alone = estimate(problem, default.compiled, POLICY.spec).us
    splits = knobs_of(default).splits
    assert us == alone if splits == 1 else us < 0.95 * alone
    ranked = rank(problem, POLICY.legal(problem), POLICY.spec)
    assert us < 1.15 * ranked[0][1].us


def test_partial_results_are_counted() -> None:
    problem = few_queries(FEW_QUERIES[6][0])
    default = POLICY.default(problem)
    rows = 8 * 32 * 4
    assert KERNELS[KERNEL].workspace_bytes(problem, default) == 2 * rows * 4 * (128 + 1)
    assert KERNELS[KERNEL].workspace_bytes(problem, default.compiled) == 0
    # No more splits than tiles of keys.
    short = replace(problem, seqlen_k=default.knobs.block_n)
    assert KERNELS[KERNEL].workspace_bytes(short, default) == 0


def test_few_causal_tiles_need_no_claims() -> None:
    few = replace(
        PROBLEM, causal=True, batch=1, heads_q=60, heads_kv=60, seqlen_q=256, seqlen_k=256
    )
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
    """An H200: 4 batches, 16 heads, 4096 tokens, non-causal, 750 TFLOP/s at dim 128."""
    us = estimate(PROBLEM, POLICY.default(PROBLEM), POLICY.spec).us
    flops = 4 * PROBLEM.batch * PROBLEM.heads_q * PROBLEM.seqlen_q * PROBLEM.seqlen_k * 128
    assert flops / us / 1e6 == pytest.approx(750, rel=0.1)


def test_a_gpu_without_such_products_takes_forever() -> None:
    prediction = estimate(PROBLEM, POLICY.default(PROBLEM), A100().spec)
    assert (prediction.us, prediction.limiter) == (inf, "residency")


def masked(**options: Any) -> Problem:
    return Problem(op="retnet", mask="explicit", **options)


@pytest.mark.parametrize(
    "dims", [(16, 16), (64, 64), (128, 128), (256, 256), (256, 512), (96, 304)]
)
def test_a_mask_travels_beside_the_keys(dims: tuple[int, int]) -> None:
    problem = masked(dim_qk=dims[0], dim_v=dims[1], causal=True)
    mine = [c for c in POLICY.legal(problem) if c.kernel == KERNEL]
    assert KERNELS[KERNEL].default(problem, POLICY.spec) in [c.knobs for c in mine]
    for candidate in mine:
        knobs = knobs_of(candidate)
        assert knobs.mask_stages > 0
        assert not any((knobs.optimistic, knobs.pack_gqa, knobs.split_kv))
        assert knobs.v_slices == (2 if dims[1] > 256 else 1)
        assert estimate(problem, candidate, POLICY.spec).us > 0
    assert {knobs_of(c).schedule for c in mine} == {"dynamic", "static", "grid"}
    even = {
        knobs_of(c).schedule
        for c in POLICY.legal(replace(problem, causal=False))
        if c.kernel == KERNEL
    }
    assert even == {"static", "grid"}


@pytest.mark.parametrize(("dims", "shares"), [((256, 512), 1), ((128, 512), 0), ((256, 256), 0)])
def test_slices_share_scores_by_default_where_those_are_much(
    dims: tuple[int, int], shares: int
) -> None:
    default = POLICY.default(masked(dim_qk=dims[0], dim_v=dims[1]))
    assert knobs_of(default).exchange_stages == shares


def test_a_mask_costs_what_its_tiles_bring() -> None:
    problem = masked(dim_qk=128, dim_v=128)
    mine = [c for c in POLICY.legal(problem) if c.kernel == KERNEL]
    plain = estimate(PROBLEM, POLICY.default(PROBLEM), POLICY.spec)
    assert all(estimate(problem, c, POLICY.spec).us > 0.5 * plain.us for c in mine)
    large, small = (next(c for c in mine if knobs_of(c).block_n == n) for n in (128, 64))
    assert estimate(problem, large, POLICY.spec).us < estimate(problem, small, POLICY.spec).us
