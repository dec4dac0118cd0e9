"""Attention's backward kernel of family sm90: where it is offered, what it rejects, what it should take."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.codegen.render import include_closure, render
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90.knobs import (
    AttentionBackwardSm90Knobs,
    BackwardPassSm90,
    knobs_of,
)
from attention_autotuner.kernels.attention_backward_sm90.resources import (
    head_splits,
    shapes,
    smem_bytes,
)
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.legality import check, check_kernel
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.kernels.shared.sm90_rules import fragments_fit_warpgroup
from tests.candidates import offered_by
from tests.pass_names import pass_named

KERNEL = "attention_backward_sm90"
POLICY = H100(H200_SPEC)
PROBLEM = Problem(
    direction="backward", batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_k=4096
)

DIMS = [
    (16, 16), (32, 32), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 192),
    (256, 256), (192, 128), (128, 256), (256, 128), (64, 128), (128, 64),
]  # fmt: skip


def with_dims(dims: tuple[int, int], **options: Any) -> Problem:
    return replace(PROBLEM, dim_qk=dims[0], dim_v=dims[1], **options)


def offered(problem: Problem) -> list[Candidate]:
    return offered_by(KERNEL, problem, POLICY.spec)


@pytest.mark.parametrize("dims", DIMS)
def test_all_head_dims_have_a_default_and_few_candidates(dims: tuple[int, int]) -> None:
    problem = with_dims(dims)
    candidates = offered(problem)
    assert 2 <= len(candidates) <= 76
    assert len({candidate.name for candidate in candidates}) == len(candidates)
    for options in ({}, {"causal": True}, {"deterministic": True}):
        other = with_dims(dims, **options)
        assert POLICY.default(other) in offered(other)
    for candidate in candidates:
        assert all(smem_bytes(shape) <= 227 * 1024 for shape in shapes(candidate))
        for shape in shapes(candidate):
            assert fragments_fit_warpgroup(shape) is None


@pytest.mark.parametrize(
    ("dims", "words", "share", "claimed_share"),
    [
        ((32, 32), "fused_keys_g2c128s2x2", "_own2bulk", "_own2"),
        ((64, 64), "fused_keys_g2c64i3x2h", "_own1bulk", "_own2"),
        ((80, 80), "fused_keys_g2c64i3x2", "_own2queued", "_own2"),
        ((96, 96), "fused_keys_g2c64i3x2", "_own2queued", "_own2"),
        ((64, 128), "fused_keys_g2c64i3x2", "_own1bulk", "_own1"),
        ((112, 112), "fused_keys_g2c64t3x2", "_keys1bulk", "_keys1"),
        ((176, 176), "two_pass_keys_g2c64s3x3r_dq_g2c64a3x2", "", ""),
        ((192, 128), "two_pass_keys_g2c32i3x2_dq_g2c64b3x3", "", ""),
        ((192, 192), "two_pass_keys_g2c64s3x3r_dq_g2c64a3x2", "", ""),
        ((256, 256), "two_pass_keys_g2c64s2x2r_dq_g2c48s2x2", "", ""),
    ],
)
def test_defaults_by_head_dim(
    dims: tuple[int, int], words: str, share: str, claimed_share: str
) -> None:
    early = "_early_gathered"
    even = f"{words}{share}_raster_persistent{early}" + "_dynamic" * share.endswith("queued")
    assert POLICY.default(with_dims(dims)).knobs.label == even
    causal = with_dims(dims, causal=True)
    few = POLICY.default(replace(causal, batch=2, heads_kv=4, seqlen_q=1920, seqlen_k=1920))
    assert few.knobs.label == f"{words}{share.replace('own2queued', 'own1bulk')}_lpt{early}"
    claimed = f"{words}{claimed_share}stored_raster_persistent{early}_dynamic"
    assert POLICY.default(causal).knobs.label == (claimed if share else few.knobs.label)


def test_steps_are_long_where_dims_are_small_and_steps_many() -> None:
    def block(dims: tuple[int, int] = (32, 32), seqlen: int = 2048, **options: Any) -> int:
        problem = with_dims(dims, seqlen_q=seqlen, seqlen_k=seqlen, **options)
        (shape,) = shapes(POLICY.default(problem))
        return shape.knobs.block_columns

    assert [block(seqlen=n) for n in (512, 1024, 2048)] == [64, 128, 128]
    assert [block(seqlen=n, causal=True) for n in (512, 1024, 2048)] == [64, 64, 128]
    assert [block(dims) for dims in ((16, 16), (24, 32), (32, 40), (48, 48))] == [128, 128, 64, 64]
    assert block(deterministic=True) == 128
    bent = {name: block(modifications=(name,), causal=True) for name in ("sinks", "alibi_slopes")}
    assert bent == {"sinks": 128, "alibi_slopes": 128}
    bent = {name: block(modifications=(name,)) for name in ("softcap", "attn_mask")}
    assert bent == {"softcap": 64, "attn_mask": 64}
    rows: dict[str, Any] = {"batch": 8, "packed_rows": (8192, 8192)}
    assert [block(causal=causal, **rows) for causal in (False, True)] == [128, 64]
    assert block(**{**rows, "batch": 64}) == 64  # of which most are short
    windows = ((1023, -1), (511, -1), (-1, -1))
    assert [block(window_size=x, causal=True) for x in windows] == [128, 64, 128]
    assert block(seqlen=1024, window_size=(-1, 0)) == 64  # which is causal


@pytest.mark.parametrize(
    ("seqlen", "words", "causal_words"),
    [
        (512, "g2c64t3x2_keys1", "g2c64t3x2_keys1"),
        (1024, "g2c64t3x2_keys1", "g2c64t3x2_keys1"),
        (2048, "g2c80t3x2_keys1", "g2c64t3x2_keys1"),
        (4096, "g2c80t3x2_keys1", "g2c80t3x2_keys1"),
        (8192, "g2c80t3x2_keys1", "g2c80t3x2_keys1"),
    ],
)
def test_defaults_at_128_columns_by_length(seqlen: int, words: str, causal_words: str) -> None:
    batch = 16384 // seqlen  # 16 waves of blocks of keys, as in the grid
    problem = with_dims((128, 128), batch=batch, seqlen_q=seqlen, seqlen_k=seqlen)
    stored, early = "stored_raster_persistent_early_gathered", "_early_gathered"
    even = f"fused_keys_{words}{stored}" + "_dynamic" * (seqlen >= 2048)
    assert POLICY.default(problem).knobs.label == even
    few = POLICY.default(replace(problem, batch=1, heads_q=4, heads_kv=4))
    assert not few.knobs.dynamic
    causal = POLICY.default(replace(problem, causal=True))
    assert causal.knobs.label == f"fused_keys_{causal_words}{stored}_dynamic"
    queued = f"queued_raster_persistent{early}"
    ordered = POLICY.default(replace(problem, deterministic=True))
    assert ordered.knobs.label == f"fused_keys_{words}{queued}" + "_dynamic" * (seqlen > 512)
    heads = 4 * 132 * 128 // seqlen  # four waves
    some = replace(problem, batch=1, heads_q=heads, heads_kv=heads)
    few = POLICY.default(replace(some, deterministic=True))
    assert few.knobs.label == f"fused_keys_{words}{queued}"
    ordered = POLICY.default(replace(problem, causal=True, deterministic=True))
    assert ordered.knobs.label == f"fused_keys_{causal_words}{queued}_dynamic"
    for other in ({"modifications": ("softcap",)}, {"op": "retnet", "mask": "decay"}):
        assert knobs_of(POLICY.default(replace(problem, causal=True, **other))).keys is not None
        keys = [knobs_of(c).keys for c in offered(replace(problem, causal=True, **other))]
        assert all(item is None or item.issue_order != "by_turns" for item in keys)


@pytest.mark.parametrize(
    ("dims", "options", "stages"),
    [
        ((128, 128), {}, [("3x2", 1), ("3x2", 2), ("2x2", 2)]),
        ((128, 128), {"window_size": (255, 0)}, [("2x2", 2), ("3x2", 2), ("3x2", 1)]),
        ((64, 64), {}, [("3x2h", 2), ("3x2h", 1)]),
        ((64, 64), {"modifications": ("alibi_slopes",)}, [("3x2h", 1), ("3x2h", 2)]),
    ],
)
def test_claimed_blocks_are_offered_with_other_stages(
    dims: tuple[int, int], options: dict[str, Any], stages: list[tuple[str, int]]
) -> None:
    problem = with_dims(dims, causal=True, **options)
    order, by = ("t", "keys") if dims == (128, 128) else ("i", "own")
    wanted = [f"fused_keys_g2c64{order}{ring}_{by}{of_ds}stored" for ring, of_ds in stages]
    labels = [c.knobs.label for c in offered(problem) if "_dynamic" in c.knobs.label]
    claimed = [words for label in labels for words in wanted if label.startswith(words)]
    assert claimed == wanted


@pytest.mark.parametrize(("dims", "queries"), [((64, 64), 1100), ((128, 128), 1000)])
def test_few_uneven_blocks_want_the_longest_first(dims: tuple[int, int], queries: int) -> None:
    few = with_dims(dims, seqlen_q=queries, seqlen_k=queries, causal=True, heads_kv=4)
    claimed = "stored_raster_persistent_early_gathered_dynamic"
    for batch, words in ((4, "bulk_lpt_early_gathered"), (8, claimed), (16, claimed)):
        assert POLICY.default(replace(few, batch=batch)).knobs.label.endswith(words)
    one_block = replace(few, batch=24, heads_kv=16, seqlen_q=100, seqlen_k=100)
    assert "stored_raster" in POLICY.default(one_block).knobs.label


@pytest.mark.parametrize(
    ("seqlen", "keys", "heads_kv", "stay"),
    [(16384, 1024, 16, True), (16384, 4096, 16, False), (16384, 1024, 4, False)],
)
def test_ctas_stay_where_a_window_leaves_blocks_even(
    seqlen: int, keys: int, heads_kv: int, stay: bool
) -> None:
    """CTAs with a fixed share of the blocks; many blocks are claimed, whether they are even or not."""
    shape = with_dims((128, 128), batch=1, seqlen_q=seqlen, seqlen_k=seqlen, causal=True)
    problem = replace(shape, heads_kv=heads_kv, window_size=(keys - 1, -1))
    shares = {knobs_of(c).persistent for c in offered(problem) if not knobs_of(c).dynamic}
    assert shares == {stay}
    assert knobs_of(POLICY.default(problem)).dynamic
    ordered = POLICY.default(replace(problem, deterministic=True))
    assert knobs_of(ordered).dynamic


def test_by_turns_is_offered_with_gathered_stores_at_112_columns() -> None:
    labels = {c.knobs.label for c in offered(with_dims((112, 112), causal=True))}
    assert "fused_keys_g2c64t3x2_keys2bulk_lpt_early_gathered" in labels
    assert "fused_keys_g2c64t3x2_keys2stored_raster_early_gathered" in labels


def test_every_variant_is_offered() -> None:
    knobs = [knobs_of(candidate) for dims in DIMS for candidate in offered(with_dims(dims))]
    assert {k.decomposition for k in knobs} == {"fused", "two_pass", "three_pass"}
    assert {k.cta_order for k in knobs} == {"raster", "longest_first"}
    shares = [k.dq_share for k in knobs if k.dq_share is not None]
    assert {(share.dq_by, share.dq_add) for share in shares} == {
        *product(("keys", "own"), ("bulk", "reduce", "ordered", "stored", "queued"))
    }
    early = {(k.decomposition, k.dq_share and k.dq_share.dq_by) for k in knobs if k.early_launches}
    assert early == {("fused", "keys"), ("fused", "own"), ("two_pass", None), ("three_pass", None)}
    causal = [knobs_of(candidate) for candidate in offered(with_dims((128, 128), causal=True))]
    assert {k.dq_share and k.dq_share.dq_add for k in causal if k.dynamic} == {"stored", "bulk"}
    assert all(k.gathered_stores == k.early_launches for k in knobs)
    passes = [item for k in knobs for item in k.passes.values()]
    assert {item.issue_order for item in passes} == {
        "serial",
        "scores_ahead",
        "both_ahead",
        "interleaved",
        "by_turns",
    }
    assert {item.held_rows for item in passes} == {False, True}
    assert {item.shared_rows for item in passes} == {False, True}
    assert all(k.persistent for k in knobs)
    assert {item.warpgroups for item in passes} == {2, 3}


def test_deterministic_problems_get_deterministic_candidates() -> None:
    wanted = replace(PROBLEM, deterministic=True)
    candidates = offered(wanted)
    assert candidates
    assert all(candidate.deterministic for candidate in candidates)
    assert any(not candidate.deterministic for candidate in offered(PROBLEM))
    for problem in (wanted, replace(wanted, causal=True), replace(wanted, window_size=(63, -1))):
        share = knobs_of(POLICY.default(problem)).dq_share
        assert share is not None
        assert share.dq_add == "queued"


def test_it_serves_attention_backward_on_this_capability_alone() -> None:
    assert KERNELS[KERNEL].serves == {
        ("attention", "backward", "softmax"),
        ("retnet", "backward", "masked"),
        ("retnet", "backward", "decayed"),
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


def test_a_few_queries_or_keys_are_not_its_default() -> None:
    for length in ("seqlen_q", "seqlen_k"):
        assert POLICY.default(with_dims((128, 128), **{length: 63})).family == "sm80"
        assert POLICY.default(with_dims((128, 128), **{length: 64})).family == "sm90"


def of_three_passes() -> Candidate:
    candidates = offered(with_dims((256, 256)))
    return next(c for c in candidates if knobs_of(c).decomposition == "three_pass")


def test_three_passes_are_left_out_where_two_fit() -> None:
    whole = of_three_passes()
    assert check(whole, H200_SPEC) is None
    rejection = check(replace(whole, padded_dim_qk=128, padded_dim_v=128), H200_SPEC)
    assert rejection is not None
    assert rejection.predicate == "three_passes_pay"


def test_three_passes_take_no_score_modifications() -> None:
    modified = with_dims((256, 256), window_size=(127, 0))
    offered = [c.name for c in POLICY.legal(modified) if c.family == "sm90"]
    assert offered
    assert all("two_pass" in name for name in offered)
    assert "two_pass_keys_g2c64s2x2r" in POLICY.default(modified).name


def test_passes_belong_to_their_decomposition() -> None:
    item = BackwardPassSm90(block_columns=64, issue_order="serial")
    with pytest.raises(ValueError, match="takes other passes"):
        AttentionBackwardSm90Knobs(decomposition="two_pass", keys=item)
    with pytest.raises(ValueError, match="a share of dQ belongs"):
        AttentionBackwardSm90Knobs(decomposition="fused", keys=item)


def test_symbols_name_their_passes() -> None:
    symbol = "_ZN2a16softmax_backward23attention_backward_sm90IN1c6ConfigENS_22TraitsIS2_S3_LNS_12GradientPassE{}EEEE"
    for whole, names in (
        (of_three_passes(), [None, "dk", "dv", "dq"]),
        (POLICY.default(with_dims((256, 256))), ["keys", None, None, "dq"]),
    ):
        assert [pass_named(whole, symbol.format(i)) for i in range(4)] == names


RETNET = {
    "explicit": replace(PROBLEM, op="retnet", mask="explicit"),
    "decay": replace(PROBLEM, op="retnet", mask="decay", causal=True),
}


@pytest.mark.parametrize(
    ("mask", "dims"),
    [
        ("explicit", (64, 64)),
        *(("decay", dims) for dims in ((64, 64), (128, 128), (192, 128), (256, 256))),
    ],
)
def test_retnet_has_it_and_takes_it_for_a_decay(mask: str, dims: tuple[int, int]) -> None:
    problem = replace(RETNET[mask], dim_qk=dims[0], dim_v=dims[1])
    candidates = offered(problem)
    assert 4 <= len(candidates) <= 100
    for wanted in (problem, replace(problem, deterministic=True)):
        serves = mask == "decay" or not wanted.deterministic
        assert (POLICY.default(wanted) in offered(wanted)) == serves
    narrow, large = replace(problem, alignment_bytes=2), replace(problem, dim_v=304)
    for other in (narrow, large, replace(problem, seqlen_k=32)):
        assert POLICY.default(other).kernel != KERNEL
    assert offered(narrow) == offered(large) == []
    passes = [shape for candidate in candidates for shape in shapes(candidate)]
    assert {shape.knobs.mask_stages for shape in passes} == ({1, 2} if mask == "explicit" else {0})
    # dQ and dK alone take S for signs at most, and with it two products of five or six fewer.
    without = [shape for shape in passes if not shape.takes_scores]
    assert {shape.name for shape in without} <= {"dk", "dq"}
    assert all(shape.knobs.issue_order in ("serial", "both_ahead") for shape in without)
    assert all(shape.products == sum(dims) for shape in without if dims[0] == dims[1])


@pytest.mark.parametrize("dims", [(80, 64), (64, 80), (96, 96)])
def test_explicit_masks_of_wide_heads_are_legal_but_not_offered(dims: tuple[int, int]) -> None:
    problem = replace(RETNET["explicit"], dim_qk=dims[0], dim_v=dims[1])
    assert offered(problem) == []
    rules = {r.predicate for r in POLICY.candidates(problem) if isinstance(r, Rejection)}
    assert "explicit_masks_pay" in rules
    narrow = offered(replace(problem, dim_qk=64, dim_v=64))
    assert any(check_kernel(Candidate.of(problem, c.knobs)) is None for c in narrow)


def test_a_mask_of_retnet_moves_bytes_and_saves_products() -> None:
    masked, decayed = (
        estimate(problem, offered(problem)[0], POLICY.spec)
        for problem in (
            replace(retnet, causal=True, dim_qk=64, dim_v=64) for retnet in RETNET.values()
        )
    )
    assert masked.terms["l2_us"] > decayed.terms["l2_us"]
    softmax, retnet = (
        min(estimate(problem, c, POLICY.spec).terms["tensor_us"] for c in offered(problem))
        for problem in (
            replace(plain, causal=True, dim_qk=256, dim_v=256)
            for plain in (PROBLEM, RETNET["decay"])
        )
    )
    assert retnet == pytest.approx(6 / 7 * softmax, rel=0.02)  # products


def test_shared_rows_halve_a_block_of_keys() -> None:
    shared = POLICY.default(with_dims((256, 256)))
    keys, dq = shapes(shared)
    assert (keys.block_rows, dq.block_rows) == (64, 128)
    assert keys.products == 4 * 256
    held = replace(shared.knobs.keys, held_rows=True)
    rejection = check_kernel(replace(shared, knobs=replace(shared.knobs, keys=held)))
    assert rejection is not None
    assert rejection.predicate == "shared_rows_split_results"
    retnet = check_kernel(replace(shared, op="retnet", mask="decay"))
    assert retnet is not None
    assert "P of a softmax" in retnet.reason


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_model_ranks_a_fused_pass_first(dims: tuple[int, int], causal: bool) -> None:
    problem = with_dims(dims, causal=causal)
    ranked = rank(problem, POLICY.legal(problem), POLICY.spec)
    assert ranked[0][0].kernel == KERNEL
    assert knobs_of(ranked[0][0]).decomposition == "fused"
    default = estimate(problem, POLICY.default(problem), POLICY.spec).us
    assert default < 1.2 * ranked[0][1].us


def test_additions_bound_a_pass_that_adds_too_often() -> None:
    """Sums of dQ leave an SM at 14 bytes a clock, whatever else it does."""
    candidate = POLICY.default(with_dims((64, 64)))
    bytes_added = PROBLEM.batch * PROBLEM.heads_q * (4096 // 128) * 4096 * 64 * 4
    least_us = bytes_added / 14 / H200_SPEC.num_sms / H200_SPEC.sm_clock_mhz
    assert estimate(with_dims((64, 64)), candidate, POLICY.spec).us > least_us


def test_a_gpu_without_such_products_takes_forever() -> None:
    prediction = estimate(PROBLEM, POLICY.default(PROBLEM), A100().spec)
    assert (prediction.us, prediction.limiter) == (inf, "residency")


# dim, batch, heads, tokens, causal; the fastest of an H200 among claims, additions and orders.
SHORT = [
    ((64, 64, 12, 128, False), "own1stored_raster_persistent"),
    ((64, 64, 12, 77, True), "own2queued_raster_persistent"),
    ((64, 24, 12, 77, True), "own1stored_raster_persistent"),
    ((64, 8, 16, 256, False), "own1bulk_raster_persistent"),
    ((128, 16, 16, 256, False), "keys1stored_raster_persistent"),
    ((128, 6, 16, 512, False), "keys1bulk_raster_persistent"),
    ((128, 11, 16, 512, False), "keys1stored_raster_persistent"),
]


@pytest.mark.parametrize(("sizes", "words"), SHORT)
def test_few_blocks_and_short_ones_have_their_own_additions(
    sizes: tuple[int, int, int, int, bool], words: str
) -> None:
    dim, batch, heads, tokens, causal = sizes
    problem = with_dims(
        (dim, dim), batch=batch, heads_q=heads, heads_kv=heads, causal=causal,
        seqlen_q=tokens, seqlen_k=tokens,
    )  # fmt: skip
    assert f"_{words}_early_gathered_" in POLICY.default(problem).name


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, 3),  # of seven heads more than L2 holds
        ({"batch": 1}, 2),  # claimed, of eight lists
        ({"deterministic": True}, 7),  # claimed in a list without a tail
        ({"causal": False}, 1),
        ({"window_size": (1023, 0), "modifications": ()}, 1),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "batch": 8}, 1),
        ({"heads_q": 64, "heads_kv": 8, "batch": 1, "seqlen_q": 2048, "seqlen_k": 2048}, 2),
        ({"heads_q": 64, "heads_kv": 8, "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192}, 3),
        ({"heads_q": 96, "heads_kv": 8, "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192}, 4),
        ({"heads_q": 32, "heads_kv": 8, "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192}, 1),
        ({"heads_q": 40, "heads_kv": 8, "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192}, 2),
        ({"heads_q": 40, "heads_kv": 8, "batch": 1}, 1),
        ({"heads_q": 8, "heads_kv": 1, "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192}, 4),
        ({"seqlen_q": 16384, "seqlen_k": 16384, "batch": 1}, 2),
        ({"seqlen_q": 16385, "seqlen_k": 16385, "batch": 1}, 1),
        ({"seqlen_q": 256, "seqlen_k": 256, "causal": False}, 7),
    ],
)
def test_groups_are_split_until_causal_blocks_even_out(
    options: dict[str, Any], splits: int
) -> None:
    sizes = {"batch": 2, "heads_q": 28, "heads_kv": 4, "seqlen_q": 4096, "seqlen_k": 4096}
    problem = with_dims((128, 128), **{**sizes, "causal": True, **options})
    assert head_splits(problem, POLICY.default(problem)) == splits
