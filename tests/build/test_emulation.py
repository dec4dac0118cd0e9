"""Kernels of family sm90 on an emulated machine: results, and the mistakes that it has to catch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.serving.loader import LoadedKernel
from tests.emulation.build import build
from tests.emulation.check import check

pytestmark = pytest.mark.build

MAINLOOP = "attention_forward_sm90/mainloop.cuh"
OUTPUT = "attention_forward_sm90/output.cuh"
MUTANTS = {
    "scores_not_waited_for": (
        MAINLOOP,
        "warpgroup_wait<1>();\n    fence_accumulators(s);",
        "fence_accumulators(s);",
    ),
    "k_not_waited_for": (
        MAINLOOP,
        "wait_k();\n    wait_turn();\n    issue_scores();\n    wait_v();",
        "wait_turn(); issue_scores(); wait_v();",
    ),
    "v_released_early": (
        MAINLOOP,
        "warpgroup_wait<0>();\n    fence_accumulators(s);\n    fence_accumulators(o);\n    release_v();\n",
        "release_v(); warpgroup_wait<0>();",
    ),
    "k_released_twice": (
        MAINLOOP,
        "consumer_release(empty(T::kKBarrier, k.stage));",
        "consumer_release(empty(T::kKBarrier, k.stage)); consumer_release(empty(T::kKBarrier, k.stage));",
    ),
    "output_not_fenced": (OUTPUT, "fence_view_async_shared();", ""),
    "store_not_waited_for": (OUTPUT, "tma_store_wait_read();", ""),
    "bytes_miscounted": (
        "sm90/tma.cuh",
        "arrive_and_expect_tx(full, Rows * Columns * 2);",
        "arrive_and_expect_tx(full, Rows * Columns * 2 + 16);",
    ),
}
CAUGHT_BY = {
    "scores_not_waited_for": "has yet to read",
    "k_not_waited_for": "has yet to bring",
    "v_released_early": "has yet to read",
    "k_released_twice": "has yet to read",
    "output_not_fenced": "without a fence",
    "store_not_waited_for": "has yet to read",
    "bytes_miscounted": "deadlock",
}
CAUSAL = Problem(
    heads_q=4, heads_kv=2, seqlen_q=300, seqlen_k=300, dim_qk=64, dim_v=64, causal=True
)
ODD = Problem(heads_q=2, heads_kv=1, seqlen_q=77, seqlen_k=205, dim_qk=64, dim_v=64)


def candidate(**knobs: Any) -> Candidate:
    values = {"warpgroups": 2, "block_n": 64, "mainloop": "overlap", **knobs}
    return Candidate(
        dtype="fp16",
        padded_dim_qk=64,
        padded_dim_v=64,
        knobs=AttentionForwardSm90Knobs(**values),
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> LoadedKernel:
    folder = tmp_path_factory.mktemp("emulation") / "mutants"
    return build(candidate(), folder, MUTANTS)


def test_attention_forward_is_right(emulated: LoadedKernel) -> None:
    outcome = check(emulated, [CAUSAL, ODD])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    "knobs",
    [
        {"mainloop": "overlap_flat", "schedule": "static"},
        {"mainloop": "serial", "ping_pong": True, "output": "direct"},
        {"mainloop": "strict", "q_stages": 1, "schedule": "grid", "optimistic": False},
    ],
    ids=lambda knobs: knobs["mainloop"],
)
def test_main_loops_are_right(tmp_path: Path, knobs: dict[str, Any]) -> None:
    outcome = check(build(candidate(**knobs), tmp_path / "kernel"), [CAUSAL, ODD])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_caught(emulated: LoadedKernel, mutant: str) -> None:
    outcome = check(emulated, [CAUSAL], [("lazy", 0)], mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))
    assert CAUGHT_BY[mutant] in outcome.reason
