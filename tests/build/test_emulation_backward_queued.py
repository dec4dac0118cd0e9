"""Shares of dQ in the order of their blocks of keys, on an emulated machine: CTAs that wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention_autotuner.kernels.attention_backward_sm90.knobs import DqShareSm90
from tests.build.test_emulation_backward import ENTRY, VARIANTS, candidate, item, problem
from tests.emulation.build import build
from tests.emulation.check import check

pytestmark = pytest.mark.build

# Whose blocks of keys begin at tiles of queries of their own, where they have no mask and are many.
APART = candidate(
    (112, 64),
    decomposition="fused",
    keys=item("interleaved", first_stages=3),
    dq_share=DqShareSm90(dq_by="keys", dq_add="queued"),
    persistent=True,
    early_launches=True,
    gathered_stores=True,
)
OF_APART = {
    "no_share_is_first": (
        "attention_backward_sm90/query_order.cuh",
        "return before < 0 ? before + blocks : before;",
        "return before < 0 ? before + blocks : before + 1;",
    ),
    "apart_without_room": (ENTRY, "arguments.apart = false;", ""),
}


def test_queued_shares_wait_for_ctas_that_were_dispatched_before_alone(tmp_path: Path) -> None:
    """A kernel that was prepared for two CTAs at once, of which other work leaves room for one."""
    variant = next(v for v in VARIANTS if "own2queued_raster_persistent" in v.knobs.label)
    kernel = build(variant, tmp_path / variant.name)
    for keys, multiprocessors in ((200, 2), (200, 1), (500, 1)):
        shape = problem(variant, causal=False, queries=77, keys=keys)
        outcome = check(kernel, [shape], [("lazy", 0)], multiprocessors=multiprocessors)
        assert outcome.ok, (keys, multiprocessors, outcome)


def test_blocks_that_begin_apart_wait_in_a_ring(tmp_path: Path) -> None:
    """Blocks that visit two and six tiles of queries; at last other work leaves room for six of nine CTAs."""
    kernel = build(APART, tmp_path / APART.name, OF_APART)
    shapes = [problem(APART, causal=False, queries=queries, keys=1090) for queries in (77, 330)]
    runs = [("lazy", 0), ("random", 1)]
    for multiprocessors in (10, 6):
        outcome = check(kernel, shapes, runs, multiprocessors=multiprocessors)
        assert outcome.ok, (multiprocessors, outcome)
    few_tiles, many_tiles = shapes
    for name, (shape, multiprocessors) in zip(
        OF_APART, ((few_tiles, 10), (many_tiles, 6)), strict=True
    ):
        outcome = check(kernel, [shape], runs, multiprocessors=multiprocessors, mutant=name)
        assert not outcome.ok, name
        assert "deadlock" in outcome.reason.lower(), (name, outcome)
