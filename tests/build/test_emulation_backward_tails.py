"""Lists of causal blocks with a tail of heads side by side, and uneven parts of groups, on an emulated machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.build.test_emulation_backward import CLAIMING, ENTRY, problem
from tests.emulation.build import build
from tests.emulation.check import check

pytestmark = pytest.mark.build

SECTIONS = "attention_backward_sm90/sections.cuh"
# Tails of other sizes than those of few tokens, which are all heads; and mistakes.
TAILS = {
    "two_heads": (SECTIONS, "return tail < 2 ? 0 : tail;", "return 2;"),
    "no_heads": (SECTIONS, "if ((!p.causal && !kPacked) || section != 1) return 0;", "return 0;"),
    "first_ranks": (
        "attention_backward_sm90/tiles.cuh",
        "return tile_of_head<kMasked>(head, rank, list);",
        "return tile_of_head<kMasked>(head, 0, list);",
    ),
    "a_tile_late": (
        ENTRY,
        "list.tail_tiles = list.tail_head * (kPacked ? 1 : blocks);",
        "list.tail_tiles = 1;",
    ),
}
WRONG = {"first_ranks", "a_tile_late"}
# Parts of one and of two heads, which a group has where blocks are many.
PARTS = {
    "uneven": (
        "host/head_splits.cuh",
        "return drifts(splits, finer, group, queries, head_bytes) ? finer : splits;",
        "return 2;",
    )
}


def test_heads_in_turn_come_before_a_tail_and_parts_may_be_uneven(tmp_path: Path) -> None:
    variant = CLAIMING[5]
    kernel = build(variant, tmp_path / variant.name, TAILS | PARTS)
    shape = replace(problem(variant, causal=True, queries=200, keys=260), batch=5)
    for name in TAILS:
        outcome = check(kernel, [shape], [("lazy", 0)], deterministic=False, mutant=name)
        assert outcome.ok is (name not in WRONG), (name, outcome)
    grouped = problem(variant, causal=True, queries=200, keys=260, group=3)
    for name in ("", *PARTS):
        outcome = check(kernel, [grouped], [("lazy", 0)], deterministic=False, mutant=name)
        assert outcome.ok, (name, outcome)
