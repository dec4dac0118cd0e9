"""Retention's gradients by warpgroups on an emulated machine: results, and the mistakes that it has to catch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_backward_sm90.knobs import ChunkwiseBackwardSm90Knobs
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.serving.loader import LoadedKernel
from tests.emulation.build import build
from tests.emulation.check import check

pytestmark = pytest.mark.build

MAINLOOP = "chunks_backward_sm90/mainloop.cuh"
PRODUCER = "chunks_backward_sm90/producer.cuh"
STATE = "sm90/scaled_state.cuh"
GAMMA = "chunks_backward_sm90/gamma.cuh"
MUTANTS = {
    "begins_before_what_is_ahead": (
        MAINLOOP,
        "if (arguments.first) wait_on_dependent_grids();\n  launch_dependent_grids();",
        "launch_dependent_grids(); if (arguments.first) wait_on_dependent_grids();",
    ),
    "walks_forward": (
        PRODUCER,
        "return (first + (T::kReversed ? count - 1 - index : index)) * T::kChunk;",
        "return (first + index) * T::kChunk;",
    ),
    "scores_of_other_sign": (
        "sm90/chunk_factors.cuh",
        "factors[i][e] = distance < 0 ? 0.0f : scale * exp2_approximate(log2_gamma * float(distance));",
        "factors[i][e] = distance > 0 ? 0.0f : scale * exp2_approximate(log2_gamma * float(distance));",
    ),
    "scores_not_fenced": (PRODUCER, "fence_view_async_shared();", ""),
    "state_not_decayed": (
        MAINLOOP,
        "this->scale_state(this->decay(this->length(index)));",
        "this->decay(this->length(index));",
    ),
    "factor_of_another_token": (
        PRODUCER,
        "output_factors().store_decays(log2_gamma, last);",
        "output_factors().store([this](int token, bool) { return power(float(T::kChunk - token)); });",
    ),
    "y_released_early": (
        MAINLOOP,
        "warpgroup_wait<1>();\n      fence_operands(tokens);",
        "this->release_own_y(index); warpgroup_wait<1>(); fence_operands(tokens);",
    ),
    "gamma_without_the_state": (
        GAMMA,
        "this->visit_state([source, whole](float& value, int offset) { value = whole * source[offset]; });",
        "",
    ),
    "scale_never_raised": (
        STATE,
        "if (__any_sync(0xffffffffu, !(sum < kMostSquares))) raise_scale();",
        "",
    ),
    "share_not_awaited": (
        MAINLOOP,
        "if (stores) tma_store_wait_read();\n    named_barrier(1, 2 * kWarpgroupThreads);",
        "if (stores) tma_store_wait_read();",
    ),
    "states_not_awaited": (
        "chunks_backward_sm90/state.cuh",
        "if (pass.first_slots > 1) wait_on_dependent_grids();",
        "",
    ),
    "share_left_out": (MAINLOOP, "sum[i] = kept[i] + taken.x;", "sum[i] = kept[i];"),
}
CAUGHT_IN_PARTS = [
    ("share_not_awaited", "eager", "race"),
    ("share_left_out", "eager", "dq: "),
    ("y_released_early", "eager", "races with the read of an MMA"),
]
CAUGHT = [
    ("begins_before_what_is_ahead", "lazy", "before the kernel ahead of it has ended"),
    ("walks_forward", "eager", "dk: "),
    ("scores_of_other_sign", "eager", "dq: "),
    ("scores_not_fenced", "eager", "without a fence"),
    ("state_not_decayed", "eager", "dq: "),
    ("factor_of_another_token", "eager", "dk: "),
    ("gamma_without_the_state", "eager", "dlog2_gamma: "),
    ("states_not_awaited", "lazy", "dq: "),
    ("y_released_early", "eager", "races with the read of an MMA"),
]
PLAIN = Problem(
    op="retention",
    direction="backward",
    causal=True,
    batch=1,
    heads_q=2,
    heads_kv=2,
    seqlen_q=200,
    seqlen_k=200,
    dim_qk=64,
    dim_v=64,
)
WAYS = (
    3  # to call a problem, which the verifier goes through by turns: plainly, with states and gamma
)
LONGER = replace(PLAIN, seqlen_q=300, seqlen_k=300)  # of several super-chunks, for gamma
IN_PARTS = replace(PLAIN, heads_q=1, heads_kv=1, dim_v=512)
GROUPED = replace(PLAIN, batch=2, heads_kv=1, seqlen_q=131, seqlen_k=131)


def candidate(problem: Problem = PLAIN, **knobs: Any) -> Candidate:
    return Candidate.of(problem, ChunkwiseBackwardSm90Knobs(**{"num_stages": 2, **knobs}))


@pytest.fixture(scope="module")
def emulated(builds: Path) -> LoadedKernel:
    return build(candidate(warpgroups=1), builds / "mutants", MUTANTS)


def test_gradients_are_right(emulated: LoadedKernel) -> None:
    """With states, the gradient of gamma, odd lengths and groups of heads, as the verifier calls them."""
    short = replace(PLAIN, seqlen_q=1, seqlen_k=1)
    problems = [problem for problem in (PLAIN, GROUPED, short) for _ in range(WAYS)]
    outcome = check(emulated, problems)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    ("dims", "knobs"),
    [
        ((64, 64), {"warpgroups": 1, "super_chunk": 128, "num_stages": 3}),
        ((128, 120), {"warpgroups": 2}),
        ((40, 136), {"warpgroups": 2, "num_stages": 2}),
        ((64, 512), {"warpgroups": 2, "super_chunk": 128}),
    ],
    ids=["super_chunks", "128x120", "40x136", "64x512"],
)
def test_other_gradients_are_right(
    builds: Path, dims: tuple[int, int], knobs: dict[str, Any]
) -> None:
    problem = replace(GROUPED, dtype="bf16", batch=1, dim_qk=dims[0], dim_v=dims[1])
    longer = replace(problem, heads_q=1, seqlen_q=300, seqlen_k=300)
    kernel = build(candidate(problem, **knobs), builds / f"{dims}{knobs}")
    outcome = check(kernel, [problem, longer, longer], [("lazy", 0), ("random", 1)])
    assert outcome.ok, outcome.reason


def large_states(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Gradients of states beyond fp16, though all gradients are within."""
    powers = {"q": 8, "dout": 8, "k": -8, "v": -8}
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
    problem = LONGER if mutant in ("gamma_without_the_state", "states_not_awaited") else PLAIN
    outcome = check(emulated, [problem] * WAYS, [(policy, 1)], mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))
    assert message in outcome.reason


@pytest.fixture(scope="module")
def in_parts(builds: Path) -> LoadedKernel:
    return build(candidate(IN_PARTS, warpgroups=2), builds / "in_parts", MUTANTS)


def cancelling_halves(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Halves of the depth that cancel to 1 in 64, which the parts must do in fp32."""
    tensors = dict(inputs.tensors)
    half = IN_PARTS.dim_v // 2
    for name in ("v", "dout"):
        tensors[name] = tensors[name].clone()
    tensors["dout"][..., half:] = tensors["dout"][..., :half]
    tensors["v"][..., half:] = -tensors["v"][..., :half] * (1 - 1 / 64)
    changed = replace(inputs, tensors=tensors)
    return changed, changed


def test_gradients_of_a_depth_in_parts_are_right(in_parts: LoadedKernel) -> None:
    grouped = replace(IN_PARTS, heads_q=2, seqlen_q=131, seqlen_k=131)
    outcome = check(in_parts, [problem for problem in (IN_PARTS, grouped) for _ in range(WAYS)])
    assert outcome.ok, outcome.reason
    outcome = check(in_parts, [IN_PARTS] * WAYS, [("eager", 0)], adjust=cancelling_halves)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(("mutant", "policy", "message"), CAUGHT_IN_PARTS)
def test_mistakes_in_parts_are_caught(
    in_parts: LoadedKernel, mutant: str, policy: str, message: str
) -> None:
    outcome = check(in_parts, [IN_PARTS] * WAYS, [(policy, 1)], mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))
    assert message in outcome.reason
