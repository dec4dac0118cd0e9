"""dQ from the sums of its shares, on an emulated machine: heads that are complete, lanes that exchange columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.kernels.attention_backward_sm90.knobs import DqShareSm90
from tests.build.test_emulation_backward import FUSED, VARIANTS, problem
from tests.emulation.build import build
from tests.emulation.check import check

pytestmark = pytest.mark.build

CONVERT = "attention_backward_sm90/postprocess.cuh"
STORED = replace(
    FUSED,
    knobs=replace(
        FUSED.knobs, dq_share=DqShareSm90(dq_by="keys", dq_add="stored"), early_launches=True
    ),
)
# Rows of dQ's MMAs are its columns.
SWAPPED = next(variant for variant in VARIANTS if "c80" in variant.knobs.label)
MISTAKES = {
    "begins_before_what_is_ahead": (
        "attention_backward_sm90/dq_share.cuh",
        "if constexpr (kPreprocessBegins<Config>) wait_on_dependent_grids();\n"
        "  launch_dependent_grids();",
        "launch_dependent_grids(); wait_on_dependent_grids();",
    ),
    "head_not_awaited": (
        CONVERT,
        "wait_complete(complete + counter_of<T>(arguments, list, head), blocks.count() * T::kHeadCounts);",
        "",
    ),
    "columns_not_exchanged": (CONVERT, "words[half][i] = upper ? other : low;", ""),
    "unseen_tile_converted": (CONVERT, "stored = semaphores[place];", ""),
}
MISTAKES_OF_SWAPPED = {
    "pairs_in_another_order": (
        CONVERT,
        "sums[i] = load_in_order(tile + 128 * fragment(group) + 16 * i + 4 * (lane_index() % 4));",
        "sums[i] = load_in_order(tile + 128 * fragment(group) + 16 * (i ^ 1) + 4 * (lane_index() % 4));",
    ),
    "columns_of_the_tile_above": (
        CONVERT,
        "return fragment(group) / kQueryTiles * 16 + lane_index() % 2 * 8;",
        "return fragment(group) % kQueryTiles * 16 + lane_index() % 2 * 8;",
    ),
    "halves_not_exchanged": (CONVERT, "words[half][i] = odd ? other : left;", ""),
    "rows_of_the_neighbor": (
        CONVERT,
        "return fragment(group) % kQueryTiles * 8 + lane_index() % 4 / 2 * 4 + i;",
        "return fragment(group) % kQueryTiles * 8 + lane_index() % 2 * 4 + i;",
    ),
}


def test_mistakes_of_conversion_show(tmp_path: Path) -> None:
    kernel = build(STORED, tmp_path / STORED.name, MISTAKES)
    # The first rows see no key.
    shapes = [
        problem(STORED, causal=False, queries=300, keys=600),
        problem(STORED, causal=True, queries=300, keys=100),
    ]
    runs = [("lazy", 0), ("random", 1)]
    outcome = check(kernel, shapes, runs, deterministic=False)
    assert outcome.ok, outcome
    for name in MISTAKES:
        outcome = check(kernel, shapes, runs, deterministic=False, mutant=name)
        assert not outcome.ok, (name, outcome)


def test_mistakes_of_swapped_conversion_show(tmp_path: Path) -> None:
    kernel = build(SWAPPED, tmp_path / SWAPPED.name, MISTAKES_OF_SWAPPED)
    shape = problem(SWAPPED, causal=False, queries=300, keys=300)
    outcome = check(kernel, [shape], [("lazy", 0)], deterministic=False)
    assert outcome.ok, outcome
    for name in MISTAKES_OF_SWAPPED:
        outcome = check(kernel, [shape], [("lazy", 0)], deterministic=False, mutant=name)
        assert not outcome.ok, (name, outcome)
