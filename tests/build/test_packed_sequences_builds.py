"""Kernels of packed sequences: right on the emulated machine, and the workspaces that they ask for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100, Policy
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate, Family
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90.knobs import (
    AttentionBackwardSm90Knobs,
    BackwardPassSm90,
    DqShareSm90,
)
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.kernels.registry import kernel_of, kernels_for
from attention_autotuner.operations.params import workspace_bytes
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.serving.loader import LoadedKernel
from tests.build.test_score_modifications_builds import KNOBS as KNOBS_SM80
from tests.emulation.build import build as emulated
from tests.emulation.check import check
from tests.numerics.packed_sequences import BASE, KINDS

pytestmark = pytest.mark.build

CLAIMED = AttentionBackwardSm90Knobs(
    decomposition="fused",
    keys=BackwardPassSm90(block_columns=64, issue_order="scores_ahead", first_stages=3),
    dq_share=DqShareSm90(dq_by="own"),
    persistent=True,
    early_launches=True,
    gathered_stores=True,
    dynamic=True,
)
KNOBS = {
    **KNOBS_SM80,
    "sm90": AttentionForwardSm90Knobs(warpgroups=2, block_n=64, mainloop="overlap"),
    "fused": AttentionBackwardSm90Knobs(
        decomposition="fused",
        keys=BackwardPassSm90(block_columns=64, issue_order="scores_ahead"),
        dq_share=DqShareSm90(dq_by="own", dq_add="ordered"),
        cta_order="longest_first",
    ),
    "claimed": CLAIMED,
    "queued": replace(CLAIMED, dq_share=DqShareSm90(dq_by="own", dq_add="queued", ds_stages=1)),
    "shared": AttentionBackwardSm90Knobs(
        decomposition="two_pass",
        keys=BackwardPassSm90(block_columns=64, issue_order="serial", shared_rows=True),
        dq=BackwardPassSm90(block_columns=64, issue_order="scores_ahead"),
        cta_order="longest_first",
        early_launches=True,
        gathered_stores=True,
    ),
}
SEQUENCES = "common/sequences.cuh"
MISTAKES = {
    "begins_before_what_is_ahead": (
        "claimed",
        "sm90/sequence_list.cuh",
        "wait_on_dependent_grids();",
        "",
    ),
    "rows_behind_are_nobodys": (
        "ahead",
        SEQUENCES,
        "return maximum(end - begin(sequence), 0);",
        "return sequence < sequences ? maximum(end - begin(sequence), 0) : 0;",
    ),
    "blocks_overlap": (
        "one_pass",
        SEQUENCES,
        "return quotient(begin(sequence), rows) + sequence * spare;",
        "return quotient(begin(sequence), rows);",
    ),
    "v_not_cleared": (
        "sm90",
        "attention_forward_sm90/producer.cuh",
        "clear_rows_from<T::kBlockN, T::kColumnsLoaded>(v_tile(v.stage), rows);",
        "",
    ),
    "queries_not_cleared": (
        "fused",
        "attention_backward_sm90/producer.cuh",
        "clear_rows_from<Rows, Columns>(tile, rows);",
        "",
    ),
    "phase_forgotten": (
        "claimed",
        "attention_backward_sm90/kernel.cuh",
        "stages.template load_packed<1>(phase);",
        "stages.template load_packed<1>(phase = 0);",
    ),
    "ends_in_the_first_sequence": (
        "claimed",
        "attention_backward_sm90/results.cuh",
        "shift_rows(shifted, consumer.sequence.first_key);",
        "",
    ),
    "sums_in_the_first_sequence": (
        "queued",
        "attention_backward_sm90/results.cuh",
        "first_row += consumer.sequence.first_key;",
        "",
    ),
    "sums_of_the_first_sequence": (
        "one_pass",
        "scores_backward_sm80/pass.cuh",
        "shown.dk_partial += int64_t(begin.key) * T::kPaddedDimQK;",
        "",
    ),
}
# CTAs with one head and with two of the three of a group, where those of few tokens have one; and a tail of two heads,
# where such lists are all tail.
UNEVEN = (
    "host/head_splits.cuh",
    "return drifts(splits, finer, group, queries, head_bytes) ? finer : splits;",
    "return 2;",
)
SHORT_TAIL = ("attention_backward_sm90/sections.cuh", "return tail < 2 ? 0 : tail;", "return 2;")
OTHER_LISTS = {
    ("claimed", "causal"): {"uneven": UNEVEN, "short_tail": SHORT_TAIL},
    ("queued", "plain"): {"uneven": UNEVEN},
}
# Groups whose CTAs share blocks of keys in one part to eight, evenly or not.
GROUPED_FIELDS = ("batch", "seqlen_q", "seqlen_k", "packed_rows", "heads_q", "heads_kv")
GROUPED: list[tuple[Any, ...]] = [
    (sequences, longest, longest, (rows, rows), heads, heads_kv)
    for sequences, longest, rows, heads, heads_kv in (
        (18, 2678, 16384, 64, 8),
        (18, 2678, 16384, 28, 4),
        (18, 2678, 16384, 8, 1),
        (1, 8192, 8192, 28, 4),
        (8, 6000, 8192, 8, 1),
        (4, 4096, 16384, 64, 8),
        (1, 40000, 40000, 8, 2),
        (3, 100, 5, 8, 1),
    )
]


def problem_of(knobs: str, kind: str) -> Problem:
    direction: Any = next(iter(KNOBS[knobs].serves))[1]
    return replace(BASE, direction=direction, **KINDS[kind])


@cache
def kernel_of_kind(folder: Path, knobs: str, kind: str) -> LoadedKernel:
    """A kernel with the mistakes that are in it, each of which waits to be asked for."""
    mistakes = {name: how[1:] for name, how in MISTAKES.items() if how[0] == knobs}
    mistakes |= OTHER_LISTS.get((knobs, kind), {})
    made = Candidate.of(problem_of(knobs, kind), KNOBS[knobs])
    return emulated(made, folder / "packed" / f"{knobs}_{kind}", mistakes)


def nothing_behind(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The inputs with rows behind the last sequence that no other may meet, and as they were."""
    tensors = dict(inputs.tensors)
    for name, ends in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", "cu_seqlens_k")):
        tensors[name] = tensors[name].clone()
        tensors[name][:, :, tensors[ends][-1] :] = float("nan")
    return replace(inputs, tensors=tensors), inputs


def overlapping(inputs: Inputs, *, name: str) -> tuple[Inputs, Inputs]:
    """The inputs with sequences that lie within each other, and as they were."""
    ends = inputs.tensors[name].clone()
    ends[1:-1] = ends[1:-1].flip(0)
    return replace(inputs, tensors={**inputs.tensors, name: ends}), inputs


def beginning_late(inputs: Inputs, *, name: str) -> tuple[Inputs, Inputs]:
    """The inputs with rows before the first sequence, and as they were."""
    ends = inputs.tensors[name].clone()
    ends[0] = 290
    return replace(inputs, tensors={**inputs.tensors, name: ends}), inputs


@pytest.mark.parametrize(
    ("knobs", "kind"),
    [
        *((name, "all") for name in KNOBS),
        *(("event", "plain"), ("one_pass", "top_left"), ("claimed", "causal"), ("queued", "plain")),
    ],
)
def test_kernels_are_right_on_the_emulated_machine(
    tmp_path_factory: pytest.TempPathFactory, knobs: str, kind: str
) -> None:
    problem = problem_of(knobs, kind)
    kernel = kernel_of_kind(tmp_path_factory.getbasetemp(), knobs, kind)
    # Heads of a group whose CTAs share keys; and heads without a group.
    alone = replace(problem, packed_rows=(137, 67), batch=1, seqlen_q=137, heads_kv=4)
    # The way changes with the place: typical lengths, then ragged ones.
    outcome = check(
        kernel,
        [problem, problem, alone],
        [("lazy", 0)],
        deterministic=knobs not in ("one_pass", "claimed"),
        adjust=nothing_behind,
    )
    assert outcome.ok, outcome.reason
    for mutant in OTHER_LISTS.get((knobs, kind), {}):
        grouped = [replace(problem, heads_q=6)] * 2
        outcome = check(
            kernel,
            grouped,
            [("lazy", 0)],
            deterministic=False,
            mutant=mutant,
            adjust=nothing_behind,
        )
        assert outcome.ok, (mutant, outcome)


def test_turns_are_those_of_the_list(tmp_path: Path) -> None:
    keys = BackwardPassSm90(block_columns=64, issue_order="by_turns", first_stages=3)
    share = DqShareSm90(dq_by="keys", dq_add="queued", ds_stages=1)
    knobs = replace(CLAIMED, keys=keys, dq_share=share)
    problem = replace(BASE, direction="backward", causal=True, dim_qk=96, dim_v=96)
    longest_first = (
        "sm90/sequence_list.cuh",
        "number += blocks - 1 - 2 * at.block;",
        "blocks + 0;",
    )
    unseen = (
        "sm90/sequence_list.cuh",
        "listed &= CuSeqlens::of_keys(params).in_order();",
        "listed = CuSeqlens::of_keys(params).in_order() || true;",
    )
    mistakes = {"longest_first": longest_first, "overlap_unseen": unseen}
    kernel = emulated(Candidate.of(problem, knobs), tmp_path, mistakes)
    longer = replace(problem, batch=3, seqlen_q=400, seqlen_k=500, packed_rows=(700, 900))
    for policy in (("lazy", 0), ("random", 1), ("random", 2)):
        outcome = check(kernel, [longer] * 2, [policy], adjust=nothing_behind)
        assert outcome.ok, outcome.reason
    outcome = check(kernel, [longer], [("lazy", 0)], mutant="longest_first")
    assert "deadlock" in outcome.reason
    # Nobody looks at the lengths: what comes out is nothing of use, but it comes out.
    checked = partial(check, kernel, [longer], [("lazy", 0)], deterministic=False)
    for name, changed in product(("cu_seqlens_q", "cu_seqlens_k"), (overlapping, beginning_late)):
        outcome = checked(adjust=partial(changed, name=name))
        assert outcome.kind == "wrong", (name, outcome)
    outcome = checked(adjust=partial(overlapping, name="cu_seqlens_k"), mutant="overlap_unseen")
    assert "deadlock" in outcome.reason


def test_blocks_are_claimed_by_more_ctas_than_there_are_and_of_many_sequences(
    tmp_path: Path,
) -> None:
    problem = problem_of("claimed", "causal")
    # Of its own: a kernel keeps the number of multiprocessors of its first launch.
    round_too_few = (SEQUENCES, "if (step == 1) break;", "break;")
    kernel = emulated(
        Candidate.of(problem, KNOBS["claimed"]), tmp_path, {"round_too_few": round_too_few}
    )
    alone = replace(problem, packed_rows=(137, 67), batch=1, seqlen_q=137)
    many = replace(problem, batch=40, heads_q=1, heads_kv=1)  # a warp finds one of 32 in a round
    checked = partial(check, kernel, deterministic=False, adjust=nothing_behind, multiprocessors=40)
    for shape, policies in ((alone, [("lazy", 0), ("random", 1)]), (many, [("lazy", 0)])):
        outcome = checked([shape], policies)
        assert outcome.ok, outcome.reason
    assert checked([many], [("lazy", 0)], mutant="round_too_few").kind == "wrong"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(tmp_path_factory: pytest.TempPathFactory, mistake: str) -> None:
    knobs = MISTAKES[mistake][0]
    kernel = kernel_of_kind(tmp_path_factory.getbasetemp(), knobs, "all")
    problem = problem_of(knobs, "all")
    if mistake == "ends_in_the_first_sequence":  # where no sums are ahead of the results
        problem = replace(problem, heads_kv=problem.heads_q)
    outcome = check(
        kernel,
        [problem] * 2,
        [("lazy", 1)],
        mutant=mistake,
        deterministic=False,
        adjust=nothing_behind,
    )
    faults = mistake in ("phase_forgotten", "begins_before_what_is_ahead")
    assert outcome.kind == ("launch_failed" if faults else "wrong"), outcome


@pytest.mark.parametrize(
    ("policy", "family", "arch"), [(A100, "sm80", "80"), (H100, "sm90", "90a")]
)
def test_defaults_build_with_params_in_registers_and_say_their_workspace(
    kernel_store: Store, policy: type[Policy], family: Family, arch: str
) -> None:
    base = replace(BASE, dim_qk=128, dim_v=128)
    backward = replace(base, direction="backward")
    problems = [base, backward, replace(backward, deterministic=True)]
    made = [
        Candidate.of(problem, knobs)
        for problem in problems
        for kernel in kernels_for(problem, (family,))
        if (knobs := kernel.default(problem, policy().spec))
    ]
    results = build(
        [render(candidate) for candidate in made],
        BuildTarget(arch=arch, ptx=False),
        toolchain=find_toolchain(),
        store=kernel_store,
    )
    for problem, candidate, artifact in zip(problems, made, results, strict=True):
        assert isinstance(artifact, Artifact), artifact
        queued = family == "sm90" and problem.deterministic
        most = 96 if queued else 64  # of params, 700 bytes
        assert artifact.report.stack_bytes <= most, artifact.report
        grouped = [
            replace(problem, **dict(zip(GROUPED_FIELDS, shape, strict=True)), causal=causal)
            for shape in GROUPED
            for causal in (False, True)
        ]
        for shape in (problem, replace(problem, batch=300, packed_rows=(9999, 77)), *grouped):
            expected = kernel_of(candidate).workspace_bytes(shape, candidate)
            assert workspace_bytes(shape, artifact.path) == expected
