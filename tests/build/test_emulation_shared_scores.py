"""Retnet's forward whose slices share scores, on an emulated machine: results, and mistakes of the exchange."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Wrong
from attention_autotuner.core.problem import DType, Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.serving.loader import LoadedKernel
from tests.emulation.build import build
from tests.emulation.check import RUNS, check, uneven_levels

pytestmark = pytest.mark.build

SHARED = "attention_forward_sm90/shared_scores.cuh"
MUTANTS = {
    "slot_not_awaited": (SHARED, "wait(barrier + 8, exchange.phase ^ 1);", ""),
    "p_not_awaited": (SHARED, "wait(barrier, exchange.phase);", ""),
    "level_not_taken": (SHARED, "level[half] = other_level[half];", ""),
    "share_not_taken": (SHARED, "shares[1][half] = level[half] / other_level[half];", ""),
    "old_share_not_taken": (
        SHARED,
        "shares[0][half] = other_level[half] / level[half];",
        "factor[half] *= other_level[half] / level[half];",
    ),
    "sums_not_sent": (
        SHARED,
        "send(tile.slice ^ 1, key_tile == 0);",
        "send(tile.slice ^ 1, false);",
    ),
    "sum_not_taken": (SHARED, "sum[half] += other_sum[half];", ""),
    "v_released_early": (
        SHARED,
        "warpgroup_wait<1>();\n    release(2);\n    Base::pack();",
        "release(2); warpgroup_wait<1>(); Base::pack();",
    ),
    "ends_alone": (
        "attention_forward_sm90/kernel.cuh",
        "if constexpr (T::kSharesScores) cluster_sync();",
        "",
    ),
}
CAUGHT = [
    ("slot_not_awaited", "random", "races with"),
    ("p_not_awaited", "lazy", "deadlock"),
    ("level_not_taken", "eager", "o: "),
    ("share_not_taken", "eager", "o: "),
    ("old_share_not_taken", "eager", "o: "),
    ("sums_not_sent", "eager", "o: "),
    ("sum_not_taken", "eager", "o: "),
    ("v_released_early", "eager", "races with the read of an MMA"),
    ("ends_alone", "random", "has ended"),
]
ROWS = Problem(
    op="retnet",
    mask="explicit",
    batch=1,
    heads_q=2,
    heads_kv=1,
    seqlen_q=200,
    seqlen_k=300,
    dim_qk=64,
    dim_v=128,
)
SQUARE = Problem(
    op="retnet",
    mask="explicit",
    batch=2,
    heads_q=1,
    heads_kv=1,
    seqlen_q=130,
    seqlen_k=130,
    dim_qk=64,
    dim_v=128,
    causal=True,
)


def candidate(dtype: DType = "fp16", **knobs: Any) -> Candidate:
    plan: dict[str, Any] = {
        "warpgroups": 2,
        "block_n": 128,
        "mainloop": "overlap",
        "optimistic": False,
        "q_stages": 1,
        "mask_stages": 1,
        "v_slices": 2,
        "exchange_stages": 1,
        "output": "direct",
        "schedule": "static",
    }
    return Candidate(
        op="retnet",
        mask="explicit",
        dtype=dtype,
        padded_dim_qk=64,
        padded_dim_v=128,
        knobs=AttentionForwardSm90Knobs(**(plan | knobs)),
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> LoadedKernel:
    return build(candidate(), tmp_path_factory.mktemp("shared"), MUTANTS)


def test_shared_scores_are_right(emulated: LoadedKernel) -> None:
    outcome = check(emulated, [ROWS, SQUARE])
    assert outcome.ok, outcome.reason


def test_levels_of_two_ctas_agree(emulated: LoadedKernel) -> None:
    outcome = check(emulated, [ROWS], RUNS[1:], adjust=uneven_levels)
    assert outcome.ok, outcome.reason


def test_other_rings_and_way_of_o_are_right(tmp_path: Path) -> None:
    knobs = {"exchange_stages": 2, "v_stages": 1, "q_stages": 2, "mask_stages": 2}
    kernel = build(candidate("bf16", **knobs, output="through_q", schedule="grid"), tmp_path)
    outcome = check(kernel, [replace(ROWS, dtype="bf16")], RUNS[::2])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(("mutant", "policy", "message"), CAUGHT)
def test_mistakes_of_the_exchange_are_caught(
    emulated: LoadedKernel, mutant: str, policy: str, message: str
) -> None:
    runs = [(policy, 1), (policy, 0)]
    outcome = check(emulated, [ROWS], runs, adjust=uneven_levels, mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))
    assert message in outcome.reason, outcome.reason
