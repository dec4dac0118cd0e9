"""Python and the kernel headers agree about a candidate: rules and shared memory."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.scores_backward_sm80 import resources as backward_resources
from attention_autotuner.kernels.scores_backward_sm80.rules import (
    KEY_PREDICATES,
    ROW_PREDICATES,
)
from attention_autotuner.kernels.scores_forward_sm80.rules import KERNEL_PREDICATES
from attention_autotuner.kernels.shared.rules import CLASS_PREDICATES, COPY_PREDICATES
from tests.candidates import KEYS, ROWS, backward, forward
from tests.cpp_mirror import asserted, compare_traits, compile_host, source_of

pytestmark = pytest.mark.build

LEGAL = forward(padded_dim_v=256, block_m=64)
# One candidate a rule, which breaks that rule; some break others on the way.
ILLEGAL = {
    "padded_dim_qk_range": forward(LEGAL, padded_dim_qk=272, k_slice=272),
    "padded_dim_v_range": forward(LEGAL, padded_dim_v=528),
    "warps_range": forward(LEGAL, warps_m=20, block_m=320),
    "row_barriers_available": forward(LEGAL, warps_m=16, warps_n=2, block_m=256),
    "block_m_divides_among_warps": forward(LEGAL, block_m=80),
    "block_n_divides_among_warps": forward(LEGAL, block_n=40),
    "v_slices_divide_padded_dim_v": forward(LEGAL, v_slices=3),
    "value_columns_divide_among_warps": forward(LEGAL, padded_dim_v=240, warps_n=2),
    "k_slice_divides_padded_dim_qk": forward(LEGAL, k_slice=48),
    "num_stages_range": forward(LEGAL, num_stages=5),
    "qk_ahead_needs_two_whole_stages": forward(LEGAL, qk_ahead=True, num_stages=1),
    "sliced_k_needs_two_stages": forward(LEGAL, k_slice=64, num_stages=1),
    "softmax_alone": forward(LEGAL, op="retnet", mask="explicit", split_kv=True),
    "copy_bytes_known": forward(LEGAL, copy_bytes=4),
}
TOO_LARGE = forward(LEGAL, block_m=256, warps_m=16, block_n=128, num_stages=4)

ILLEGAL_KEYS = {
    "padded_dim_qk_range": backward("one_pass", padded_dim_qk=24),
    "padded_dim_v_range": backward("one_pass", padded_dim_v=24),
    "keys_block_m_multiple_of_16": backward("one_pass", keys=replace(KEYS, block_m=144)),
    "keys_warps_range": backward("one_pass", keys=replace(KEYS, warp_pairs=9, block_n=144)),
    "keys_block_n_divides_among_pairs": backward("one_pass", keys=replace(KEYS, block_n=80)),
    "keys_num_stages_range": backward("one_pass", keys=replace(KEYS, num_stages=4)),
    "keys_query_subtiles_divide": backward("one_pass", keys=replace(KEYS, query_subtiles=3)),
    "copy_bytes_known": backward("one_pass", copy_bytes=4),
}
ILLEGAL_ROWS = {
    "rows_warps_range": backward("two_kernels", dq=replace(ROWS, warps=1)),
    "rows_column_warps_range": backward(
        "two_kernels", dq=replace(ROWS, warps=2, column_warps=4, block_columns=64)
    ),
    "rows_block_rows_divides_among_warps": backward("two_kernels", dq=replace(ROWS, block_rows=80)),
    "rows_block_columns_divides_among_warps": backward(
        "two_kernels", dq=replace(ROWS, block_columns=144)
    ),
    "rows_num_stages_range": backward("two_kernels", dq=replace(ROWS, num_stages=3)),
    "rows_slices_divide_padded_dim": backward("two_kernels", dq=replace(ROWS, slices=3)),
}
LARGE_KEYS = backward(
    "one_pass", padded_dim_qk=256, padded_dim_v=256, keys=replace(KEYS, block_m=128)
)
LARGE_ROWS = backward(
    "two_kernels", padded_dim_qk=256, padded_dim_v=256, dq=replace(ROWS, block_rows=256, warps=8)
)


def reason(name: str, candidate: Candidate) -> str | None:
    """Why a rule refuses a candidate, or its first pass that the rule is about."""
    if candidate.direction == "forward":
        return KERNEL_PREDICATES[name](candidate)
    for shape in backward_resources.shapes(candidate):
        if name in KEY_PREDICATES and isinstance(shape, backward_resources.KeyShape):
            return KEY_PREDICATES[name](shape)
        if name in ROW_PREDICATES and isinstance(shape, backward_resources.RowShape):
            return ROW_PREDICATES[name](shape)
    return (CLASS_PREDICATES | COPY_PREDICATES)[name](candidate)


@pytest.mark.parametrize(
    ("illegal", "too_large", "rules"),
    [
        (ILLEGAL, [TOO_LARGE], KERNEL_PREDICATES.keys()),
        (
            ILLEGAL_KEYS | ILLEGAL_ROWS,
            [LARGE_KEYS, LARGE_ROWS],
            KEY_PREDICATES.keys()
            | ROW_PREDICATES.keys()
            | CLASS_PREDICATES.keys()
            | COPY_PREDICATES.keys(),
        ),
    ],
    ids=["forward", "backward"],
)
def test_every_kernel_rule_has_its_static_assert(
    tmp_path: Path, illegal: dict[str, Candidate], too_large: list[Candidate], rules: set[str]
) -> None:
    assert illegal.keys() == rules
    for name, candidate in illegal.items():
        assert reason(name, candidate), name
    assert not any(check_kernel(candidate) for candidate in (LEGAL, *too_large))
    result = compile_host(tmp_path, source_of([*illegal.values(), *too_large]))
    assert result.returncode != 0
    assert asserted(result) == {*rules, "smem_fits_block"}


def test_shared_memory_of_forward_is_counted_alike(tmp_path: Path) -> None:
    policy = resolve("H100").on((8, 0))
    dims = ((64, 64), (128, 128), (256, 512), (80, 48), (256, 256))
    candidates = [LEGAL]
    for dim_qk, dim_v in dims:
        legal = policy.legal(Problem(dim_qk=dim_qk, dim_v=dim_v))
        candidates += legal[:: max(1, len(legal) // 23)]
    compare_traits(tmp_path, candidates)
    for knob in ("num_stages", "q_in_registers", "k_slice", "v_slices", "warps_n", "block_n"):
        assert len({getattr(item.knobs, knob) for item in candidates}) > 1, knob


def test_shared_memory_of_backward_is_counted_alike(tmp_path: Path) -> None:
    candidates = []
    for policy, dim_qk, dim_v in (
        ("H100", 64, 64),
        ("A100", 128, 128),
        ("A100", 256, 512),
        ("RTX4090", 80, 48),
        ("RTX4090", 256, 512),
        ("RTX4090", 256, 496),
    ):
        older = resolve(policy).on((8, 0))
        legal = older.legal(Problem(direction="backward", dim_qk=dim_qk, dim_v=dim_v))
        candidates += legal[:: max(1, len(legal) // 17)]
    compare_traits(tmp_path, candidates)
    assert {item.knobs.plan for item in candidates} == {"one_pass", "two_kernels", "three_kernels"}
    passes = [shape for item in candidates for shape in backward_resources.shapes(item)]
    keys = [item.knobs for item in passes if isinstance(item, backward_resources.KeyShape)]
    rows = [item.knobs for item in passes if isinstance(item, backward_resources.RowShape)]
    for knob in ("block_m", "block_n", "num_stages"):
        assert len({getattr(item, knob) for item in keys}) > 1, knob
    for knob in ("block_rows", "block_columns", "column_warps", "num_stages", "slices"):
        assert len({getattr(item, knob) for item in rows}) > 1, knob


@pytest.mark.parametrize("mask", ["explicit", "decay"])
def test_shared_memory_under_a_mask_is_counted_alike(tmp_path: Path, mask: Any) -> None:
    for direction in ("forward", "backward"):
        candidates = []
        for policy, dim_qk, dim_v in (("H100", 128, 128), ("A100", 256, 512), ("RTX4090", 80, 48)):
            problem = Problem(
                op="retnet",
                mask=mask,
                causal=mask == "decay",
                direction=direction,
                dim_qk=dim_qk,
                dim_v=dim_v,
            )
            legal = resolve(policy).legal(problem)
            candidates += legal[:: max(1, len(legal) // 11)]
        compare_traits(tmp_path, candidates)


def test_shares_of_dq_are_cut_alike(tmp_path: Path) -> None:
    candidates = [
        backward(
            "one_pass",
            padded_dim_qk=padded_dim_qk,
            keys=replace(KEYS, block_m=m, block_n=n, warp_pairs=p),
        )
        for padded_dim_qk in (16, 48, 64, 80, 128)
        for m, n, p in ((16, 32, 2), (64, 96, 3), (64, 128, 4), (96, 192, 6), (128, 128, 8))
    ]
    text = source_of(candidates)
    text = text.replace('printf("%d\\n", ', 'printf("%d %d\\n", ').replace(
        "::kSmemBytes", "::kDqSplit.warps_m"
    )
    text = re.sub(r"(\S+)::kDqSplit.warps_m", r"\1::kDqSplit.warps_m, \1::kDqSplit.warps_d", text)
    result = compile_host(tmp_path, text)
    assert result.returncode == 0, result.stderr
    ran = subprocess.run([tmp_path / "traits"], capture_output=True, text=True, check=True)
    numbers = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    expected = []
    for item in candidates:
        (shape,) = backward_resources.shapes(item)
        assert isinstance(shape, backward_resources.KeyShape)
        expected.append(backward_resources.dq_split(shape))
    assert numbers == expected
    assert len(set(numbers)) > 4
