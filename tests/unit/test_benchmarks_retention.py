"""The benchmarks of retention up to the point of timing: what is compared, how it is called, and what is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_autotuner as package
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_sm80.knobs import (
    ChunkPass,
    ChunksKnobs,
)
from attention_autotuner.operations.retnet.masks import decaying_mask
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.reference import (
    retnet_attention,
    retnet_attention_backward,
)
from attention_autotuner.tuning import class_pools, stages
from benchmarks import calls, results, session
from benchmarks.baselines.compiled import formula
from benchmarks.calls import BackwardCall, Call, ForwardCall, StepCall, difference, rows_of_heads
from benchmarks.contenders import Contenders, Selection, variants
from benchmarks.results import SuiteFile
from benchmarks.suites import SUITES, trials
from tests.fake_benchmark import GPU, POLICY, session_of

MASKED, MASKED_BACK = (t.problem for t in trials(["retnet"])[:2])
DECAYED, DECAYED_BACK = (t.problem for t in trials(["retention"])[:2])
PASS = ChunkPass(columns=64, column_warps=4, depth_warps=1, num_stages=2, scores="inline")


# --- what is raced ----------------------------------------------------------------------------------


def test_the_grids_are_those_of_the_bars() -> None:
    masked, decayed = trials(["retnet"]), trials(["retention"])
    assert [t.modes for t in masked] == [("forward",), ("backward",), ("step",)] * 5
    assert [t.modes for t in decayed] == [("forward",), ("step",)] * 8
    assert [t.case.title for t in masked[::3]] == [
        "8, 8, 2048, 256/512",
        "4, 8, 4096, 256/512",
        "8, 8, 2048, 256/256",
        "8, 16, 2048, 128/128",
        "8, 16, 2048, 64/64",
    ]
    assert {(t.problem.op, t.problem.mask, t.problem.causal, t.problem.dtype) for t in masked} == {
        ("retnet", "explicit", False, "fp16")
    }
    assert [t.case.title for t in decayed[::2]] == [
        "8, 8, 2048, 256/512",
        "4, 8, 4096, 256/512",
        "2, 8, 8192, 256/512",
        "1, 8, 16384, 256/512",
        "8, 8, 2048, 256/256",
        "8, 16, 2048, 128/256",
        "8, 16, 4096, 128/128",
        "8, 32, 2048, 64/64",
    ]
    assert {(t.problem.op, t.problem.form, t.problem.causal) for t in decayed} == {
        ("retention", "auto", True)
    }
    problems = [t.problem for t in (*masked, *decayed)]
    assert all(p.heads_q == p.heads_kv and p.seqlen_q == p.seqlen_k for p in problems)
    assert len(trials(["retnet"], words=["backward"], dims=[256])) == 6  # three cases, steps too


def test_retention_is_searched_once_because_all_of_it_is_deterministic() -> None:
    assert variants(DECAYED_BACK) == [DECAYED_BACK]
    assert variants(MASKED_BACK) == [MASKED_BACK, replace(MASKED_BACK, deterministic=True)]


def test_classes_keep_masks_and_forms_apart() -> None:
    decay = replace(MASKED, mask="decay", causal=True)
    forms = [replace(DECAYED, form=form) for form in ("auto", "chunkwise")]
    keys = [class_pools.class_of(p) for p in (MASKED, MASKED_BACK, decay, *forms)]
    assert len(set(keys)) == len(keys)
    known = [POLICY.default(MASKED)]
    (pool,) = class_pools.known_pools([MASKED], POLICY, known).values()
    assert pool == known


def test_a_problem_of_the_candidates_kind_is_verified() -> None:
    for problem in (MASKED, MASKED_BACK):
        small = class_pools.small_problem(POLICY.default(problem))
        assert class_pools.class_of(small) == class_pools.class_of(problem)
        assert small.seqlen_k % 8 == 0  # rows of the mask are read 16 bytes at a time
    decayed = class_pools.small_problem(chunkwise(DECAYED))
    assert (decayed.causal, decayed.form, decayed.seqlen_k % 8) == (True, "chunkwise", 3)


# --- how it is called -------------------------------------------------------------------------------


def inputs(heads: int = 2, seqlen: int = 24, dims: tuple[int, int] = (16, 8)) -> Inputs:
    torch.manual_seed(0)
    shape = (2, heads, seqlen)
    tensors = {name: torch.randn(*shape, dims[0]) for name in ("q", "k")}
    tensors |= {name: torch.randn(*shape, dims[1]) for name in ("v", "dout")}
    small = replace(MASKED, heads_q=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_k=seqlen)
    tensors["mask"] = decaying_mask(small, torch.device("cpu")).float()
    return Inputs(tensors=tensors)


def prepared(kind: type[Call], function: Callable[..., Any], **rest: Any) -> Call:
    call = kind(name="x", function=function, **rest)
    call.prepare([inputs()], [])
    return call


def test_the_formula_is_the_op_that_it_is_compared_with() -> None:
    tensors, scale = inputs().tensors, 0.25
    read = [tensors[name] for name in ("q", "k", "v", "mask")]
    function = formula(scale)
    o, r = retnet_attention(*read, scale=scale)
    assert r.max() > 1.0  # or the normaliser would not be seen
    (output,) = prepared(ForwardCall, function, others=("mask",)).results(0)
    torch.testing.assert_close(output, o)
    grads = retnet_attention_backward(tensors["dout"], *read, scale=scale)
    for kind in (BackwardCall, StepCall):
        call = prepared(kind, function, others=("mask",))
        for _ in range(2):  # the graph of a backward pass is kept
            for mine, wanted in zip(call.results(0), grads, strict=False):
                torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_another_layout_comes_back_in_ours_and_is_made_once() -> None:
    seen: list[torch.Tensor] = []

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.extend((q, k, v))
        return v * (q * k).sum(-1, keepdim=True)

    ours = inputs()
    call = prepared(ForwardCall, function, layout=rows_of_heads)
    (output,) = call.results(0)
    weight = (ours.q * ours.k).sum(-1, keepdim=True)
    torch.testing.assert_close(output, ours.v * weight)
    assert all(tensor.is_contiguous() and tensor.shape[1] == 24 for tensor in seen)
    assert len({tensor.data_ptr() for tensor in seen}) == 3
    dq, _, dv = prepared(StepCall, function, layout=rows_of_heads).results(0)
    torch.testing.assert_close(dv, ours.tensors["dout"] * weight)
    assert dq.shape == ours.q.shape


def test_differences_are_relative() -> None:
    a = torch.tensor([3.0, 4.0])
    assert difference((a, a), (a, 2 * a)) == [0.0, pytest.approx(0.5)]


def test_our_functions_get_what_a_training_program_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[Any, ...]] = []

    def note(name: str, result: Any) -> Callable[..., Any]:
        def function(*arguments: Any, **rest: Any) -> Any:
            called.append((name, arguments, rest))
            return result

        return function

    monkeypatch.setattr(package, "retnet_attn_func", note("retnet", "o"), raising=False)
    monkeypatch.setattr(package, "retention_func", note("retention", ("o", None)), raising=False)
    assert calls.ours(MASKED, "H200")(1, 2, 3, 4) == "o"
    assert calls.ours(DECAYED, None)(1, 2, 3) == "o"
    assert called == [
        ("retnet", (1, 2, 3, 4, "H200"), {"scale": 1 / 16, "causal": False}),
        ("retention", (1, 2, 3, None, None), {"output_final_state": False}),
    ]


# --- comparing --------------------------------------------------------------------------------------


def chunkwise(problem: Problem) -> Candidate:
    return Candidate.of(problem, ChunksKnobs(chunk=64, super_chunk=0, output=PASS))


def chunked_backward(problem: Problem) -> Candidate:
    knobs = ChunksKnobs(chunk=64, super_chunk=0, dq=PASS, dk=PASS, dv=PASS)
    return Candidate.of(problem, knobs)


def entrants(problem: Problem, pick: Candidate) -> Contenders:
    return Contenders(plain=Selection(problem=problem, pick=pick, layer="default", default=pick))


def raced(
    suite: str,
    picks: dict[Problem, Candidate],
    times: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    **rest: Any,
) -> list[dict[str, Any]]:
    """The rows of a suite's first case; nothing is built."""
    monkeypatch.setattr(stages, "render", lambda candidate: candidate)
    monkeypatch.setattr(session.Session, "get_ready", lambda self: None)  # compiles for minutes
    monkeypatch.setattr(
        session, "contenders_of", lambda problem, policy, **_: entrants(problem, picks[problem])
    )
    wanted = trials([suite])[:2]
    taken = session_of(wanted, lambda problem, name: times.get(name, 100.0), **rest).rows()
    rows = [row for _, row in taken]
    assert all(isinstance(row, dict) for row in rows), rows
    return rows  # type: ignore[return-value]  # so it was asserted


def calls_of(problem: Problem, call: Call, device_type: str | None) -> dict[str, Any]:
    return {
        "peak_bytes": {"ours": 2**24, "theirs": 2**30},
        "scores_bytes": 2**29,
        "difference": [1e-3],
    }


def masked_rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    picks = {p: POLICY.default(p) for p in (MASKED, MASKED_BACK)}
    times = {"compiled forward": 130.0, "compiled backward": 100.0, "eager forward": 300.0}
    return raced("retnet", picks, times, monkeypatch, inspect=calls_of)


def test_each_direction_meets_its_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = masked_rows(monkeypatch)
    peers = ("compiled", "compiled_autotuned", "eager")
    assert set(forward["entries"]) == {"pick", *(f"{name} forward" for name in peers)}
    assert forward["ratios"]["compiled forward"]["ratio"] == pytest.approx(1.3)
    assert set(forward["calls"]) == {f"{name} forward" for name in peers}
    assert set(backward["ratios"]) == {f"{name} backward" for name in peers}
    assert json.loads(json.dumps(forward)) == forward


def test_a_wide_problem_has_a_bar_for_its_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = results.summarise(SUITES["retnet"], masked_rows(monkeypatch))
    assert summary["compiled forward"]["missed"] == [
        "geometric_mean",
        "b8_h8_s2048_d256_512 forward fp16 (1.45)",
    ]
    assert summary["compiled backward"]["missed"] == ["geometric_mean"]  # 1.0 is enough at 256/512


def decayed_rows(monkeypatch: pytest.MonkeyPatch, absence: str) -> list[dict[str, Any]]:
    monkeypatch.setattr("benchmarks.baselines.fla.absence", lambda: absence)
    picks = {DECAYED: chunkwise(DECAYED), DECAYED_BACK: chunked_backward(DECAYED_BACK)}
    times = {"call": 50.0, "autograd": 250.0, "fla forward": 110.0, "fla step": 500.0}
    return raced("retention", picks, times, monkeypatch)


def test_our_functions_are_timed_beside_flas(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = decayed_rows(monkeypatch, "")
    assert set(forward["entries"]) == {"pick", "call", "fla forward"}
    assert set(forward["ratios"]) == {"fla forward"}
    assert forward["ratios"]["fla forward"]["ratio"] == pytest.approx(2.2)
    assert set(backward["entries"]) == {"pick", "autograd", "fla step"}
    assert backward["ratios"]["fla step"]["ratio"] == pytest.approx(2.0)
    whole = DECAYED.flops + DECAYED_BACK.flops
    assert backward["entries"]["autograd"]["tflops"] == pytest.approx(whole / 250e6)
    assert backward["entries"]["fla step"]["tflops"] == pytest.approx(whole / 500e6)


def test_without_fla_that_is_said_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = decayed_rows(monkeypatch, "fla is not installed")
    assert forward["entries"]["fla forward"]["outcome"]["reason"] == "fla is not installed"
    assert "tflops" in forward["entries"]["pick"]
    assert results.summarise(SUITES["retention"], [forward]) == {}


def test_the_table_of_a_terminal_shows_times_ratios_and_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = SuiteFile(tmp_path, SUITES["retention"], GPU, POLICY, 0.1)
    for trial, row in zip(trials(["retention"])[:2], decayed_rows(monkeypatch, ""), strict=True):
        file.take(trial, row)
    head, forward, step = results.table(file.document())
    assert head.split()[:5] == ["case", "mode", "layer", "us", "TFLOP/s"]
    assert forward.split()[:4] == ["b8_h8_s2048_d256_512", "forward", "default", "100.0"]
    assert "2.20 ±" in forward
    assert step.split()[3] == "250.0"
    assert "2.00 ±" in step
