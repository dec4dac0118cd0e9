"""Kernels of packed sequences, family sm80: right on the emulated machine, and the workspaces that they ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attention_autotuner.arch import A100
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.kernels.scores_backward_sm80.knobs import BackwardKnobs
from attention_autotuner.operations.params import workspace_bytes
from tests.build.test_score_modifications_builds import KNOBS
from tests.emulation.build import build as emulated
from tests.emulation.check import check
from tests.numerics.packed_sequences import BASE, KINDS

pytestmark = pytest.mark.build

SEQUENCES = "common/sequences.cuh"
MISTAKES = {
    "rows_behind_are_nobodys": (
        "ahead",
        SEQUENCES,
        "return maximum(end - begin(sequence), 0);",
        "return sequence < sequences ? maximum(end - begin(sequence), 0) : 0;",
    ),
    "blocks_overlap": (
        "one_pass",
        SEQUENCES,
        "return begin(sequence) / Block + sequence * Spare;",
        "return begin(sequence) / Block;",
    ),
}


def problem_of(knobs: str, kind: str) -> Problem:
    direction: Any = "backward" if isinstance(KNOBS[knobs], BackwardKnobs) else "forward"
    return replace(BASE, direction=direction, **KINDS[kind])


@pytest.mark.parametrize(
    ("knobs", "kind"),
    [*((name, "all") for name in KNOBS), ("event", "plain"), ("one_pass", "top_left")],
)
def test_kernels_are_right_on_the_emulated_machine(
    tmp_path_factory: pytest.TempPathFactory, knobs: str, kind: str
) -> None:
    problem = problem_of(knobs, kind)
    folder = tmp_path_factory.getbasetemp() / "packed" / f"{knobs}_{kind}"
    kernel = emulated(Candidate.of(problem, KNOBS[knobs]), folder)
    alone = replace(problem, packed_rows=(137, 67), batch=1, seqlen_q=137)
    shapes = [
        problem,
        problem,
        alone,
    ]  # the way changes with the place: typical lengths, then ragged ones
    outcome = check(kernel, shapes, [("lazy", 0)], deterministic=knobs != "one_pass")
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(tmp_path_factory: pytest.TempPathFactory, mistake: str) -> None:
    knobs, header, before, after = MISTAKES[mistake]
    problem = problem_of(knobs, "causal")
    folder = tmp_path_factory.getbasetemp() / "packed" / mistake
    kernel = emulated(
        Candidate.of(problem, KNOBS[knobs]), folder, {mistake: (header, before, after)}
    )
    outcome = check(kernel, [problem] * 2, [("lazy", 1)], mutant=mistake, deterministic=False)
    assert outcome.kind == "wrong", outcome


def test_defaults_build_with_params_in_registers_and_say_their_workspace(
    kernel_store: Store,
) -> None:
    base = replace(BASE, dim_qk=128, dim_v=128)
    backward = replace(base, direction="backward")
    problems = [base, backward, replace(backward, deterministic=True)]
    made = [A100().default(problem) for problem in problems]
    results = build(
        [render(candidate) for candidate in made],
        BuildTarget(arch="80", ptx=False),
        toolchain=find_toolchain(),
        store=kernel_store,
    )
    for problem, candidate, artifact in zip(problems, made, results, strict=True):
        assert isinstance(artifact, Artifact), artifact
        assert artifact.report.stack_bytes <= 64, artifact.report  # of params, 700 bytes
        for shape in (problem, replace(problem, batch=300, packed_rows=(9999, 77))):
            expected = kernel_of(candidate).workspace_bytes(shape, candidate)
            assert workspace_bytes(shape, artifact.path) == expected
