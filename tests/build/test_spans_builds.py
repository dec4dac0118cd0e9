"""Documents and prefixes: kernels of both families are right on the emulated machine, and say their workspaces."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.operations.params import workspace_bytes
from attention_autotuner.serving.loader import LoadedKernel
from tests.build.test_score_modifications_builds import KNOBS as KNOBS_SM80
from tests.build.test_wgmma_modifications_builds import KNOBS as KNOBS_SM90
from tests.emulation.build import build as emulated
from tests.emulation.check import check
from tests.numerics.spans import BASE, KINDS

pytestmark = pytest.mark.build

FUSED = KNOBS_SM90["fused"]
BULK = replace(FUSED, dq_share=replace(FUSED.dq_share, dq_add="bulk"))
CLAIMED = replace(
    BULK,
    keys=replace(FUSED.keys, issue_order="interleaved", held_rows=True),
    dq_share=replace(FUSED.dq_share, dq_add="stored"),
    persistent=True,
    early_launches=True,
    gathered_stores=True,
    dynamic=True,
)
KNOBS: dict[str, Any] = {**KNOBS_SM80, **KNOBS_SM90, "fused": BULK, "claimed": CLAIMED}
NOT_DETERMINISTIC = ("one_pass", "fused", "claimed")
DOCUMENTS = ("event", "shared_rows", "three_kernels", "exact_flat", "turns", "strict", "claimed")
CASES = [
    *((name, "documents") for name in DOCUMENTS),
    *((name, "both") for name in ("ahead", "one_pass", "overlap", "stream", "fused", "two_pass")),
    ("shared", "both"),
    *((name, "prefix") for name in ("event", "three_kernels", "overlap", "fused")),
    ("event", "bounded"),
    ("overlap", "bounded"),
]
SPANS = "common/spans.cuh"
MISTAKES = {
    "documents_mixed": (
        "event",
        SPANS,
        "if (p.document_ids == nullptr) return span;",
        "return span;",
    ),
    "spans_of_another_entry": (
        "two_pass",
        "attention_backward_sm90/producer.cuh",
        "shown.params.key_spans = p.key_spans + int64_t(entry) * p.seqlen_k;",
        "shown.params.key_spans = p.key_spans;",
    ),
    "spans_not_awaited": (
        "overlap",
        "attention_forward_sm90/kernel.cuh",
        "if constexpr (T::kSpanned) wait_on_dependent_grids();",
        "",
    ),
    "pass_begins_beside_spans": (
        "claimed",
        "attention_backward_sm90/dq_share.cuh",
        "if constexpr (ScoreModsOf<Config>::kListed) wait_on_dependent_grids();",
        "",
    ),
    "prefix_of_queries_alone": (
        "one_pass",
        SPANS,
        "if (p.prefix_lens != nullptr && key < p.prefix_lens[batch]) span.x = 0;",
        "",
    ),
}


def problem_of(knobs: str, kind: str) -> Problem:
    direction: Any = next(iter(KNOBS[knobs].serves))[1]
    dim = 32 if knobs in KNOBS_SM80 else 64
    return replace(BASE, direction=direction, dim_qk=dim, dim_v=dim, **KINDS[kind])


@cache
def kernel_of_kind(folder: Path, knobs: str, kind: str) -> LoadedKernel:
    """A kernel with the mistakes that are in it, each of which waits to be asked for."""
    mistakes = {name: how[1:] for name, how in MISTAKES.items() if how[0] == knobs}
    made = Candidate.of(problem_of(knobs, kind), KNOBS[knobs])
    kernel = emulated(made, folder / "spans" / f"{knobs}_{kind}", mistakes)
    if getattr(made.knobs, "split_kv", False):
        kernel = kernel.with_launch_knobs({"splits": 3})
    return kernel


@pytest.mark.parametrize(("knobs", "kind"), CASES)
def test_kernels_are_right_on_the_emulated_machine(
    tmp_path_factory: pytest.TempPathFactory, knobs: str, kind: str
) -> None:
    problem = problem_of(knobs, kind)
    kernel = kernel_of_kind(tmp_path_factory.getbasetemp(), knobs, kind)
    problems = [problem] * 2  # the way changes with the place: typical spans, then ragged ones
    if kind == "prefix":
        problems = [replace(problem, seqlen_q=150), replace(problem, seqlen_k=90)]
    if kind == "documents":
        problems[1] = replace(problem, causal=True, window_size=(70, -1), batch=3)
    made = Candidate.of(problem, KNOBS[knobs])
    assert kernel.info.name == made.name
    of_splits = getattr(made.knobs, "split_kv", False)
    if not of_splits:
        expected = kernel_of(made).workspace_bytes(problem, made)
        assert workspace_bytes(problem, kernel.path) == expected
    outcome = check(kernel, problems, [("random", 1)], deterministic=knobs not in NOT_DETERMINISTIC)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(tmp_path_factory: pytest.TempPathFactory, mistake: str) -> None:
    knobs = MISTAKES[mistake][0]
    kernel = kernel_of_kind(tmp_path_factory.getbasetemp(), knobs, "both")
    outcome = check(
        kernel, [problem_of(knobs, "both")] * 2, [("lazy", 0)], mutant=mistake, deterministic=False
    )
    assert outcome.kind == "wrong", outcome
