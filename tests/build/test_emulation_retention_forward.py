"""Retention's forward by warpgroups on an emulated machine: results, and the mistakes that it has to catch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_sm90.knobs import ChunkwiseSm90Knobs
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.serving.loader import LoadedKernel
from tests.emulation.build import build
from tests.emulation.check import check

pytestmark = pytest.mark.build

MAINLOOP = "chunks_sm90/mainloop.cuh"
MUTANTS = {
    "begins_before_what_is_ahead": (
        MAINLOOP,
        "if (arguments.pass.supers.divisor == 1) wait_on_dependent_grids();",
        "",
    ),
    "output_not_fenced": (MAINLOOP, "fence_view_async_shared();", ""),
    "output_overwritten": (MAINLOOP, "if (stores) tma_store_wait_read();", ""),
    "q_released_early": (
        MAINLOOP,
        "warpgroup_wait<kEarlySteps>();",
        "warp_release(this->q_ring().empty(stage)); warpgroup_wait<kEarlySteps>();",
    ),
    "k_released_early": (
        MAINLOOP,
        "warpgroup_wait<0>();\n      fence_operands(tokens);\n      this->end_update();\n"
        "      warp_release(this->k_ring().empty(stage));\n      begin_chunk(packed);",
        "warp_release(this->k_ring().empty(stage)); warpgroup_wait<0>(); this->end_update(); "
        "begin_chunk(packed);",
    ),
    "output_not_awaited": (MAINLOOP, "warpgroup_wait<kSteps - kEarlySteps>();", ""),
    "state_not_scaled": (
        MAINLOOP,
        "scale_state(taken);\n      this->k_ring().consumer_wait(index);\n#pragma unroll\n"
        "      for (int step = 0; step < kEarlySteps; ++step) issue_update(tokens + 4 * step, stage, step);",
        "this->k_ring().consumer_wait(index);\n#pragma unroll\n"
        "      for (int step = 0; step < kEarlySteps; ++step) issue_update(tokens + 4 * step, stage, step);",
    ),
    "scale_never_raised": (
        "sm90/scaled_state.cuh",
        "if (__any_sync(0xffffffffu, !(sum < kMostSquares))) raise_scale();",
        "",
    ),
}
CAUGHT = [
    ("begins_before_what_is_ahead", "lazy", "before the kernel ahead of it has ended"),
    ("output_not_fenced", "eager", "without a fence"),
    ("output_overwritten", "lazy", "races with"),
    ("q_released_early", "eager", "races with the read of an MMA"),
    ("k_released_early", "eager", "races with the read of an MMA"),
    ("output_not_awaited", "lazy", "o: "),
    ("state_not_scaled", "eager", "o: "),
]
PLAIN = Problem(
    op="retention",
    causal=True,
    batch=1,
    heads_q=2,
    heads_kv=2,
    seqlen_q=300,
    seqlen_k=300,
    dim_qk=64,
    dim_v=64,
)
GROUPED = replace(PLAIN, batch=2, heads_kv=1, seqlen_q=131, seqlen_k=131)


def candidate(problem: Problem = PLAIN, **knobs: Any) -> Candidate:
    return Candidate.of(problem, ChunkwiseSm90Knobs(**{"warpgroups": 1, "num_stages": 2, **knobs}))


@pytest.fixture(scope="module")
def emulated(builds: Path) -> LoadedKernel:
    return build(candidate(), builds / "mutants", MUTANTS)


def test_outputs_and_states_are_right(emulated: LoadedKernel) -> None:
    short = replace(PLAIN, seqlen_q=1, seqlen_k=1)
    outcome = check(emulated, [PLAIN, PLAIN, GROUPED, GROUPED, short])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    ("dims", "knobs"),
    [
        ((64, 64), {"super_chunk": 128, "num_stages": 3}),
        ((128, 120), {"warpgroups": 2}),
        ((256, 136), {"warpgroups": 2, "super_chunk": 128}),
        ((40, 136), {"warpgroups": 3, "num_stages": 3}),
    ],
    ids=["super_chunks", "128x120", "256x136", "40x136"],
)
def test_other_outputs_are_right(
    builds: Path, dims: tuple[int, int], knobs: dict[str, Any]
) -> None:
    problem = replace(GROUPED, dtype="bf16", batch=1, dim_qk=dims[0], dim_v=dims[1])
    longer = replace(problem, heads_q=1, seqlen_q=300, seqlen_k=300)
    kernel = build(candidate(problem, **knobs), builds / f"{dims}{knobs}")
    outcome = check(kernel, [problem, longer, longer], [("lazy", 0), ("random", 1)])
    assert outcome.ok, outcome.reason


def large_states(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """States beyond fp16, though all outputs are within."""
    powers = {"q": -9, "k": 9, "v": 9}
    scaled = {name: inputs.tensors[name] * 2.0**power for name, power in powers.items()}
    grown = replace(inputs, tensors={**inputs.tensors, **scaled})
    return grown, grown


def test_states_may_exceed_the_type(emulated: LoadedKernel) -> None:
    outcome = check(emulated, [PLAIN], [("eager", 0)], adjust=large_states)
    assert outcome.ok, outcome.reason
    outcome = check(
        emulated, [PLAIN], [("eager", 0)], adjust=large_states, mutant="scale_never_raised"
    )
    assert isinstance(outcome, Wrong)


@pytest.mark.parametrize(("mutant", "policy", "message"), CAUGHT)
def test_mistakes_are_caught(
    emulated: LoadedKernel, mutant: str, policy: str, message: str
) -> None:
    outcome = check(emulated, [PLAIN, PLAIN], [(policy, 1)], mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))
    assert message in outcome.reason, outcome.reason
