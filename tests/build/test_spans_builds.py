"""Documents and prefixes: kernels of both families are right on the emulated machine, and say their workspaces.

The search of documents, by all threads of a CTA, and the turns of warpgroups meet documents of many lengths.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.operations.attention import modified_inputs
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
        "span = {maximum(span.x, document.x), minimum(span.y, document.y)};",
        "",
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
        "if constexpr (!T::kPacked) wait_on_dependent_grids();",
        "",
    ),
    "pass_begins_beside_spans": (
        "claimed",
        "attention_backward_sm90/dq_share.cuh",
        "if constexpr (!kPreprocessBegins<Config>) wait_on_dependent_grids();",
        "",
    ),
    "begins_before_what_is_ahead": ("claimed", SPANS, "begin_call();", "launch_dependent_grids();"),
    "prefix_of_queries_alone": (
        "one_pass",
        SPANS,
        "if (p.prefix_lens != nullptr && key < p.prefix_lens[batch]) span.x = 0;",
        "",
    ),
}


MAINLOOP = "attention_forward_sm90/mainloop.cuh"
ROWS = "attention_forward_sm90/rows.cuh"
MISTAKES_OF_SEARCH = {
    "sides_confused": (SPANS, "before.narrow(sum & 0xffff);", "before.narrow(sum >> 16);"),
    "narrowed_too_far": (
        SPANS,
        "if (passed < kProbes) high = minimum(high, low + step - 1);",
        "if (passed < kProbes) high = minimum(high, low + step - 2);",
    ),
    "begin_of_a_warp": (
        SPANS,
        "if (up_to != 0) document.x = rows.begin + 32 * i + 31 - __clz(int(up_to));",
        "if (up_to != 0) document.x = rows.begin + 32 * i;",
    ),
    "first_row_of_a_warp_left_out": (
        SPANS,
        "shared[warp] = int(begins);",
        "shared[warp] = int(begins & ~1u);",
    ),
    "turns_of_other_tiles": (
        MAINLOOP,
        "if constexpr (T::kModified) skip_k_and_v(Base::rest, first_key_tile() - 1);",
        "if constexpr (T::kModified) skip_k_and_v(Base::rest, first_key_tile() + 1);",
    ),
    "turns_while_alone": (
        ROWS,
        "turns_end = minimum(tiles.end, key_tiles(range, query_of(tile, kWarpgroupRows - 1) + 1)) - 1;",
        "turns_end = tiles.first + steps - 1;",
    ),
}
# Rows of several CTAs, and of two rounds: 640 - 128 > 256. The window keeps tiles few.
LONG: dict[str, Any] = {
    "batch": 1,
    "heads_q": 1,
    "heads_kv": 1,
    "seqlen_q": 640,
    "seqlen_k": 640,
    "causal": True,
    "window_size": (250, -1),
}
LENGTHS = ((640,), (160, 480), (1, 127, 1, 1, 127, 300, 3, 80), (1,) * 640)


def problem_of(knobs: str, kind: str) -> Problem:
    direction: Any = next(iter(KNOBS[knobs].serves))[1]
    dim = 32 if knobs in KNOBS_SM80 else 64
    return replace(BASE, direction=direction, dim_qk=dim, dim_v=dim, **KINDS[kind])


@cache
def kernel_of_kind(folder: Path, knobs: str, kind: str) -> LoadedKernel:
    """A kernel with the mistakes that are in it, each of which waits to be asked for."""
    mistakes = {name: how[1:] for name, how in MISTAKES.items() if how[0] == knobs}
    if knobs == "turns":
        mistakes |= MISTAKES_OF_SEARCH
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
    early = mistake == "begins_before_what_is_ahead"
    assert outcome.kind == ("launch_failed" if early else "wrong"), outcome


@pytest.mark.parametrize("knobs", ["turns", "claimed"])
def test_documents_of_any_lengths(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, knobs: str
) -> None:
    kernel = kernel_of_kind(tmp_path_factory.getbasetemp(), knobs, "documents")
    problem = replace(problem_of(knobs, "documents"), **LONG)

    def outcome_of(lengths: tuple[int, ...], mutant: str = "") -> Outcome:
        # Ids with gaps, negative ones at first.
        ids = torch.repeat_interleave(3 * torch.arange(len(lengths)) - 4, torch.tensor(lengths))
        monkeypatch.setattr(modified_inputs, "_document_ids", lambda *_, **__: ids.int()[None])
        return check(kernel, [problem], [("random", 1)], deterministic=False, mutant=mutant)

    for lengths in LENGTHS:
        outcome = outcome_of(lengths)
        assert outcome.ok, (lengths, outcome)
    for name in MISTAKES_OF_SEARCH if knobs == "turns" else ():
        assert not all(outcome_of(lengths, name).ok for lengths in LENGTHS[:3]), name
