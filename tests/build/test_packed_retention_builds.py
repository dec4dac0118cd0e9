"""Kernels of packed retention: right on the emulated machine, through launch plans too, and the memory they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner.api.retention import checks as retention_checks
from attention_autotuner.api.retention import plan as retention_plan
from attention_autotuner.api.shared import launch
from attention_autotuner.arch import A100, naming
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_sm80.knobs import ChunkPass, ChunksKnobs
from attention_autotuner.kernels.registry import KERNELS, kernel_of
from attention_autotuner.operations.params import workspace_bytes
from attention_autotuner.operations.retention.packed import (
    retention_packed,
    retention_packed_backward,
)
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.reference import retention_chunkwise
from attention_autotuner.serving import dispatch
from attention_autotuner.serving.loader import LoadedKernel
from tests.emulation.build import build as emulated
from tests.emulation.build import configure
from tests.emulation.check import check
from tests.fake_kernels import CPU
from tests.gradients import forget_plans
from tests.numerics.packed_sequences import RETENTION, ends_of

pytestmark = pytest.mark.build

INLINE = ChunkPass(columns=32, column_warps=2, num_stages=2)
SHARED = replace(INLINE, depth_warps=2, scores="precomputed")
OUTPUTS = {
    "whole": ChunksKnobs(chunk=32, output=INLINE),
    "cut": ChunksKnobs(chunk=32, super_chunk=64, output=INLINE),
    "precomputed": ChunksKnobs(chunk=32, super_chunk=64, output=replace(SHARED, num_stages=1)),
}
GRADIENTS = {
    "gradients": ChunksKnobs(chunk=32, dq=INLINE, dk=INLINE, dv=INLINE),
    "cut_gradients": ChunksKnobs(chunk=32, super_chunk=64, dq=SHARED, dk=SHARED, dv=SHARED),
}
KNOBS = OUTPUTS | GRADIENTS
PLACES = "common/chunk_sequences.cuh"
MISTAKES = {
    "rows_behind_are_read": (
        "cut",
        PLACES,
        "return place.behind ? 0 : place.length;",
        "return place.length;",
    ),
    "blocks_overlap": (
        "cut",
        PLACES,
        "return tokens.divide(sequences.begin(sequence)) + sequence;",
        "return tokens.divide(sequences.begin(sequence));",
    ),
    "empty_sequences_have_no_block": (
        "whole",
        PLACES,
        "return tokens.divide(maximum(length - 1, 0)) + 1;",
        "return tokens.divide(length + tokens.divisor - 1);",
    ),
    "states_of_the_first_sequence": (
        "whole",
        PLACES,
        "return state * arguments.depth * arguments.columns;",
        "return (slots > 1 ? state : head) * arguments.depth * arguments.columns;",
    ),
    "scores_of_another_sequence": (
        "precomputed",
        PLACES,
        "return first_row / chunk + place.sequence;",
        "return first_row / chunk;",
    ),
    "last_state_not_summed": (
        "cut_gradients",
        "chunks_sm80/launch.cuh",
        "arguments.sums_last = last != nullptr;",
        "arguments.sums_last = false;",
    ),
}


def problem_of(knobs: str) -> Problem:
    return replace(RETENTION, direction="forward" if knobs in OUTPUTS else "backward")


@cache
def kernel_of_knobs(folder: Path, knobs: str) -> LoadedKernel:
    """A kernel with the mistakes that are in it, each of which waits to be asked for."""
    mistakes = {name: how[1:] for name, how in MISTAKES.items() if how[0] == knobs}
    made = Candidate.of(problem_of(knobs), KNOBS[knobs])
    return emulated(made, folder / "packed_retention" / knobs, mistakes)


def nothing_behind(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The inputs with rows behind the last sequence that no other may meet, and as they were."""
    tensors = dict(inputs.tensors)
    for name in {"q", "k", "v", "dout"} & set(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name][:, :, tensors["cu_seqlens"][-1] :] = float("nan")
    return replace(inputs, tensors=tensors), inputs


@pytest.mark.parametrize("knobs", KNOBS)
def test_kernels_are_right_on_the_emulated_machine(
    tmp_path_factory: pytest.TempPathFactory, knobs: str
) -> None:
    problem = problem_of(knobs)
    kernel = kernel_of_knobs(tmp_path_factory.getbasetemp(), knobs)
    # The way changes with the place: plainly, then with states, the gradient of gamma, and ragged lengths.
    small = replace(problem, heads_q=2, heads_kv=1)  # the problem itself has two groups
    alone = replace(small, packed_rows=(131, 131), batch=1, seqlen_q=131, seqlen_k=131)
    many = replace(small, batch=40, seqlen_q=30, seqlen_k=30)  # thought to be shorter than they are
    problems = [problem, problem, problem, alone, many]
    outcome = check(kernel, problems, [("lazy", 0), ("random", 1)], adjust=nothing_behind)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(tmp_path_factory: pytest.TempPathFactory, mistake: str) -> None:
    knobs = MISTAKES[mistake][0]
    kernel = kernel_of_knobs(tmp_path_factory.getbasetemp(), knobs)
    problems = [problem_of(knobs)] * 3
    outcome = check(kernel, problems, [("lazy", 1)], mutant=mistake, adjust=nothing_behind)
    assert outcome.kind in ("wrong", "leaked", "launch_failed"), outcome


def test_calls_reach_the_kernels(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch plans fill in the params, of the forward and the backward, and lengths change without a new plan."""
    folder, asked = tmp_path_factory.getbasetemp(), []
    kernels = {
        name: kernel_of_knobs(folder, knobs)
        for name, knobs in (("forward", "cut"), ("backward", "cut_gradients"))
    }

    def kernel_for(problem: Problem, *arguments: Any, **named: Any) -> LoadedKernel:
        asked.append(problem)
        return kernels[problem.direction]

    class OnTheHost(launch.Launch):
        __slots__ = ()

        def __init__(self, *arguments: Any, index: int, **named: Any) -> None:
            super().__init__(*arguments, index=0, **named)

    for place, name, stand_in in (
        (launch, "Launch", OnTheHost),
        (launch, "current_device", lambda: CPU),
        (launch, "current_stream", lambda device: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (dispatch, "kernel_for", kernel_for),
        (naming, "policy_named", lambda name, device: name),
    ):
        function: Callable[..., Any] = stand_in
        monkeypatch.setattr(place, name, function)
    for kernel in kernels.values():
        configure(kernel)  # without the mistake that a test before this one left on
        kernel.prepare(0)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 300, 32), (1, 2, 300, 32), (1, 2, 300, 48))
    q, k, v = (torch.randn(shape, generator=generator).half() for shape in shapes)
    state, dstate = torch.randn((2, 3, 4, 32, 48), generator=generator)
    dout = torch.randn((1, 4, 300, 48), generator=generator).half()
    gamma = (0.9, 0.5, 0.99, 1.0)
    decays = torch.tensor(gamma, dtype=torch.float64)
    forget_plans()
    for lengths in ([100, 0, 200], [1, 270, 9]):
        ends = ends_of(lengths)
        packing: Any = (ends, 256)
        named = {"cu_seqlens": ends, "initial_state": state}
        call = retention_checks.Forward(
            q, k, v, None, gamma, state, None, "auto", "", True, *packing
        )
        results = retention_plan.retention_forward(call)
        for ours, theirs in zip(
            results, retention_packed(retention_chunkwise, q, k, v, decays, **named), strict=True
        ):
            assert ours is not None
            torch.testing.assert_close(ours.float(), theirs, atol=0.03, rtol=0.02)
        backward = retention_checks.Backward(
            dout, dstate, q, k, v, None, gamma, state, None, "", True, True, *packing
        )
        gradients = retention_plan.retention_backward(backward)
        *exact, dgamma = retention_packed_backward(
            dout, dstate, q, k, v, decays, need_dgamma=True, **named
        )
        assert dgamma is not None
        exact.append(dgamma * decays * torch.log(torch.tensor(2.0)))
        for ours, theirs in zip(gradients, exact, strict=True):
            assert ours is not None
            atol = 0.01 * float(theirs.abs().max())
            torch.testing.assert_close(ours.float(), theirs.float(), atol=atol, rtol=0.02)
    forget_plans()
    assert [(x.batch, x.seqlen_q, x.packed_rows) for x in asked] == [(3, 256, (300, 300))] * 2


def test_kernels_build_and_say_their_workspace(kernel_store: Store) -> None:
    base = replace(RETENTION, dim_qk=64, dim_v=128)  # wider ones take longer to compile
    small = replace(base, dim_qk=32, dim_v=64)
    chunks, spec = KERNELS["chunks_sm80"], A100().spec
    problems = [
        replace(of, direction=way) for of in (base, small) for way in ("forward", "backward")
    ]
    made = []
    for problem in problems:
        knobs: Any = chunks.default(problem, spec)
        # The default's super-chunks are longer than most sequences.
        if problem.dim_qk == small.dim_qk:
            knobs = replace(knobs, super_chunk=128)
        made.append(Candidate.of(problem, knobs))
    results = build(
        [render(candidate) for candidate in made],
        BuildTarget(arch="80", ptx=False),
        toolchain=find_toolchain(),
        store=kernel_store,
    )
    for problem, candidate, artifact in zip(problems, made, results, strict=True):
        assert isinstance(artifact, Artifact), artifact
        assert artifact.report.stack_bytes <= 64, artifact.report  # of arguments, 400 bytes
        uneven = replace(problem, batch=300, seqlen_q=5000, seqlen_k=5000, packed_rows=(9999, 9999))
        for shape in (problem, uneven, replace(uneven, heads_kv=4)):
            expected = kernel_of(candidate).workspace_bytes(shape, candidate)
            assert workspace_bytes(shape, artifact.path) == expected
