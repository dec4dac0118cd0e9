"""The benchmarks of retention up to the point of timing: what is compared, how it is called, and what is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from attention_autotuner.tuning import class_pools
from benchmarks import calls, comparison, report, retention, retnet, verdict
from benchmarks.calls import BackwardCall, Call, ForwardCall, StepCall, rows_of_heads
from benchmarks.cases import GRIDS
from benchmarks.peers import PEERS
from benchmarks.retention_peers import formula
from benchmarks.retention_tables import contest_table, shape_label
from benchmarks.rivals import Meeting, Rivals, variants
from benchmarks.side_by_side import difference
from tests.fake_benchmark import GPU, POLICY, FakeMeasurer, FakePipeline

MASKED = GRIDS["retnet"].problems[0]
MASKED_BACK = GRIDS["retnet"].problems[5]
DECAYED = GRIDS["retention"].problems[0]
DECAYED_BACK = GRIDS["retention"].problems[8]
PASS = ChunkPass(columns=64, column_warps=4, depth_warps=1, num_stages=2, scores="inline")


# --- what is asked ----------------------------------------------------------------------------------


def test_the_grids_are_those_of_the_bars() -> None:
    masked, decayed = GRIDS["retnet"].problems, GRIDS["retention"].problems
    assert [p.direction for p in masked] == ["forward"] * 5 + ["backward"] * 5
    assert [shape_label(p) for p in masked[5:]] == [
        "8, 8, 2048, 256/512",
        "4, 8, 4096, 256/512",
        "8, 8, 2048, 256/256",
        "8, 16, 2048, 128/128",
        "8, 16, 2048, 64/64",
    ]
    assert {(p.op, p.mask, p.causal, p.dtype) for p in masked} == {
        ("retnet", "explicit", False, "fp16")
    }
    assert [shape_label(p) for p in decayed[:8]] == [
        "8, 8, 2048, 256/512",
        "4, 8, 4096, 256/512",
        "2, 8, 8192, 256/512",
        "1, 8, 16384, 256/512",
        "8, 8, 2048, 256/256",
        "8, 16, 2048, 128/256",
        "8, 16, 4096, 128/128",
        "8, 32, 2048, 64/64",
    ]
    assert {(p.op, p.form, p.causal) for p in decayed} == {("retention", "auto", True)}
    assert all(p.heads_q == p.heads_kv and p.seqlen_q == p.seqlen_k for p in (*masked, *decayed))
    assert len(GRIDS["retnet"].only(["backward"], dims=[256]).problems) == 3


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


def test_what_is_verified_is_a_problem_of_the_candidates_own_kind() -> None:
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


def test_the_formula_is_the_op_that_it_is_held_against() -> None:
    given, scale = inputs(), 0.25
    read = [given.tensors[name] for name in ("q", "k", "v", "mask")]
    function = formula(scale)
    o, r = retnet_attention(*read, scale=scale)
    assert r.max() > 1.0  # or the normaliser would not be seen
    (found,) = prepared(ForwardCall, function, others=("mask",)).results(0)
    torch.testing.assert_close(found, o)
    grads = retnet_attention_backward(given.tensors["dout"], *read, scale=scale)
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

    given = inputs()
    call = prepared(ForwardCall, function, layout=rows_of_heads)
    (found,) = call.results(0)
    weight = (given.q * given.k).sum(-1, keepdim=True)
    torch.testing.assert_close(found, given.v * weight)
    assert all(tensor.is_contiguous() and tensor.shape[1] == 24 for tensor in seen)
    assert len({tensor.data_ptr() for tensor in seen}) == 3
    dq, _, dv = prepared(StepCall, function, layout=rows_of_heads).results(0)
    torch.testing.assert_close(dv, given.tensors["dout"] * weight)
    assert dq.shape == given.q.shape


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


def meeting(problem: Problem, pick: Candidate, opening: Candidate | None = None) -> Meeting:
    def of(one: Candidate) -> Rivals:
        return Rivals(problem=problem, pick=one, layer="default", default=one)

    return Meeting(plain=of(pick), opening=None if opening is None else of(opening))


def raced(
    benchmark: str,
    meetings: Sequence[Meeting],
    times: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    **rest: Any,
) -> list[dict[str, Any]]:
    monkeypatch.setattr(comparison, "render", lambda one: one)  # nothing is built
    return list(
        comparison.compare(
            meetings,
            PEERS[benchmark],
            FakePipeline(),
            FakeMeasurer(lambda problem, name: times.get(name, 100.0)),
            seconds=1.0,
            device_type=None,
            environment=lambda: GPU,
            say=lambda line: None,
            **rest,
        )
    )


def calls_of(problem: Problem, call: Call, device_type: str | None) -> dict[str, Any]:
    return {
        "peak_bytes": {"ours": 2**24, "theirs": 2**30},
        "scores_bytes": 2**29,
        "difference": [1e-3],
    }


def masked_rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    met = [meeting(p, POLICY.default(p)) for p in (MASKED, MASKED_BACK)]
    times = {"compiled_forward": 80.0, "compiled_backward": 40.0, "eager_forward": 300.0}
    rows = raced("retnet", met, times, monkeypatch, inspect=calls_of)
    return sorted(rows, key=lambda row: row["name"], reverse=True)


def test_each_direction_meets_its_own_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = masked_rows(monkeypatch)
    assert set(forward["entries"]) == {"pick", "compiled_forward", "eager_forward"}
    assert forward["ratios"]["compiled_forward"]["ratio"] == pytest.approx(0.8)
    assert set(forward["calls"]) == {"compiled_forward", "eager_forward"}
    assert set(backward["ratios"]) == {"compiled_backward", "eager_backward"}
    assert json.loads(json.dumps(forward)) == forward


def test_a_wide_problem_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = masked_rows(monkeypatch)
    met = {name: PEERS["retnet"][name] for name in retnet.BENCHMARK.peers}
    found = verdict.summarise("retnet", rows, met)
    assert found["compiled_forward"]["missed"] == ["geometric_mean"]  # 0.8 is enough at 256/512
    assert found["compiled_backward"]["missed"] == [
        "geometric_mean",
        f"{MASKED_BACK.describe()} (0.45)",
    ]


def decayed_rows(monkeypatch: pytest.MonkeyPatch, absence: str) -> list[dict[str, Any]]:
    monkeypatch.setattr("benchmarks.fla_peer.absence", lambda: absence)
    met = [
        meeting(DECAYED, chunkwise(DECAYED)),
        meeting(DECAYED_BACK, chunked_backward(DECAYED_BACK), chunkwise(DECAYED)),
    ]
    times = {"call": 50.0, "autograd": 250.0, "fla_forward": 110.0, "fla_step": 500.0}
    rows = raced("retention", met, times, monkeypatch)
    return sorted(rows, key=lambda row: row["name"], reverse=True)


def test_our_functions_are_timed_beside_flas(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = decayed_rows(monkeypatch, "")
    assert set(forward["entries"]) == {"pick", "call", "fla_forward"}
    assert set(forward["ratios"]) == {"fla_forward"}
    assert forward["ratios"]["fla_forward"]["ratio"] == pytest.approx(2.2)
    assert set(backward["entries"]) == {"pick", "autograd", "fla_step"}
    assert backward["ratios"]["fla_step"]["ratio"] == pytest.approx(2.0)
    whole = DECAYED.flops + DECAYED_BACK.flops
    assert backward["entries"]["autograd"]["tflops"] == pytest.approx(whole / 250e6)
    assert backward["entries"]["fla_step"]["tflops"] == pytest.approx(whole / 500e6)


def test_without_fla_that_is_said_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = decayed_rows(monkeypatch, "fla is not installed")
    assert forward["entries"]["fla_forward"]["outcome"]["reason"] == "fla is not installed"
    assert "tflops" in forward["entries"]["pick"]
    met = {name: PEERS["retention"][name] for name in retention.BENCHMARK.peers}
    assert verdict.summarise("retention", [forward], met) == {}


# --- the README -------------------------------------------------------------------------------------


def test_tables_show_times_ratios_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    met = {name: PEERS["retnet"][name] for name in retnet.BENCHMARK.peers}
    document = verdict.document("retnet", masked_rows(monkeypatch), met, POLICY, GPU)
    assert contest_table(document, "compiled_forward", memory=True)[2:] == [
        "| 8, 8, 2048, 256/512 | 100 | 80 | **0.80** | 16 | 1024 | 512 |"
    ]
    text = "\n".join(report.retnet_section(document))
    assert text.startswith("### Retention with an explicit mask on NVIDIA H100 80GB HBM3")
    assert "| 8, 8, 2048, 256/512 | 100 | 300 | 3.00 | 16 | 1024 | 512 |" in text
    assert "the formula through torch.compile, backward, 1 problems: geometric mean 0.400" in text
    decayed = {name: PEERS["retention"][name] for name in retention.BENCHMARK.peers}
    rows = decayed_rows(monkeypatch, "")
    section = report.retention_section(verdict.document("retention", rows, decayed, POLICY, GPU))
    assert "| 8, 8, 2048, 256/512 | 250 | 500 | 2.00 |" in section
    assert "| 8, 8, 2048, 256/512 | 50 | 110 | 2.20 |" in section
