"""Score modifications of family sm90's attention: right on the emulated machine, and built without spills."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90.knobs import (
    AttentionBackwardSm90Knobs,
    BackwardPassSm90,
    DqShareSm90,
)
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.operations.attention import modified_inputs
from tests.emulation.build import build as emulated
from tests.emulation.check import check, scaled
from tests.numerics.score_modifications import KINDS

pytestmark = pytest.mark.build

BASE = Problem(batch=1, heads_q=4, heads_kv=2, seqlen_q=203, seqlen_k=301, dim_qk=64, dim_v=64)
PAIR_OF_HEADS = {"heads_q": 2, "heads_kv": 1}
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {**PAIR_OF_HEADS, "causal": True, "seqlen_q": 231, "seqlen_k": 103},  # rows that see no key
    {**PAIR_OF_HEADS, "causal": True, "causal_alignment": "top_left", "seqlen_k": 140},
    {**PAIR_OF_HEADS, "seqlen_q": 5},
)
IN_BLOCKS: tuple[dict[str, Any], ...] = (  # of eight keys of a mask
    {"seqlen_k": 304},
    {**PAIR_OF_HEADS, "causal": True, "seqlen_q": 77, "seqlen_k": 88},
)
FORWARD = AttentionForwardSm90Knobs(warpgroups=2, block_n=64, mainloop="overlap")
STREAM = replace(
    FORWARD, q_stages=1, output="direct", schedule="static", pack_gqa=True, split_kv=True
)
KEYS = BackwardPassSm90(block_columns=64, issue_order="both_ahead", first_stages=3)
FUSED = AttentionBackwardSm90Knobs(
    decomposition="fused", keys=KEYS, dq_share=DqShareSm90(dq_by="own", dq_add="ordered")
)
TWO = AttentionBackwardSm90Knobs(
    decomposition="two_pass",
    keys=replace(KEYS, issue_order="scores_ahead"),
    dq=KEYS,
    gathered_stores=True,
)
SHARED = replace(
    TWO, keys=BackwardPassSm90(block_columns=48, issue_order="both_ahead", shared_rows=True)
)
CLAIMED = replace(
    FUSED,
    keys=replace(KEYS, issue_order="interleaved", held_rows=True),
    dq_share=DqShareSm90(dq_by="own", dq_add="stored", ds_stages=1),
    persistent=True,
    early_launches=True,
    gathered_stores=True,
    dynamic=True,
)
OF_KEYS = DqShareSm90(dq_by="keys", dq_add="stored", ds_stages=1)  # dQ, by the keys' warpgroups
CLAIMED_TURNS = replace(
    CLAIMED,
    keys=BackwardPassSm90(block_columns=80, issue_order="by_turns", first_stages=3),
    dq_share=OF_KEYS,
)
CLAIMED_AHEAD = replace(
    CLAIMED,
    keys=BackwardPassSm90(block_columns=64, issue_order="scores_ahead", first_stages=3),
    dq_share=replace(OF_KEYS, dq_add="bulk", ds_stages=2),
)
KNOBS: dict[str, Any] = {
    "overlap": FORWARD,
    "exact_flat": replace(FORWARD, mainloop="overlap_flat", optimistic=False),
    "turns": replace(FORWARD, warpgroups=3, mainloop="scores_first", ping_pong=True),
    "strict": replace(FORWARD, mainloop="strict", q_stages=1),
    "stream": STREAM,
    "fused": FUSED,
    "claimed": CLAIMED,
    "claimed_turns": CLAIMED_TURNS,
    "claimed_ahead": CLAIMED_AHEAD,
    "two_pass": TWO,
    "shared": SHARED,
}
BACKWARD = ("fused", "claimed", "claimed_turns", "claimed_ahead", "two_pass", "shared")
PAIR: dict[str, Any] = {"modifications": ("alibi_slopes", "sinks"), "window_size": (90, 20)}
WINDOWED = {"modifications": ("bias_table",), "window_size": (60, 0)}
MASKED = {**KINDS["mask"], "modifications": ("alibi_slopes", "attn_mask", "sinks")}
CAPPED = {**WINDOWED, "modifications": ("softcap", "bias_table")}
WIDE = {"dim_qk": 128, "dim_v": 128}  # as passes by turns are
VALUES = {
    **KINDS,
    "pair": PAIR,
    "masked": MASKED,
    "window_and_bias": WINDOWED,
    "capped_window_and_bias": CAPPED,
    "wide_sinks": WIDE | KINDS["sinks"],
    "wide_bent": WIDE | KINDS["bent"],
}
CASES = [
    *(("overlap", kind) for kind in ("window", "softcap", "alibi", "sinks")),
    *(
        (name, "bent")
        for name in ("exact_flat", "turns", "strict", "stream", "fused", "two_pass", "shared")
    ),
    *((name, "pair") for name in ("turns", "stream", "fused", "two_pass")),
    *((name, "bias") for name in ("turns", "two_pass", "claimed")),
    *(("claimed", kind) for kind in ("pair", "bent")),
    *(("claimed_turns", "wide_sinks"), ("claimed_ahead", "wide_bent")),
    *((name, "mask") for name in ("overlap", "turns", "strict", "stream", "claimed", "shared")),
    *((name, "masked") for name in ("exact_flat", "fused", "two_pass")),
    *((name, "biased") for name in ("exact_flat", "stream", "fused", "shared")),
]
FORWARD_MODS, BACKWARD_MODS = (f"attention_{x}_sm90/modified.cuh" for x in ("forward", "backward"))
MISTAKES = {
    "far_keys_seen": (
        *("exact_flat", "window", FORWARD_MODS),
        "return key_tile >= unmasked || key_tile < whole_from;",
        "return key_tile >= unmasked;",
    ),
    "sink_of_every_split": (
        *("stream", "sinks", FORWARD_MODS),
        "sink[half] = tile.split == 0 ? arguments.sinks[head] * kLog2E : minus_infinity();",
        "sink[half] = arguments.sinks[head] * kLog2E;",
    ),
    "sinks_of_another_head": (
        *("claimed_turns", "wide_sinks", "common/sink_gradient.cuh"),
        "p.dsinks[head] = sum;",
        "p.dsinks[0] = sum;",
    ),
    "one_side": (
        *("two_pass", "alibi", BACKWARD_MODS),
        "crosses = !before && most > 0;",
        "crosses = false;",
    ),
    "not_capped": (
        *("fused", "softcap", "attention_backward_sm90/scores.cuh"),
        "bent[e] = s[4 * g + e] * fmaf(-score, score, 1.0f);",
        "bent[e] = s[4 * g + e];",
    ),
    "far_entry_of_another_base": (
        *("overlap", "bias", FORWARD_MODS),
        "offset[half] = T::kAlibi ? offset[half] + far : far;",
        "offset[half] = (T::kAlibi ? offset[half] + far : far) / kLog2E;",
    ),
    "one_entry_serves": (
        *("two_pass", "bias", BACKWARD_MODS),
        "varies = bias.varies;",
        "varies = false;",
    ),
    "hidden_pairs_count": (
        *("fused", "capped_window_and_bias", "common/score_gradient.cuh"),
        "if (column < first || column >= end) continue;",
        "",
    ),
    "ends_exchanged": (
        *("fused", "biased", "common/bias_gradient.cuh"),
        "result[0] = distance == 0 ? low + high : low;",
        "result[0] = high;",
    ),
    "one_far_side": (
        *("fused", "bias", "attention_backward_sm90/bias_sums.cuh"),
        "if (distance > 0) store_shared(entries + 8 * distance, __float_as_uint(high));",
        "",
    ),
    "straight_diagonals": (
        *("fused", "bias", "attention_backward_sm90/bias_sums.cuh"),
        "if (column >= 0 && column < kColumns) total += load_shared_float(diagonal + 4 * (kColumns + 1) * r);",
        "if (column >= 0 && column < kColumns) total += load_shared_float(diagonal + 4 * kColumns * r + 28);",
    ),
    "one_key_hides_two": (
        *("overlap", "mask", "attention_forward_sm90/mask_tensor.cuh"),
        "score = here & 1u << (kBits * (e / 2) + e % 2) ? score : minus_infinity();",
        "score = here & 1u << kBits * (e / 2) ? score : minus_infinity();",
    ),
    "words_not_exchanged": (
        *("exact_flat", "masked", "attention_forward_sm90/mask_tensor.cuh"),
        "exchange(words[half][i]);",
        "",
    ),
    "one_query_for_two": (
        *("fused", "masked", BACKWARD_MODS),
        "x = combine(x, row[minimum(first + 8 * g + e, last_column) * of_columns]);",
        "x = combine(x, row[minimum(first + 8 * g, last_column) * of_columns]);",
    ),
    "far_rows_seen": (
        *("fused", "window", "attention_backward_sm90/scores.cuh"),
        "end = T::kModified ? common.end_of_queries(first) : INT32_MAX;",
        "end = INT32_MAX;",
    ),
}


@cache
def made(knobs: str, kind: str, folder: Path) -> tuple[Any, Any]:
    """An emulated kernel with three splits if any, and the problems that it is right for.

    The mistakes that are in it wait to be asked for.
    """
    direction: Any = "backward" if knobs in BACKWARD else "forward"
    problem = replace(BASE, direction=direction, **VALUES[kind])
    candidate = Candidate.of(problem, KNOBS[knobs])
    mistakes: Any = {name: how[2:] for name, how in MISTAKES.items() if how[:2] == (knobs, kind)}
    kernel = emulated(candidate, folder / f"{knobs}_{kind}", mistakes)
    if candidate.knobs == STREAM:
        kernel = kernel.with_launch_knobs({"splits": 3})
    shapes = (*SHAPES, *(IN_BLOCKS if "attn_mask" in problem.modifications else ()))
    return kernel, [replace(problem, **shape) for shape in shapes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.parametrize(("knobs", "kind"), CASES)
def test_kernels_are_right_on_the_emulated_machine(folder: Path, knobs: str, kind: str) -> None:
    kernel, problems = made(knobs, kind, folder)
    # Masks are boolean with seed 0, and else numbers.
    runs = [("random", 1), *([("lazy", 0)] if kind in ("mask", "masked") else [])]
    outcome = check(kernel, problems, runs)
    assert outcome.ok, outcome.reason
    for sign in (-1.0, 0.0) if knobs == "turns" else ():  # of the scale
        outcome = check(kernel, problems[:1], [("lazy", 0)], adjust=partial(scaled, sign=sign))
        assert outcome.ok, (sign, outcome.reason)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(folder: Path, mistake: str) -> None:
    knobs, kind, *_ = MISTAKES[mistake]
    kernel, problems = made(knobs, kind, folder)
    shown = problems[-2:-1] if kind in ("mask", "masked") else problems[:1]
    outcome = check(kernel, shown, [("eager", int(kind == "masked"))], mutant=mistake)
    assert outcome.kind == "wrong", outcome


@pytest.mark.parametrize("knobs", ["overlap", "fused"])
def test_tables_of_any_distance(folder: Path, monkeypatch: pytest.MonkeyPatch, knobs: str) -> None:
    kernel, problems = made(knobs, "bias", folder)
    for distance in (0, 1, 127, 128, 400):
        monkeypatch.setattr(modified_inputs, "BIAS_DISTANCE", distance)
        outcome = check(kernel, problems[: 2 if distance == 1 else 1], [("lazy", 0)])
        assert outcome.ok, (distance, outcome.reason)


def test_sinks_hold_with_key_bounds(folder: Path) -> None:
    problem = replace(BASE, batch=9, heads_q=2, seqlen_q=65, seqlen_k=150, key_bounds=True)
    problem = replace(problem, **VALUES["bent"], causal=True)
    kernel = emulated(Candidate.of(problem, FORWARD), folder / "bounds")
    outcome = check(kernel, [problem, problem], [("lazy", 0)])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_defaults_build_without_spills(kernel_store: Store, direction: Any) -> None:
    problems = [
        Problem(direction=direction, causal=True, dim_qk=dim, dim_v=dim, **KINDS[kind])
        for dim, kind in ((64, "bent"), (128, "window"), (128, "softcap"), (128, "alibi"))
    ]
    kernels = [render(H100().default(problem)) for problem in problems]
    target = BuildTarget(arch="90a")
    for artifact in build(kernels, target, toolchain=find_toolchain(), store=kernel_store):
        assert isinstance(artifact, Artifact), artifact
        # What the backward's loop over tiles keeps in memory is read and written once a tile.
        spilt = 0 if direction == "forward" else 40
        assert artifact.report.spill_load_bytes <= spilt >= artifact.report.spill_store_bytes
        assert artifact.report.loop_spills is False
        assert not artifact.report.warnings
        assert ctypes.CDLL(str(artifact.path)).attention_autotuner_abi_version() == 1004
