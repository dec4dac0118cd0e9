"""Kernels of family sm90 on an emulated machine: results, and the mistakes that it has to catch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.serving.loader import LoadedKernel
from tests.emulation.build import build
from tests.emulation.check import GROWING, RUNS, check, scaled, uneven_levels

pytestmark = pytest.mark.build

MAINLOOP = "attention_forward_sm90/mainloop.cuh"
OUTPUT = "attention_forward_sm90/output.cuh"
ROWS = "attention_forward_sm90/rows.cuh"
SOFTMAX = "attention_forward_sm90/softmax.cuh"
MUTANTS = {
    "begins_before_what_is_ahead": (
        "attention_forward_sm90/kernel.cuh",
        "begin_call();",
        "launch_dependent_grids();",
    ),
    "scores_not_waited_for": (
        MAINLOOP,
        "warpgroup_wait<1>();\n    fence_accumulators(s);",
        "fence_accumulators(s);",
    ),
    "k_not_waited_for": (
        MAINLOOP,
        "wait_k();\n    wait_turn(key_tile);\n    issue_scores();\n    wait_v();",
        "wait_turn(key_tile); issue_scores(); wait_v();",
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
    "skipped_phases_not_awaited_by_all": (
        MAINLOOP,
        "Base::wait_mask();\n      warpgroup_barrier(group);\n      release_k();\n      release_v();",
        "Base::wait_mask(); release_k(); release_v();",
    ),
    "turn_not_passed": (
        ROWS,
        "if (by_turns(key_tile)) ping_pong_pass<T::kWarpgroups>(turn());",
        "",
    ),
    "p_overwritten": (
        MAINLOOP,
        "due = Base::optimistic_softmax(next_p, !new_tile);",
        "due = Base::optimistic_softmax(p, !new_tile);",
    ),
    "index_out_of_bounds": (
        ROWS,
        "o[i] *= factor[i / 2 % 2];",
        "o[i] *= factor[i / 2];",
    ),
    "maximum_not_raised": (SOFTMAX, "level[half] = next;", ""),
    "output_not_fenced": (OUTPUT, "fence_view_async_shared();", ""),
    "store_not_waited_for": (OUTPUT, "tma_store_wait_read();", ""),
    "bytes_miscounted": (
        "sm90/tma.cuh",
        "arrive_and_expect_tx(full, Rows * Columns * 2);",
        "arrive_and_expect_tx(full, Rows * Columns * 2 + 16);",
    ),
}
CAUGHT = [
    ("begins_before_what_is_ahead", "lazy", "before the kernel ahead of it has ended"),
    ("scores_not_waited_for", "eager", "races with the read of an MMA"),
    ("scores_not_waited_for", "lazy", "an MMA or a copy has yet to read"),
    ("k_not_waited_for", "eager", "races with the write of a copy"),
    ("v_released_early", "eager", "races with the read of an MMA"),
    ("k_released_twice", "eager", "races with the write of a copy"),
    ("skipped_phases_not_awaited_by_all", "random", "deadlock"),
    ("turn_not_passed", "eager", "named barrier"),
    ("p_overwritten", "lazy", "a register of A"),
    ("index_out_of_bounds", "eager", "out of bounds"),
    ("maximum_not_raised", "eager", "o: "),
    ("output_not_fenced", "eager", "without a fence"),
    ("store_not_waited_for", "eager", "races with the read of"),
    ("bytes_miscounted", "eager", "bytes to come"),
]
CAUSAL = Problem(
    batch=1, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_k=300, dim_qk=64, dim_v=64, causal=True
)
ODD = Problem(batch=2, heads_q=2, heads_kv=1, seqlen_q=77, seqlen_k=205, dim_qk=64, dim_v=64)


def candidate(**knobs: Any) -> Candidate:
    values = {"warpgroups": 2, "block_n": 64, "mainloop": "overlap", **knobs}
    return Candidate(
        dtype="fp16",
        padded_dim_qk=64,
        padded_dim_v=64,
        knobs=AttentionForwardSm90Knobs(**values),
    )


@pytest.fixture(scope="module")
def emulated(builds: Path) -> LoadedKernel:
    return build(candidate(ping_pong=True), builds / "mutants", MUTANTS)


@pytest.mark.parametrize(
    ("sign", "runs"), [(1.0, RUNS), (-1.0, [("random", 2)]), (0.0, [("lazy", 3)])]
)
def test_attention_forward_is_right(
    emulated: LoadedKernel, sign: float, runs: list[tuple[str, int]]
) -> None:
    def adjusted(inputs: Inputs) -> tuple[Inputs, Inputs]:
        return scaled(inputs, sign=sign)

    outcome = check(emulated, [CAUSAL, ODD], runs, adjust=adjusted, ways=GROWING)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    "knobs",
    [
        {"mainloop": "overlap_flat", "schedule": "static"},
        {"mainloop": "serial", "output": "direct"},
        {"mainloop": "scores_first", "ping_pong": True},
        {"mainloop": "strict", "q_stages": 1, "schedule": "grid", "optimistic": False},
    ],
    ids=lambda knobs: knobs["mainloop"],
)
def test_main_loops_are_right(builds: Path, knobs: dict[str, Any]) -> None:
    kernel = build(candidate(**knobs), builds / str(knobs["mainloop"]))
    outcome = check(kernel, [CAUSAL, ODD], ways=GROWING)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    ("dims", "kept"), [((64, 64), 0), ((64, 128), 48), ((192, 360), 0)], ids=str
)
def test_masked_scores_are_right(builds: Path, dims: tuple[int, int], kept: int) -> None:
    """The way of O differs: through the memory of Q, from registers, by slices of V that are not whole."""
    problem = replace(ODD, op="retnet", mask="explicit", dim_qk=dims[0], dim_v=dims[1])
    default = H100().default(problem)
    schedule = "static" if kept else default.knobs.schedule
    knobs = replace(default.knobs, kept_depth=kept, schedule=schedule)
    kernel = build(replace(default, knobs=knobs), builds / f"masked_{dims[1]}")
    problems = [problem, replace(problem, causal=True, seqlen_k=77)]
    if kept:  # with tiles of Q that follow each other
        problems.append(replace(problem, seqlen_q=600, heads_q=3, heads_kv=3))
    outcome = check(kernel, problems, RUNS[::2])
    assert outcome.ok, outcome.reason
    outcome = check(kernel, [problem], RUNS[1:2], adjust=uneven_levels)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(("mutant", "policy", "message"), CAUGHT)
def test_mistakes_are_caught(
    emulated: LoadedKernel, mutant: str, policy: str, message: str
) -> None:
    outcome = check(emulated, [CAUSAL], [(policy, 1)], ways=GROWING, mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))
    assert message in outcome.reason
