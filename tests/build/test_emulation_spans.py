"""Spans of rows of documents, on an emulated machine: the search of a CTA's threads, and neighbors that differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_autotuner.arch import resolve
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.attention import modified_inputs
from tests.emulation.build import build
from tests.emulation.check import check
from tests.numerics.spans import BASE, KINDS

pytestmark = pytest.mark.build

SPANS = "common/spans.cuh"
MAINLOOP = "attention_forward_sm90/mainloop.cuh"
ROWS = "attention_forward_sm90/rows.cuh"
MISTAKES = {
    "sides_confused": (SPANS, "before.narrow(sum & 0xffff);", "before.narrow(sum >> 16);"),
    "narrowed_too_far": (
        SPANS,
        "if (passed < kProbes) high = minimum(high, low + step - 1);",
        "if (passed < kProbes) high = minimum(high, low + step - 2);",
    ),
    "begin_of_a_warp": (
        SPANS,
        "if (up_to != 0) document.x = rows.begin + 32 * i + 31 - __clz(int(up_to));",
        "if (up_to != 0) document.x = rows.begin + 32 * i;",
    ),
    "first_row_of_a_warp_left_out": (
        SPANS,
        "shared[warp] = int(begins);",
        "shared[warp] = int(begins & ~1u);",
    ),
    "turns_of_other_tiles": (
        MAINLOOP,
        "if constexpr (T::kModified) skip_k_and_v(Base::rest, first_key_tile() - 1);",
        "if constexpr (T::kModified) skip_k_and_v(Base::rest, first_key_tile() + 1);",
    ),
    "turns_while_alone": (
        ROWS,
        "turns_end = minimum(tiles.end, key_tiles(range, query_of(tile, kWarpgroupRows - 1) + 1)) - 1;",
        "turns_end = tiles.first + steps - 1;",
    ),
}
# Rows of several CTAs and of more than one round: 1300 = 128 + 1172 and 1172 > 256. The window keeps tiles few.
LONG = replace(
    BASE,
    **KINDS["documents"],
    batch=1,
    heads_q=1,
    heads_kv=1,
    seqlen_q=1300,
    seqlen_k=1300,
    causal=True,
    window_size=(400, -1),
)
LENGTHS = (
    (1300,),
    (160, 1140),
    (1, 127, 1, 1, 126, 900, 3, 141),
    (1299, 1),
    (255, 1, 258, 786),
    (1,) * 1300,
)


@pytest.fixture(params=["forward", "backward"])
def problem(request: pytest.FixtureRequest) -> Problem:
    return replace(LONG, direction=request.param)


def test_documents_of_any_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Problem
) -> None:
    mistakes = MISTAKES if problem.direction == "forward" else {}
    # Warpgroups take turns where there are many tiles.
    many = replace(problem, batch=4, heads_q=32, heads_kv=32, window_size=(-1, -1))
    candidate = resolve("h100").default(many)
    assert problem.direction == "backward" or candidate.knobs.ping_pong
    kernel = build(candidate, tmp_path / "kernel", mistakes)

    def outcome_of(lengths: tuple[int, ...], mutant: str = "") -> Outcome:
        # Ids with gaps, negative ones at first.
        ids = torch.repeat_interleave(3 * torch.arange(len(lengths)) - 4, torch.tensor(lengths))
        monkeypatch.setattr(modified_inputs, "_document_ids", lambda *_, **__: ids.int()[None])
        return check(kernel, [problem], [("random", 1)], mutant=mutant)

    for lengths in LENGTHS:
        outcome = outcome_of(lengths)
        assert outcome.ok, (lengths, outcome)
    for name in mistakes:
        assert not all(outcome_of(lengths, name).ok for lengths in LENGTHS[:3]), name
