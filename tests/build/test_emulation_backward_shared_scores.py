"""Retnet's dV whose slices share scores, on an emulated machine: results, and mistakes of the exchange."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Wrong
from attention_autotuner.core.problem import DType
from attention_autotuner.serving.loader import LoadedKernel
from tests.candidates import MASKED_BACKWARD, SM90_PASS, masked_backward
from tests.emulation.build import build
from tests.emulation.check import RUNS, check

pytestmark = pytest.mark.build

SHARED = "scores_backward_sm90/shared_scores.cuh"
LOADS = "scores_backward_sm90/shared_scores_producer.cuh"
MUTANTS = {
    "begins_before_what_is_ahead": (
        "scores_backward_sm90/row_factors.cuh",
        "begin_call();",
        "launch_dependent_grids();",
    ),
    "slot_not_awaited": (SHARED, "exchange().producer_acquire(index);", ""),
    "p_not_awaited": (SHARED, "exchange().consumer_wait(index);", ""),
    "p_received_early": (
        SHARED,
        "complete_tile<kSlices>(slots - kSlices, step > 1);  // of the other's half of the step before\n"
        "      issue_scores(slots + kSlices);\n      receive(index - 1);",
        "receive(index - 1); complete_tile<kSlices>(slots - kSlices, step > 1);"
        "issue_scores(slots + kSlices);",
    ),
    "z_released_early": (SHARED, "warpgroup_wait<Behind>();", ""),
    "x_released_early": (
        SHARED,
        "make_p(index, now, step + 1 == steps);",
        "make_p(index, now, true);",
    ),
    "halves_mixed_up": (
        LOADS,
        "load_z(near_half(last.tile), last.head);",
        "load_z(far_half(last.tile), last.head);",
    ),
    "mask_not_awaited": (SHARED, "mask_ring.consumer_wait(index);", ""),
}
CAUGHT = [
    ("begins_before_what_is_ahead", "lazy", "before the kernel ahead of it has ended"),
    ("slot_not_awaited", "random", "races with"),
    ("p_not_awaited", "lazy", "deadlock"),
    ("p_received_early", "lazy", "has changed a register of A"),
    ("z_released_early", "lazy", "has yet to read"),
    ("x_released_early", "random", "arrival"),
    ("halves_mixed_up", "eager", "dv: "),
    ("mask_not_awaited", "lazy", "races with the write of a copy"),
]
ROWS = MASKED_BACKWARD
SQUARE = replace(ROWS, batch=2, heads_q=1, seqlen_q=130, seqlen_k=130, causal=True)


def candidate(dtype: DType = "fp16", kept: int = 0, **knobs: Any) -> Candidate:
    shared = {"slices": 2, "num_stages": 1, "depth_slices": 2, "slice_stages": 8}
    dv = replace(SM90_PASS, **(shared | {"exchange_stages": 1} | knobs))
    plain = replace(SM90_PASS, kept_depth=kept)
    return masked_backward(
        {"dq": plain, "dk": plain, "dv": dv, "gathered_stores": True}, dtype=dtype
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> LoadedKernel:
    return build(candidate(), tmp_path_factory.mktemp("shared"), MUTANTS)


def test_shared_scores_are_right(emulated: LoadedKernel) -> None:
    outcome = check(emulated, [ROWS, SQUARE])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    "knobs",
    [
        {"num_stages": 2, "slice_stages": 7},
        {"depth_slices": 1, "slice_stages": 3, "exchange_stages": 2},
    ],
)
def test_other_rings_and_kept_depth_are_right(tmp_path: Path, knobs: dict[str, Any]) -> None:
    kernel = build(candidate("bf16", kept=64, **knobs), tmp_path)
    problem = replace(ROWS, dtype="bf16")
    # Tiles of one step, and several a CTA.
    short = replace(problem, batch=3, seqlen_q=600, seqlen_k=64)
    outcome = check(kernel, [problem, short], RUNS[::2])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(("mutant", "policy", "message"), CAUGHT)
def test_mistakes_of_the_exchange_are_caught(
    emulated: LoadedKernel, mutant: str, policy: str, message: str
) -> None:
    outcome = check(emulated, [ROWS], [(policy, 1)], mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))
    assert message in outcome.reason, outcome.reason
