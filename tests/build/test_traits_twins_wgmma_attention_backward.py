"""Python and the headers agree about attention's backward kernel of family sm90."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90.cost import (
    section_heads,
    tail_heads,
)
from attention_autotuner.kernels.attention_backward_sm90.knobs import (
    AttentionBackwardSm90Knobs,
    BackwardPassSm90,
    DqShareSm90,
)
from attention_autotuner.kernels.attention_backward_sm90.resources import shapes
from attention_autotuner.kernels.attention_backward_sm90.rules import BACKWARD_PASS_SM90_PREDICATES
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.shared.rules import CLASS_PREDICATES
from tests.cpp_mirror import asserted, compare_traits, compile_host, source_of, traits_of

pytestmark = pytest.mark.build

PROBLEM = Problem(direction="backward")
PASS = BackwardPassSm90(block_columns=64, issue_order="serial")
FUSED = Candidate(
    dtype="fp16",
    direction="backward",
    padded_dim_qk=128,
    padded_dim_v=128,
    knobs=AttentionBackwardSm90Knobs(
        decomposition="fused", keys=PASS, dq_share=DqShareSm90(dq_by="keys")
    ),
)
THREE_PASS = replace(
    FUSED, knobs=AttentionBackwardSm90Knobs(decomposition="three_pass", dk=PASS, dv=PASS, dq=PASS)
)
SHARED = replace(PASS, shared_rows=True)
TWO_PASS = replace(
    FUSED, knobs=AttentionBackwardSm90Knobs(decomposition="two_pass", keys=SHARED, dq=PASS)
)
# Of CTAs that claim blocks, with results that fit in the place of X1 and not.
CLAIMING = [
    replace(
        FUSED,
        modifications=modifications,
        padded_dim_v=dim_v,
        knobs=replace(
            FUSED.knobs,
            dq_share=share,
            persistent=True,
            early_launches=True,
            gathered_stores=True,
            dynamic=True,
        ),
    )
    for share, dim_v, modifications in (
        (DqShareSm90(dq_by="keys"), 128, ()),
        (DqShareSm90(dq_by="keys", dq_add="stored"), 64, ()),
        (DqShareSm90(dq_by="keys", dq_add="stored"), 128, ("packed",)),
    )
]
MASKED: dict[str, Any] = {"op": "retnet", "mask": "explicit"}
RETNET: dict[tuple[int, int], tuple[dict[str, Any], ...]] = {
    (64, 64): ({}, MASKED),
    (256, 256): ({}, {"op": "retnet", "mask": "decay", "causal": True}),
}
DIMS = ((16, 16), (64, 64), (80, 80), (112, 96), (128, 128), (192, 128), (128, 256), (256, 256))


def changed(fields: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    keys = replace(FUSED.knobs.keys, **knobs)
    return replace(FUSED, knobs=replace(FUSED.knobs, keys=keys), **(fields or {}))


ILLEGAL = {
    "padded_dim_qk_range": changed({"padded_dim_qk": 24}),
    "padded_dim_v_range": changed({"padded_dim_v": 24}),
    "tma_needs_alignment": changed({"copy_bytes": 2}),
    "warpgroups_range": changed(warpgroups=3),
    "block_columns_fit_mma": changed(block_columns=72),
    "value_columns_fit_mma": changed({"padded_dim_v": 304}),
    "first_stages_range": changed(first_stages=5),
    "second_stages_range": changed(second_stages=0),
    "ahead_needs_two_stages": changed(issue_order="scores_ahead", first_stages=1),
    "values_have_one_score": replace(
        THREE_PASS,
        knobs=replace(THREE_PASS.knobs, dv=replace(PASS, issue_order="both_ahead")),
    ),
    "interleaving_needs_all_products": replace(
        THREE_PASS,
        knobs=replace(THREE_PASS.knobs, dk=replace(PASS, issue_order="interleaved")),
    ),
    "mask_stages_range": changed(mask_stages=1),
    "mask_fills_blocks": replace(
        THREE_PASS, knobs=replace(THREE_PASS.knobs, dq=replace(PASS, block_columns=80)), **MASKED
    ),
    "scores_ahead_takes_scores": replace(
        THREE_PASS,
        knobs=replace(THREE_PASS.knobs, dk=replace(PASS, issue_order="scores_ahead")),
        **MASKED,
    ),
    "dq_share_fits_warpgroups": changed(block_columns=48),
    "shared_rows_split_results": changed(shared_rows=True),
    "shared_rows_need_two_stages": replace(
        TWO_PASS,
        knobs=replace(TWO_PASS.knobs, keys=replace(SHARED, second_stages=1)),
    ),
    "turns_share_registers": replace(
        FUSED,
        knobs=AttentionBackwardSm90Knobs(
            decomposition="two_pass", keys=replace(PASS, issue_order="by_turns"), dq=PASS
        ),
    ),
    "mask_tensors_take_exponents": replace(FUSED, modifications=("softcap", "attn_mask")),
    "packed_tiles_are_dispatched": replace(
        FUSED, modifications=("packed",), knobs=replace(FUSED.knobs, persistent=True)
    ),
    "claims_take_turns": replace(
        CLAIMING[0], knobs=replace(CLAIMING[0].knobs, cta_order="longest_first")
    ),
    "spans_add_in_no_order": replace(
        FUSED,
        modifications=("spans",),
        knobs=replace(FUSED.knobs, dq_share=DqShareSm90(dq_by="keys", dq_add="ordered")),
    ),
    "queue_has_the_order_of_blocks": replace(
        FUSED,
        knobs=replace(
            FUSED.knobs,
            dq_share=DqShareSm90(dq_by="keys", dq_add="queued"),
            cta_order="longest_first",
        ),
    ),
    "fragments_fit_warpgroup": changed(block_columns=128),
}
TOO_LARGE = changed(first_stages=4, second_stages=4)


def violates(rule: str, candidate: Candidate) -> bool:
    if rule in CLASS_PREDICATES:
        return CLASS_PREDICATES[rule](candidate) is not None
    return any(BACKWARD_PASS_SM90_PREDICATES[rule](shape) for shape in shapes(candidate))


def test_every_rule_of_the_kernel_has_its_static_assert(tmp_path: Path) -> None:
    assert ILLEGAL.keys() == {*CLASS_PREDICATES, *BACKWARD_PASS_SM90_PREDICATES}
    assert all(violates(rule, candidate) for rule, candidate in ILLEGAL.items())
    legal = (FUSED, TWO_PASS, THREE_PASS, TOO_LARGE, *CLAIMING)
    assert [check_kernel(candidate) for candidate in legal] == [None] * len(legal)
    result = compile_host(tmp_path, source_of([*ILLEGAL.values(), TOO_LARGE]))
    assert result.returncode != 0
    assert asserted(result) == {*ILLEGAL, "smem_fits_block"}


@pytest.mark.parametrize(
    "changes",
    [
        {"persistent": False},
        {"early_launches": False},
        {"gathered_stores": False},
        {"dq_share": DqShareSm90(dq_by="keys", dq_add="ordered")},
        {"cta_order": "longest_first"},
    ],
    ids=repr,
)
def test_blocks_are_claimed_a_heads_in_turn_by_ctas_that_stay(changes: dict[str, Any]) -> None:
    claiming = CLAIMING[0]
    changed_one = replace(claiming, knobs=replace(claiming.knobs, **changes))
    assert violates("claims_take_turns", changed_one)
    assert not violates("claims_take_turns", claiming)


def test_shared_memory_and_registers_are_counted_alike(tmp_path: Path) -> None:
    candidates = [
        candidate
        for qk, v in DIMS
        for options in RETNET.get((qk, v), ({},))
        for candidate in H100().legal(Problem(direction="backward", dim_qk=qk, dim_v=v, **options))
        if candidate.kernel == FUSED.kernel
        and (not options or candidate.knobs.cta_order == "raster")
    ]
    candidates += CLAIMING
    passes = [shape for candidate in candidates for shape in shapes(candidate)]
    assert len(passes) > 100
    compare_traits(
        tmp_path,
        candidates,
        kConsumerRegisters=[shape.consumer_registers for shape in passes],
        kFragmentRegisters=[shape.fragment_registers for shape in passes],
        kThreads=[shape.threads for shape in passes],
    )


def test_as_many_heads_are_side_by_side(tmp_path: Path) -> None:
    """The entry's host code and the cost model's, over kernels of every list and problems of many shapes."""

    def item(
        dim: int, share: DqShareSm90, modifications: tuple[str, ...] = (), **knobs: Any
    ) -> Candidate:
        usual = {"early_launches": True, "gathered_stores": True, "persistent": True}
        return replace(
            FUSED,
            padded_dim_qk=dim,
            padded_dim_v=dim,
            modifications=modifications,
            knobs=replace(FUSED.knobs, dq_share=share, **usual | knobs),
        )

    queued, queued_own = (DqShareSm90(dq_by=by, dq_add="queued") for by in ("keys", "own"))
    stored, stored_own = (DqShareSm90(dq_by=by, dq_add="stored") for by in ("keys", "own"))
    candidates = [
        item(128, queued, dynamic=True),
        item(128, queued),
        item(64, queued_own, dynamic=True),
        item(64, queued_own, ("window",), dynamic=True),
        item(128, queued, ("window",), dynamic=True),
        item(128, stored, dynamic=True),
        item(128, stored),
        item(64, stored_own, dynamic=True),
        item(64, DqShareSm90(dq_by="own", dq_add="bulk"), cta_order="longest_first"),
    ]
    problems = [
        replace(
            PROBLEM, batch=batch, heads_q=heads, heads_kv=kv, seqlen_q=n, seqlen_k=n, causal=causal
        )
        for batch, heads, kv in ((4, 16, 16), (1, 35, 7), (64, 32, 8))
        for n in (100, 1000, 4096, 40000)
        for causal in (False, True)
    ]
    windows = [(-1, -1), (1023, 0), (255, 300)]
    calls, expected = [], []
    for index, candidate in enumerate(candidates):
        (shape,), (traits,) = shapes(candidate), traits_of(candidate)
        windowed = "window" in candidate.modifications
        dim = candidate.padded_dim_qk
        for problem, window in product(problems, windows if windowed else windows[:1]):
            asked = replace(problem, dim_qk=dim, dim_v=dim, window_size=window)
            fields = [
                asked.batch,
                asked.heads_q,
                asked.heads_kv,
                asked.seqlen_q,
                asked.causal,
                dim,
                *window,
            ]
            heads, group = asked.batch * asked.heads_kv, asked.heads_q // asked.heads_kv
            numbers = ", ".join(str(int(field)) for field in fields)
            config = f"Config{index}"
            calls.append(f"print<{config}, {traits.format(config)}>({numbers});")
            section = section_heads(asked, shape, heads, group, 132)
            tail = tail_heads(asked, shape, heads, section, 132)
            expected.append((section, tail))
    head, _, _ = source_of(candidates).partition("int main() {")
    text = f"""{head}
#include <attention_autotuner/attention_backward_sm90/sections.cuh>
template <typename Config, typename T>
void print(int batch, int heads_q, int heads_kv, int rows, int causal, int dim, int left, int right) {{
  attention_autotuner_attention_backward_params p{{}};
  p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv, p.seqlen_q = p.seqlen_k = rows;
  p.causal = causal, p.dim_qk = p.dim_v = dim, p.window_left = left, p.window_right = right;
  p = attention_autotuner::with_window(p);
  int const heads = batch * heads_kv, blocks = attention_autotuner::divide_up(rows, T::kBlockRows);
  int const section = attention_autotuner::section_heads<Config, T, false>(p, heads, 1, 132);
  int tail = 0;
  if constexpr (T::kTailed) tail = attention_autotuner::tail_heads<T, false>(p, heads, section, blocks, 132);
  std::printf("%d %d\\n", section, tail);
}}
int main() {{
{chr(10).join(calls)}
}}
"""
    result = compile_host(tmp_path, text)
    assert result.returncode == 0, result.stderr
    ran = subprocess.run([tmp_path / "traits"], capture_output=True, text=True, check=True)
    printed = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert printed == expected
    assert len({section for section, _ in expected}) > 8
    assert len({tail for _, tail in expected}) > 3
