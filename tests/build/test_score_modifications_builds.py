"""Kernels that are compiled with score modifications, family sm80: right on the emulated machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.scores_backward_sm80.knobs import BackwardKnobs, KeyPass, RowPass
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from tests.emulation.build import build as emulated
from tests.emulation.check import check
from tests.numerics.score_modifications import BASE, KINDS, SHAPES

pytestmark = pytest.mark.build

ROWS = ForwardKnobs(block_m=64, block_n=32, warps_m=4, num_stages=2, k_slice=32)
KEYS = KeyPass(block_m=32, block_n=64, warp_pairs=2, num_stages=2)
RESULT = RowPass(block_rows=64, block_columns=32, warps=4, num_stages=1)
HALVED = replace(RESULT, slices=2, warps=2, column_warps=2)
KNOBS: dict[str, ForwardKnobs | BackwardKnobs] = {
    "event": replace(ROWS, num_stages=1),
    "ahead": replace(ROWS, qk_ahead=True),
    "shared_rows": replace(ROWS, warps_m=2, warps_n=2, persistent=True),
    "one_pass": BackwardKnobs(plan="one_pass", keys=KEYS),
    "three_kernels": BackwardKnobs(plan="three_kernels", dq=RESULT, dk=RESULT, dv=HALVED),
}
WARP, MODS = "scores_forward_sm80/warp.cuh", "score/modifications.cuh"
MISTAKES = {
    "far_keys_seen": (
        "ahead",
        "window",
        WARP,
        "least = first_visible(query_of(tile, row_in_block(i, half))) - first;",
        "",
    ),
    "not_capped": ("one_pass", "softcap", MODS, "return fmaf(-share, share, 1.0f);", "return 1.0f;"),
}  # fmt: skip


def candidate(knobs: str, kind: str) -> Candidate:
    direction: Any = "backward" if isinstance(KNOBS[knobs], BackwardKnobs) else "forward"
    return Candidate.of(replace(BASE, direction=direction, **KINDS[kind]), KNOBS[knobs])


def problems(of: Candidate, kind: str) -> list[Problem]:
    """The shapes, each as the base of its own: the way changes with the place."""
    named = {"direction": of.direction, **KINDS[kind]}
    return [replace(BASE, **named, **shape) for shape in SHAPES]


@pytest.mark.parametrize(
    ("knobs", "kind"), [*((name, "all") for name in KNOBS), ("event", "window")]
)
def test_kernels_are_right_on_the_emulated_machine(
    tmp_path_factory: pytest.TempPathFactory, knobs: str, kind: str
) -> None:
    made = candidate(knobs, kind)
    kernel = emulated(made, tmp_path_factory.getbasetemp() / "emulated" / f"{knobs}_{kind}")
    outcome = check(kernel, problems(made, kind), [("lazy", 0)], deterministic=knobs != "one_pass")
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(tmp_path_factory: pytest.TempPathFactory, mistake: str) -> None:
    knobs, kind, header, before, after = MISTAKES[mistake]
    made = candidate(knobs, kind)
    folder = tmp_path_factory.getbasetemp() / "emulated" / mistake
    kernel = emulated(made, folder, {mistake: (header, before, after)})
    outcome = check(
        kernel, problems(made, kind)[:1], [("lazy", 0)], mutant=mistake, deterministic=False
    )
    assert outcome.kind == "wrong", outcome
