"""Python and the headers agree about attention's forward kernel of family sm90."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.kernels.attention_forward_sm90.resources import shape_of
from attention_autotuner.kernels.attention_forward_sm90.rules import (
    ATTENTION_FORWARD_SM90_PREDICATES,
)
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.shared.rules import CLASS_PREDICATES
from tests.cpp_mirror import asserted, compare_traits, compile_host, source_of

pytestmark = pytest.mark.build

PLAIN = Candidate(
    dtype="fp16",
    padded_dim_qk=128,
    padded_dim_v=128,
    knobs=AttentionForwardSm90Knobs(warpgroups=2, block_n=128, mainloop="overlap"),
)
DIMS = ((16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (128, 256), (256, 256))


MASKED = replace(
    PLAIN,
    op="retnet",
    mask="explicit",
    knobs=replace(PLAIN.knobs, optimistic=False, q_stages=1, mask_stages=2, k_stages=2, v_stages=2),
)


def changed(fields: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    return replace(PLAIN, knobs=replace(PLAIN.knobs, **knobs), **(fields or {}))


def sharing(**knobs: Any) -> Candidate:
    shared = {"v_slices": 2, "exchange_stages": 1, "mask_stages": 1, "schedule": "static"}
    return replace(MASKED, knobs=replace(MASKED.knobs, **{**shared, **knobs}))


ILLEGAL = {
    "padded_dim_qk_range": changed({"padded_dim_qk": 24}),
    "padded_dim_v_range": changed({"padded_dim_v": 24}),
    "tma_needs_alignment": changed({"copy_bytes": 2}),
    "warpgroups_range": changed(warpgroups=5),
    "block_n_fits_mma": changed(block_n=72),
    "value_columns_fit_mma": changed({"padded_dim_v": 304}, output="direct"),
    "q_stages_range": changed(q_stages=3),
    "k_stages_range": changed(k_stages=9),
    "v_stages_range": changed(v_stages=0),
    "mask_stages_range": changed(mask_stages=1),
    "slices_fill_blocks": changed({"padded_dim_v": 160}, v_slices=2),
    "flat_needs_two_stages": changed(mainloop="overlap_flat", v_stages=1),
    "flat_takes_no_turns": changed(mainloop="overlap_flat", ping_pong=True),
    "turns_need_warpgroups": changed(warpgroups=1, ping_pong=True),
    "output_leaves_directly": changed(pack_gqa=True),
    "output_fits_q": changed({"padded_dim_qk": 64}),
    "fragments_fit_warpgroup": changed(warpgroups=3),
    "flat_holds_one_sequence": changed({"modifications": ("packed",)}, mainloop="overlap_flat"),
}
ILLEGAL_MASKED = {
    "mask_stages_range": replace(MASKED, knobs=replace(MASKED.knobs, mask_stages=0)),
    "mask_fills_blocks": replace(MASKED, knobs=replace(MASKED.knobs, block_n=96)),
    "softmax_alone": replace(MASKED, knobs=replace(MASKED.knobs, optimistic=True)),
    "kept_depth_range": replace(MASKED, knobs=replace(MASKED.knobs, kept_depth=24)),
    "exchange_stages_range": sharing(exchange_stages=3),
    "two_slices_share_scores": sharing(v_slices=1),
    "shared_scores_overlap": sharing(mainloop="serial"),
    "clusters_claim_nothing": sharing(schedule="dynamic"),
    "shared_ring_holds_step": sharing(k_stages=1, v_stages=1),
}
TOO_LARGE = changed(k_stages=4, v_stages=4)


def test_every_rule_of_the_kernel_has_its_static_assert(tmp_path: Path) -> None:
    rules = {*CLASS_PREDICATES, *ATTENTION_FORWARD_SM90_PREDICATES}
    assert {*ILLEGAL, *ILLEGAL_MASKED} == rules
    for name, candidate in (*ILLEGAL.items(), *ILLEGAL_MASKED.items()):
        rule = ATTENTION_FORWARD_SM90_PREDICATES.get(name)
        shape = shape_of(candidate)
        assert rule(shape) if rule is not None else CLASS_PREDICATES[name](candidate), name
    assert check_kernel(PLAIN) is check_kernel(TOO_LARGE) is None
    result = compile_host(tmp_path, source_of([*ILLEGAL.values(), TOO_LARGE]))
    assert result.returncode != 0
    assert asserted(result) == {*ILLEGAL, "smem_fits_block"}
    assert check_kernel(MASKED) is None
    result = compile_host(tmp_path, source_of(list(ILLEGAL_MASKED.values())))
    assert asserted(result) == {*ILLEGAL_MASKED}


def test_masks_are_counted_alike(tmp_path: Path) -> None:
    masked = Problem(op="retnet", mask="explicit", causal=True)
    candidates = [
        candidate
        for dims in ((16, 16), (64, 64), (128, 128), (256, 512), (96, 304))
        for candidate in H100().legal(replace(masked, dim_qk=dims[0], dim_v=dims[1]))
        if candidate.kernel == PLAIN.kernel
    ]
    assert {shape_of(candidate).knobs.v_slices for candidate in candidates} == {1, 2}
    assert {shape_of(candidate).knobs.exchange_stages for candidate in candidates} == {0, 1, 2}
    fragments = [shape_of(candidate).fragment_registers for candidate in candidates]
    compare_traits(tmp_path, candidates, kFragmentRegisters=fragments)


def test_shared_memory_and_registers_are_counted_alike(tmp_path: Path) -> None:
    candidates = [
        candidate
        for dims in DIMS
        for problem in (Problem(), Problem(heads_kv=4, seqlen_q=1), Problem(seqlen_q=128))
        for candidate in H100().legal(replace(problem, dim_qk=dims[0], dim_v=dims[1]))
        if candidate.family == "sm90"
    ]
    candidates = list(dict.fromkeys(candidate.compiled for candidate in candidates))
    assert len(candidates) > 100
    assert {shape_of(candidate).knobs.warpgroups for candidate in candidates} == {1, 2, 3, 4}
    compare_traits(
        tmp_path,
        candidates,
        kConsumerRegisters=[shape_of(candidate).consumer_registers for candidate in candidates],
        kFragmentRegisters=[shape_of(candidate).fragment_registers for candidate in candidates],
    )
