"""Attention's backward of family sm90 on an emulated machine: results of its variants, and mistakes that show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90.knobs import (
    AttentionBackwardSm90Knobs,
    BackwardPassSm90,
    DqShareSm90,
    IssueOrder,
)
from attention_autotuner.operations.retnet.inputs import RetNetBackward
from tests.emulation.build import Mutants, build
from tests.emulation.check import check

pytestmark = pytest.mark.build

MAINLOOP = "attention_backward_sm90/mainloop.cuh"
PRODUCTS = "attention_backward_sm90/products.cuh"
PRODUCER = "attention_backward_sm90/producer.cuh"
SCORES = "attention_backward_sm90/scores.cuh"
SHARE = "attention_backward_sm90/dq_share.cuh"
SENDER = "attention_backward_sm90/dq_sender.cuh"
SLOT = "sm90/tile_slot.cuh"
RESULTS = "attention_backward_sm90/results.cuh"
KERNEL = "attention_backward_sm90/kernel.cuh"
ENTRY = "attention_backward_sm90/entry.cuh"
MUTANTS = {
    "ds_not_fenced": (PRODUCTS, "fence_view_async_shared();", ""),
    "scores_not_waited_for": (MAINLOOP, "warpgroup_wait<kResults + kBoth>();", ""),
    "shares_not_waited_for": (
        MAINLOOP,
        "issue_dq(index);\n      warpgroup_wait<0>();\n      add_dq(index, before);",
        "issue_dq(index); add_dq(index, before); warpgroup_wait<0>();",
    ),
    "keys_not_masked": (SCORES, "if (needs_mask(now)) mask(now, 0.0f);", ""),
}
GIVEN_BACK = "arrive(Sent::empty(stages, stage, T::kDqParts - 1));"
OF_SENDER = {
    "stored_not_waited_for": (SENDER, "semaphore_wait(semaphores + tile, kStoredOnce);", ""),
    "head_counted_once_less": (
        SHARE,
        "count_complete(counter);",
        "if (stages.row_block > 0) count_complete(counter);",
    ),
    "stage_given_back_unread": (SENDER, f"tma_store_wait_read();\n  {GIVEN_BACK}", GIVEN_BACK),
}
# Where CTAs claim blocks, and TMA stores what they leave.
OF_CLAIMS = {
    "slot_overwritten": (SLOT, "wait(empty(), phase ^ 1);", ""),
    "slot_read_early": (SLOT, "wait(full(), phase);", ""),
    "slot_not_given_back": (
        SLOT,
        "if (!Warp || warp_arrives()) arrive_after(index, empty());",
        "",
    ),
    "claims_counted_as_a_head": (
        ENTRY,
        "list.claimed = complete + batch * p.heads_kv * common.splits.divisor;",
        "list.claimed = complete;",
    ),
    "rows_released_unread": (MAINLOOP, "if (lane_index() == 0) tma_store_wait_read();", ""),
    "dv_overwritten": (
        MAINLOOP,
        "wait_for_reads<T::kKeysDq && T::kBulkDq && T::kOrder != IssueOrder::kSerial ? 1 : 0>();",
        "",
    ),
    "results_not_fenced": (RESULTS, "fence_view_async_shared();", ""),
    "late_rows_not_waited_for": (
        MAINLOOP,
        "if constexpr (T::kLateRows) Base::wait_for_rows(1);",
        "",
    ),
    "rows_not_loaded": (
        PRODUCER,
        "return visit == 0 ? begin : begin + minimum(kStages, steps()) - 1;",
        "return visit == 0 ? begin : begin + kStages - 1;",
    ),
    "ended_unread": (KERNEL, "if constexpr (T::kTmaStores) wait_for_reads();", ""),
    "preprocess_not_awaited": (
        PRODUCER,
        "if constexpr (T::kEarly && T::kFirstPass) wait_on_dependent_grids();",
        "",
    ),
}
SAID_OF_CLAIMS = {
    "slot_overwritten": "races with",
    "slot_read_early": "races with",
    "slot_not_given_back": "deadlock",
    "claims_counted_as_a_head": "are not finite",
    "rows_released_unread": "a tma load",
    "dv_overwritten": "a write",
    "results_not_fenced": "without a fence",
    "late_rows_not_waited_for": "an mma's read",
    "rows_not_loaded": "deadlock",
    "ended_unread": "a cta has ended",
    "preprocess_not_awaited": "are not finite",
}
# Of CTAs whose rows are in registers, so that results have a place of their own.
HOLDS = "if constexpr (T::kHeldRows && T::kHasDs) Base::template load_fragments<T::kColumns>(x1, x1_tile());"
GIVES_BACK = "if constexpr (T::kResultsApart) release_held_rows();"
OF_RESULTS_APART = {
    "dk_overwritten": (MAINLOOP, "if (Base::visit > 0) wait_for_reads();", ""),
    "rows_released_unread": (
        MAINLOOP,
        f"{HOLDS}\n    {GIVES_BACK}",
        f"{GIVES_BACK}\n    {HOLDS}",
    ),
}
SAID_OF_RESULTS_APART = {"dk_overwritten": "a write", "rows_released_unread": "a tma load"}
# Where a warpgroup's keys see none of the first tile, or of the last.
OF_HIDDEN_TILES = {
    "first_is_seen": (
        SCORES,
        "return Base::common().first_query(first_row()) >= (now.tile + 1) * T::kBlockColumns;",
        "return Base::common().first_query(first_row()) >= now.tile * T::kBlockColumns;",
    ),
    "last_is_seen": (
        SCORES,
        "return Base::steps() > 1 && common.end_of_queries(last) <= (Base::range.end - 1) * T::kBlockColumns;",
        "return Base::steps() > 1 && common.end_of_queries(last) <= Base::range.end * T::kBlockColumns;",
    ),
    "not_zero": (
        PRODUCTS,
        "p[i] = Base::ds_registers()[i] = 0;",
        "p[i] = Base::ds_registers()[i] = 0x3f803f80;",
    ),
    "zeros_taken_early": (
        PRODUCTS,
        "wait(full(T::kY0Barrier, First::stage(index)), First::phase(index));",
        "",
    ),
}
CAUGHT_BY = {
    "ds_not_fenced": (LaunchFailed, "without a fence"),
    "scores_not_waited_for": (Wrong, "largest error"),
    "shares_not_waited_for": (Wrong, "dq: "),
    "keys_not_masked": (Wrong, "largest error"),
}


def item(order: IssueOrder, block: int = 64, **stages: Any) -> BackwardPassSm90:
    return BackwardPassSm90(block_columns=block, issue_order=order, **stages)


def candidate(dims: tuple[int, int], **knobs: Any) -> Candidate:
    return Candidate(
        dtype="bf16",
        direction="backward",
        padded_dim_qk=dims[0],
        padded_dim_v=dims[1],
        knobs=AttentionBackwardSm90Knobs(**knobs),
    )


def problem(of: Candidate, *, causal: bool, queries: int, keys: int, group: int = 1) -> Problem:
    return Problem(
        direction="backward",
        dtype="bf16",
        batch=1,
        seqlen_q=queries,
        seqlen_k=keys,
        heads_q=group,
        heads_kv=1,
        causal=causal,
        dim_qk=of.padded_dim_qk,
        dim_v=of.padded_dim_v,
    )


FUSED = candidate(
    (64, 64),
    decomposition="fused",
    keys=item("scores_ahead", 128),
    dq_share=DqShareSm90(dq_by="keys"),
)
VARIANTS = [
    candidate(
        (64, 48),
        decomposition="fused",
        keys=item("interleaved", first_stages=3, held_rows=True),
        dq_share=DqShareSm90(dq_by="own"),
        persistent=True,
        early_launches=True,
    ),
    candidate(
        (96, 96),
        decomposition="fused",
        keys=item("interleaved", first_stages=3),
        dq_share=DqShareSm90(dq_by="keys"),
        persistent=True,
        early_launches=True,
        gathered_stores=True,
    ),
    candidate(
        (128, 112),
        decomposition="fused",
        keys=item("by_turns", 80, first_stages=3),
        dq_share=DqShareSm90(dq_by="keys", ds_stages=1),
        persistent=True,
    ),
    candidate(
        (112, 112),
        decomposition="fused",
        keys=item("by_turns", first_stages=3),
        dq_share=DqShareSm90(dq_by="keys"),
        early_launches=True,
        gathered_stores=True,
    ),
    candidate(
        (64, 64),
        decomposition="fused",
        keys=item("scores_ahead"),
        dq_share=DqShareSm90(dq_by="own"),
        cta_order="longest_first",
        early_launches=True,
    ),
    candidate(
        (96, 64),
        decomposition="fused",
        keys=item("by_turns", first_stages=3),
        dq_share=DqShareSm90(dq_by="keys", dq_add="stored"),
        early_launches=True,
        gathered_stores=True,
    ),
    candidate(
        (80, 64),
        decomposition="fused",
        keys=item("interleaved", first_stages=3),
        dq_share=DqShareSm90(dq_by="own", dq_add="stored"),
        persistent=True,
    ),
    candidate(
        (64, 64),
        decomposition="fused",
        keys=item("interleaved", first_stages=3, held_rows=True),
        dq_share=DqShareSm90(dq_by="own", dq_add="queued"),
        persistent=True,
        early_launches=True,
        gathered_stores=True,
    ),
    candidate(
        (128, 128),
        decomposition="fused",
        keys=item("by_turns", 80, first_stages=3),
        dq_share=DqShareSm90(dq_by="keys", ds_stages=1, dq_add="queued"),
    ),
    candidate(
        (48, 64),
        decomposition="fused",
        keys=item("both_ahead", first_stages=3),
        dq_share=DqShareSm90(dq_by="own", dq_add="ordered"),
    ),
    candidate(
        (64, 64),
        decomposition="fused",
        keys=item("serial", 128, second_stages=1),
        dq_share=DqShareSm90(dq_by="keys", ds_stages=1, dq_add="ordered"),
    ),
    candidate(
        (80, 96),
        decomposition="two_pass",
        keys=item("scores_ahead", 80),
        dq=item("both_ahead", 96),
        early_launches=True,
        gathered_stores=True,
    ),
    candidate(
        (80, 96),
        decomposition="two_pass",
        keys=item("both_ahead", 48, first_stages=3, shared_rows=True),
        dq=item("serial", 48),
        persistent=True,
    ),
    candidate(
        (256, 256),
        decomposition="two_pass",
        keys=item("serial", shared_rows=True),
        dq=item("serial", 32),
        early_launches=True,
        gathered_stores=True,
    ),
    candidate(
        (192, 192),
        decomposition="three_pass",
        dk=item("both_ahead"),
        dv=item("scores_ahead"),
        dq=item("serial"),
        early_launches=True,
        gathered_stores=True,
    ),
]


def claiming(dims: tuple[int, int], keys: BackwardPassSm90, share: DqShareSm90) -> Candidate:
    return candidate(
        dims,
        decomposition="fused",
        keys=keys,
        dq_share=share,
        persistent=True,
        early_launches=True,
        gathered_stores=True,
        dynamic=True,
    )


# Rows of K of the last one are wider than those of V, so that its results leave from registers.
CLAIMING = [
    claiming(
        (128, 128),
        item("by_turns", first_stages=3),
        DqShareSm90(dq_by="keys", dq_add="stored"),
    ),
    claiming(
        (128, 128), item("by_turns", 80, first_stages=3), DqShareSm90(dq_by="keys", ds_stages=1)
    ),
    claiming((96, 96), item("scores_ahead", first_stages=3), DqShareSm90(dq_by="keys")),
    claiming(
        (64, 64),
        item("interleaved", first_stages=3, held_rows=True),
        DqShareSm90(dq_by="own", dq_add="stored"),
    ),
    claiming(
        (64, 64), item("serial", 128, second_stages=1), DqShareSm90(dq_by="keys", ds_stages=1)
    ),
    claiming((32, 32), item("serial", 128), DqShareSm90(dq_by="own", dq_add="stored")),
    claiming((112, 64), item("by_turns"), DqShareSm90(dq_by="keys", dq_add="stored")),
    claiming(
        (128, 128),
        item("by_turns", first_stages=3),
        DqShareSm90(dq_by="keys", ds_stages=1, dq_add="queued"),
    ),
    claiming(
        (64, 64),
        item("interleaved", first_stages=3, held_rows=True),
        DqShareSm90(dq_by="own", dq_add="queued"),
    ),
]


# With a mask and the signs of scores, and with a decay and a pass that takes no scores.
RETNET = [
    (
        replace(
            candidate(
                (16, 16),
                decomposition="fused",
                keys=item("interleaved", first_stages=3, mask_stages=2),
                dq_share=DqShareSm90(dq_by="own"),
                early_launches=True,
                gathered_stores=True,
            ),
            op="retnet",
            mask="explicit",
        ),
        RetNetBackward(any_values=True, shared=True, r_grad=True, note=", through r"),
    ),
    (
        replace(
            candidate(
                (16, 16),
                decomposition="fused",
                keys=item("both_ahead", first_stages=4, second_stages=4, mask_stages=2),
                dq_share=DqShareSm90(dq_by="own", dq_add="stored"),
                early_launches=True,
                gathered_stores=True,
            ),
            op="retnet",
            mask="explicit",
        ),
        RetNetBackward(any_values=True, r_grad=True, note=", through r, P and dS at once"),
    ),
    (
        replace(
            candidate(
                (16, 16),
                decomposition="two_pass",
                keys=item("scores_ahead"),
                dq=item("both_ahead"),
                persistent=True,
                early_launches=True,
                gathered_stores=True,
            ),
            op="retnet",
            mask="decay",
        ),
        RetNetBackward(edge=3, normalize=False, sign=-1, note=", gammas of all sizes"),
    ),
]


def test_gradients_of_retnet(tmp_path: Path) -> None:
    for variant, way in RETNET:
        kernel = build(variant, tmp_path / variant.name)
        shape = replace(
            problem(variant, causal=True, queries=141, keys=136, group=2),
            op="retnet",
            mask=variant.mask,
        )
        outcome = check(
            kernel, [shape], [("random", 1)], ways=(way,), deterministic=variant.deterministic
        )
        assert outcome.ok, outcome


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.knobs.label)
def test_gradients_of_odd_shapes(variant: Candidate, tmp_path: Path) -> None:
    kernel = build(variant, tmp_path / variant.name)
    grouped = problem(variant, causal=True, queries=141, keys=200, group=2)
    plain = problem(variant, causal=variant.padded_dim_v > 64, queries=141, keys=77)
    for run, shape in ((("lazy", 0), grouped), (("lazy", 0), plain), (("random", 1), plain)):
        outcome = check(kernel, [shape], [run], deterministic=variant.deterministic)
        assert outcome.ok, outcome


def claimed_shapes(of: Candidate, batch: int = 2) -> list[Problem]:
    """Shapes with more blocks of keys than CTAs; of the second one, most are seen by no query."""
    unseen = problem(of, causal=True, queries=77, keys=600)
    return [
        replace(problem(of, causal=True, queries=200, keys=260), batch=batch),
        replace(unseen, causal_alignment="top_left"),
    ]


@pytest.mark.parametrize("variant", CLAIMING, ids=lambda variant: variant.knobs.label)
def test_gradients_of_claimed_blocks(variant: Candidate, tmp_path: Path) -> None:
    kernel = build(variant, tmp_path / variant.name)
    # CTAs share these blocks of keys, and their partial sums leave from registers.
    shared = problem(variant, causal=True, queries=141, keys=200, group=2)
    same_bits = variant.deterministic
    outcome = check(kernel, [shared], [("random", 2)], deterministic=same_bits)
    assert outcome.ok, outcome
    outcome = check(
        kernel, claimed_shapes(variant), [("lazy", 0), ("random", 1)], deterministic=same_bits
    )
    assert outcome.ok, outcome


def test_tiles_that_a_warpgroup_does_not_see(tmp_path: Path) -> None:
    shape = problem(CLAIMING[0], causal=True, queries=500, keys=500)
    shape = replace(shape, window_size=(150, -1))
    windowed = Candidate.of(shape, CLAIMING[0].knobs)
    kernel = build(windowed, tmp_path / windowed.name, OF_HIDDEN_TILES)
    runs = [("lazy", 0), ("random", 1)]
    outcome = check(kernel, [shape], runs, deterministic=False)
    assert outcome.ok, outcome
    for name in OF_HIDDEN_TILES:
        outcome = check(kernel, [shape], runs, deterministic=False, mutant=name)
        assert not outcome.ok, (name, outcome)


def test_mistakes_show(tmp_path: Path) -> None:
    kernel = build(FUSED, tmp_path / FUSED.name, MUTANTS)
    shape = problem(FUSED, causal=True, queries=150, keys=150)
    assert check(kernel, [shape], [("lazy", 0)], deterministic=False).ok
    for name, (kind, words) in CAUGHT_BY.items():
        outcome = check(kernel, [shape], [("lazy", 0)], deterministic=False, mutant=name)
        assert isinstance(outcome, kind), (name, outcome)
        assert words in outcome.reason.lower(), (name, outcome)


def test_mistakes_of_the_sender_show(tmp_path: Path) -> None:
    stored = DqShareSm90(dq_by="keys", dq_add="stored")
    variant = replace(FUSED, knobs=replace(FUSED.knobs, dq_share=stored, early_launches=True))
    kernel = build(variant, tmp_path / variant.name, OF_SENDER)
    shape = problem(variant, causal=False, queries=300, keys=600)
    runs = [("lazy", 0), ("random", 1)]
    assert check(kernel, [shape], runs, deterministic=False).ok
    for name in OF_SENDER:
        outcome = check(kernel, [shape], runs, deterministic=False, mutant=name)
        assert not outcome.ok, (name, outcome)


@pytest.mark.parametrize(
    ("variant", "batch", "mistakes", "said"),
    [
        (CLAIMING[0], 2, OF_CLAIMS, SAID_OF_CLAIMS),
        (CLAIMING[3], 3, OF_RESULTS_APART, SAID_OF_RESULTS_APART),
    ],
    ids=["claims", "results_apart"],
)
def test_mistakes_of_claims_show(
    variant: Candidate, batch: int, mistakes: Mutants, said: dict[str, str], tmp_path: Path
) -> None:
    kernel = build(variant, tmp_path / variant.name, mistakes)
    shapes = claimed_shapes(variant, batch)
    for name, words in said.items():
        outcome = check(kernel, shapes, [("lazy", 0)], deterministic=False, mutant=name)
        assert not outcome.ok, (name, outcome)
        assert words in outcome.reason.lower(), (name, outcome)
