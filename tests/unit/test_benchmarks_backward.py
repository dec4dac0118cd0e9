"""The benchmark of attention backward: two modes, whole steps, and baselines below and through autograd."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from attention_autotuner import settings
from attention_autotuner.core.outcome import Ok, Outcome, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.reference import attention_backward
from attention_autotuner.serving import dispatch
from attention_autotuner.tuning import class_pools, shipping
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipped import ShippedRecords
from benchmarks import calls, results, run
from benchmarks.baselines import BASELINES
from benchmarks.baselines import sdpa as gradients
from benchmarks.baselines.flash_attn import (
    FlashAttention4Deterministic,
)
from benchmarks.baselines.sdpa import make_sdpa
from benchmarks.comparison import describe, opponents_of
from benchmarks.contenders import contenders_of, forward_of, variants
from benchmarks.reporting.site import results_of
from benchmarks.results import SuiteFile
from benchmarks.suites import SUITES, Case, Suite, Trial, trials
from tests.fake_benchmark import (
    GPU,
    LONG,
    POLICY,
    SHORT,
    FakePipeline,
    run_search,
    session_of,
)

NAME = "attention_backward"
BACK = replace(SHORT, direction="backward")
LATER = replace(LONG, direction="backward")
FAST, SLOW = 80.0, 100.0
STRICT = replace(BACK, deterministic=True)
RACES = {case.shape.seqlen_q: case.races for case in SUITES[NAME].cases}


def default_name(problem: Problem) -> str:
    return POLICY.default(problem).name


def other(problem: Problem) -> Any:
    """A candidate that is not a default of either mode."""
    taken = {default_name(BACK), default_name(STRICT)}
    return next(c for c in POLICY.legal(problem) if c.name not in taken)


# --- what is raced ----------------------------------------------------------------------------------


def test_the_grid_has_the_shapes_of_the_forward_one() -> None:
    backward, forward = trials([NAME]), trials(["attention_forward"])
    assert [forward_of(t.problem) for t in backward] == [t.problem for t in forward]
    part = trials([NAME], words=["causal"], dims=[64, 256])
    assert {t.problem.dim_qk for t in part} == {64, 256}
    assert len(part) == 12
    with pytest.raises(ValueError, match="dim 96"):
        trials([NAME], dims=[96])


def test_a_backward_problem_is_tuned_for_both_modes_and_races_with_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    assert variants(BACK) == [BACK, STRICT]
    assert variants(SHORT) == [SHORT]
    with settings.override(cache_dir=tmp_path, mode="off"):
        contenders = contenders_of(BACK, POLICY)
        assert contenders_of(SHORT, POLICY).forward is None
        assert contenders_of(BACK, POLICY, defaults=False).deterministic is None
    assert contenders.deterministic is not None
    assert contenders.forward is not None
    assert contenders.plain.pick == POLICY.default(BACK)
    assert contenders.deterministic.pick == POLICY.default(STRICT)
    assert contenders.forward.pick == POLICY.default(SHORT)
    assert contenders.candidates() == [POLICY.default(p) for p in (BACK, STRICT, SHORT)]


def test_a_class_is_limited_for_each_mode_and_every_problems_best_goes_first() -> None:
    problems = [variant for problem in (BACK, LATER) for variant in variants(problem)]
    (whole,) = class_pools.pools(problems, POLICY, top_k=3).values()
    (limited,) = class_pools.pools(problems, POLICY, top_k=3, class_limit=2).values()
    defaults = {POLICY.default(problem) for problem in problems}
    assert defaults <= set(limited) <= set(whole)
    rest = [candidate for candidate in limited if candidate not in defaults]
    assert len(rest) <= 4
    assert len([candidate for candidate in rest if not candidate.deterministic]) <= 2
    for problem in problems:
        alone = class_pools.pools([problem], POLICY, top_k=1, class_limit=1)
        assert {candidate for pool in alone.values() for candidate in pool} <= set(limited)


def test_deterministic_mode_tries_several_passes_for_dq() -> None:
    ranked = rank(STRICT, POLICY.legal(STRICT), POLICY.spec)
    companions = class_pools.other_companions(ranked)
    passes = [candidate.knobs.dq for candidate in companions]
    assert len(set(passes)) == len(passes) == class_pools.COMPANIONS
    assert ranked[0][0].knobs.dq not in passes
    problems = [STRICT] * class_pools.COMPANIONS
    (pool,) = class_pools.pools(problems, POLICY, top_k=2, class_limit=12).values()
    assert {candidate.knobs.dq for candidate in pool} >= {ranked[0][0].knobs.dq, *passes}


def test_deterministic_mode_races_the_deterministic_kernels_of_the_same_builds(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    records = RecordStore(tmp_path / "records")
    tuned = run_search([BACK, STRICT], pipeline, records, top_k=2)
    (batch,) = pipeline.batches
    raced = dict(pipeline.raced)
    (pool,) = class_pools.pools([BACK, STRICT], POLICY, top_k=2).values()
    assert set(raced[BACK]) == set(batch) == {candidate.name for candidate in pool}
    assert set(raced[STRICT]) == {candidate.name for candidate in pool if candidate.deterministic}
    assert [record.problem for record in tuned] == [p.bucketed() for p in (BACK, STRICT)]
    assert [record.purpose for record in tuned] == ["backward", "backward"]
    assert pipeline.claims == {candidate.name: candidate.deterministic for candidate in pool}


# --- comparing --------------------------------------------------------------------------------------


def suite_with(*problems: Problem) -> Suite:
    """The backward suite with cases of some problems, each measured as its grid's case of that length."""
    cases = [
        Case(
            name=f"case{index}",
            title=p.describe(),
            source="",
            shape=forward_of(p),
            races=RACES[p.seqlen_q],
        )
        for index, p in enumerate(problems)
    ]
    return replace(SUITES[NAME], cases=tuple(cases))


def compared(
    problems: Sequence[Problem],
    time_us: Callable[[Problem, str], float | Outcome],
    monkeypatch: pytest.MonkeyPatch,
    pipeline: FakePipeline | None = None,
    modes: Sequence[Any] = (),
) -> list[dict[str, Any]]:
    monkeypatch.setitem(SUITES, NAME, suite_with(*problems))
    with settings.override(mode="off"):
        session = session_of(
            trials([NAME], modes=modes), time_us, pipeline=pipeline or FakePipeline()
        )
        rows = [row for _, row in session.rows()]
    assert all(isinstance(row, dict) for row in rows), rows
    return rows  # type: ignore[return-value]  # so it was asserted


TIMES = {
    "sdpa_flash backward": 110.0,
    "sdpa_cudnn backward": 50.0,
    "sdpa_flash step": 180.0,
    "sdpa_cudnn step": 75.0,
    "step": 150.0,
    default_name(STRICT): 125.0,
}


def test_a_row_holds_both_modes_and_the_step_each_against_its_baselines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = compared([BACK], lambda problem, name: TIMES.get(name, 100.0), monkeypatch)
    assert set(row["entries"]) == {
        "pick", "deterministic", "step", "sdpa_flash backward", "sdpa_cudnn backward", "sdpa_flash step",
        "sdpa_cudnn step",
    }  # fmt: skip  # no autograd: another length is timed so
    ratios = {name: ratio["ratio"] for name, ratio in row["ratios"].items()}
    assert ratios == {
        "sdpa_flash backward": pytest.approx(1.1),
        "sdpa_cudnn backward": pytest.approx(0.5),
        "sdpa_flash step": pytest.approx(1.2),
        "sdpa_cudnn step": pytest.approx(0.5),
        "deterministic": pytest.approx(0.8),
    }
    assert row["pick"] == default_name(BACK)
    assert row["deterministic"]["pick"] == default_name(STRICT)
    whole = BACK.flops + SHORT.flops
    assert row["entries"]["pick"]["tflops"] == pytest.approx(BACK.flops / 100e6)
    assert row["entries"]["step"]["tflops"] == pytest.approx(whole / 150e6)
    assert row["entries"]["sdpa_flash step"]["tflops"] == pytest.approx(whole / 180e6)
    assert json.loads(json.dumps(row)) == row


def test_where_no_step_is_asked_for_none_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = compared([BACK], lambda problem, name: 100.0, monkeypatch, modes=["backward"])
    assert set(row["entries"]) == {
        "pick", "deterministic", "sdpa_flash backward", "sdpa_cudnn backward",
    }  # fmt: skip


def test_one_length_is_timed_through_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    two_k = replace(BACK, seqlen_q=2048, seqlen_k=2048)
    (row,) = compared(
        [two_k], lambda problem, name: 90.0 if name == "autograd" else 100.0, monkeypatch
    )
    assert row["ratios"]["sdpa_flash autograd"]["ratio"] == pytest.approx(100 / 90)
    assert row["ratios"]["sdpa_flash autograd"]["ours"] == "autograd"


def test_a_wrong_forward_takes_the_step_with_it_and_that_is_a_missed_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = default_name(SHORT)
    pipeline = FakePipeline(check=lambda name: Wrong(reason="off") if name == forward else Ok())
    (row,) = compared([BACK], lambda problem, name: 100.0, monkeypatch, pipeline)
    assert "tflops" not in row["entries"]["step"]
    assert "sdpa_flash step" not in row["ratios"]
    (good,) = compared([LATER], lambda problem, name: 100.0, monkeypatch)
    row["key"] = "without a step"
    figures = results.summarise(SUITES[NAME], [row, good])
    assert "without a step" in figures["sdpa_flash step"]["missed"]


def test_the_price_of_determinism_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for us, missed in ((110.0, []), (140.0, ["geometric_mean"])):
        rows = compared(
            [BACK],
            lambda problem, name, us=us: us if name == default_name(STRICT) else 100.0,  # type: ignore[misc]
            monkeypatch,
        )
        figures = results.summarise(SUITES[NAME], rows)["deterministic"]
        assert figures["geometric_mean"] == pytest.approx(100.0 / us)
        assert figures["missed"] == missed


STRICT_PEER = "flash_attn_4_deterministic backward"


class StrictPeer(FlashAttention4Deterministic):
    """Is there, and computes nothing."""

    def function(self, problem: Problem) -> calls.Function:
        return lambda q, k, v: q

    def absence(self) -> str:
        return ""


def with_strict_peer(
    monkeypatch: pytest.MonkeyPatch, time_us: Callable[[Problem, str], float], **rest: Any
) -> dict[str, Any]:
    """The row of a race that a deterministic baseline joins."""
    monkeypatch.setitem(SUITES, NAME, suite_with(BACK))
    monkeypatch.setitem(BASELINES, StrictPeer.name, StrictPeer())
    with settings.override(mode="off"):
        session = session_of(trials([NAME]), time_us, extra=(StrictPeer.name,), **rest)
        ((_, row),) = session.rows()
    assert isinstance(row, dict), row
    return row


def test_a_deterministic_baseline_is_compared_with_our_deterministic_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {STRICT_PEER: 150.0, default_name(STRICT): 125.0}
    row = with_strict_peer(monkeypatch, lambda problem, name: times.get(name, 100.0))
    ratio = row["ratios"][STRICT_PEER]
    assert (ratio["ratio"], ratio["ours"]) == (pytest.approx(1.2), "deterministic")
    assert row["entries"][STRICT_PEER]["tflops"] == pytest.approx(BACK.flops / 150e6)
    assert not any(name.startswith("flash_attn_4_deterministic step") for name in row["entries"])
    assert f"1.200x {STRICT_PEER}" in describe(BACK, row)
    figures = results.summarise(SUITES[NAME], [row])[STRICT_PEER]
    assert figures["geometric_mean"] == pytest.approx(1.2)
    document = {"unit": "tflops", "rows": [row], "unmeasured": {}}
    assert STRICT_PEER in results.table(document)[0]
    assert "1.20" in results.table(document)[1]
    shown = results_of({**document, "baselines": {StrictPeer.name: StrictPeer.title}})
    (result,) = [result for result in shown if result.baseline == StrictPeer.title]
    assert (result.ours_us, result.theirs_us) == (125.0, 150.0)


def test_a_deterministic_baseline_is_not_timed_where_ours_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = with_strict_peer(monkeypatch, lambda problem, name: 100.0, defaults=False)
    assert set(row["entries"]) == {
        "pick", "step", "sdpa_flash backward", "sdpa_cudnn backward", "sdpa_flash step",
        "sdpa_cudnn step",
    }  # fmt: skip
    assert opponents_of(SHORT, ["forward"], [StrictPeer()]) == []


def test_a_comparison_settles_and_ships_both_modes_beside_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    monkeypatch.setitem(SUITES, NAME, replace(suite_with(BACK), bars={}))  # those are a GPU's
    faster, strict_faster = other(BACK), other(STRICT)

    def time_us(problem: Problem, name: str) -> float:
        if name == faster.name or (problem.deterministic and name == strict_faster.name):
            return FAST
        if name == strict_faster.name:
            return 0.95 * SLOW
        return {"sdpa_flash backward": 120.0, "sdpa_flash step": 240.0}.get(name, SLOW)

    shipped = tmp_path / "tuned"
    with settings.override(cache_dir=tmp_path, mode="cached"):
        records = RecordStore(tmp_path / "records")
        forward = run_search([SHORT], FakePipeline(), records)
        shipping.ship(shipped, GPU.gpu_name or "", forward)
        monkeypatch.setattr(class_pools, "shortlist", everything)
        run_search([BACK, STRICT], FakePipeline(time_us=time_us), records)
        dispatch.invalidate()
        session = session_of(trials([NAME]), time_us)
        status = run.compare(session, tmp_path / "results", records, shipped)
    assert status == 0, capsys.readouterr().err
    for problem, wanted in ((BACK, faster), (STRICT, strict_faster)):
        query = Query(problem=problem, arch=POLICY.name, environment=GPU)
        for layer in (RecordStore(tmp_path / "records"), ShippedRecords(shipped)):
            hit = layer.find(query)
            assert isinstance(hit, Hit)
            assert hit.exact
            assert (hit.record.candidate, hit.record.confirmed) == (wanted, True)
    query = Query(problem=SHORT, arch=POLICY.name, environment=GPU)
    kept = ShippedRecords(shipped).find(query)
    assert isinstance(kept, Hit)
    assert kept.exact


def everything(ranked: Any, default: Any, top_k: int) -> Any:
    """A shortlist of the first few, the default, and both candidates that are to win."""
    wanted = {default, other(BACK), other(STRICT)}
    return [pair for pair in ranked if pair[0] in wanted]


# --- baselines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [gradients.FLASH_OPS, gradients.CUDNN_OPS], ids=["flash", "cudnn"])
@pytest.mark.parametrize("step", [False, True])
def test_the_operators_below_sdpa_are_called_as_their_schemas_say(
    ops: gradients.FusedOps, step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, dout = (
        torch.empty(2, 4, 16, 64, dtype=torch.float16, device="meta") for _ in range(4)
    )
    called: list[tuple[torch.Tensor, ...]] = []

    def backward(*arguments: Any) -> Any:
        grads = ops.backward(*arguments)
        called.append((arguments[0], *grads))
        return grads

    spied = gradients.FusedOps(forward=ops.forward, backward=backward)
    entry = gradients.FusedBackwardEntry(name="x", ops=spied, causal=True, step=step)
    entry.prepare([Inputs(tensors={"q": q, "k": k, "v": v, "dout": dout})], [])
    entry.run(0)
    assert len(called) == 2
    for gradient, *grads in called:
        # Laid out as the output is: rows of all heads beside each other.
        assert gradient.stride() == ops.forward((q, k, v), True)[0].stride()
        assert [tuple(g.shape) for g in grads] == [(2, 4, 16, 64)] * 3


def test_only_what_takes_the_operators_is_timed_below_autograd() -> None:
    grouped = replace(BACK, heads_kv=BACK.heads_q // 2)
    for baseline in (BASELINES["sdpa_flash"], BASELINES["sdpa_cudnn"]):
        for mode in ("backward", "step"):
            below = baseline.entry(BACK, mode, "x")
            assert isinstance(below, gradients.FusedBackwardEntry)
            assert below.step == (mode == "step")
            for problem in (grouped, replace(LATER, seqlen_q=4)):
                assert isinstance(baseline.entry(problem, mode, "x"), calls.Call)
        assert isinstance(baseline.entry(BACK, "autograd", "x"), calls.StepCall)
        assert baseline.available(BACK) == ""


def test_modes_that_are_not_measured_again_keep_their_figures(tmp_path: Path) -> None:
    grid: Any = {"words": ["512"], "dims": [128]}
    (both, *_) = trials(["attention_backward"], **grid)
    (alone, *_) = trials(["attention_backward"], modes=["backward"], **grid)
    assert (both.modes[:2], alone.modes) == (("backward", "step"), ("backward",))
    names = {"pick": 4.0, "step": 6.0, "autograd": 7.0}
    theirs = {"flash_attn_4 backward": (5.0, "pick"), "flash_attn_4 step": (9.0, "autograd")}

    def row(trial: Trial, times: dict[str, float], slower: float = 1.0) -> dict[str, Any]:
        compared = {name: x for name, x in theirs.items() if x[1] in times}
        return {
            "key": trial.key,
            "case": trial.case.name,
            "title": "",
            "modes": [*trial.modes],
            "ours": "pick",
            "pick": "p",
            "layer": "record",
            "entries": {
                name: {"median_us": us * slower, "tflops": 1.0}
                for name, us in (*times.items(), *((n, us) for n, (us, _) in compared.items()))
            },
            "ratios": {
                name: {"ratio": us / times[ours], "error": 0.01, "ours": ours}
                for name, (us, ours) in compared.items()
            },
        }

    file = SuiteFile(tmp_path, SUITES["attention_backward"], GPU, POLICY, 0.1)
    whole = row(both, names)
    file.take(both, whole)
    file.take(alone, row(alone, {"pick": 4.0}, slower=2.0))
    backward, step = file.document()["rows"]
    assert (backward["key"], step["key"]) == ("d128_512 backward fp16", "d128_512 step fp16")
    assert step["modes"] == [*both.modes[1:]]
    assert step["ours"] == "step"
    assert set(step["entries"]) == {"step", "autograd", "flash_attn_4 step"}
    assert set(step["ratios"]) == {"flash_attn_4 step"}
    assert backward["entries"]["pick"]["median_us"] == 8.0
    assert file.document()["summary"]["flash_attn_4 step"]["problems"] == 1
    assert len(results.table(file.document())) == 3
    file.take(both, whole)
    (again,) = file.document()["rows"]
    assert set(again["entries"]) == set(whole["entries"])


def test_an_autograd_entry_takes_the_gradient_of_every_input() -> None:
    small = replace(LATER, heads_q=4, heads_kv=2, seqlen_q=9, seqlen_k=9, dim_qk=16, dim_v=16)
    taken: list[tuple[torch.Tensor, ...]] = []
    function = make_sdpa(SDPBackend.MATH, small)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for leaf in (q, k, v):
            leaf.register_hook(lambda grad: taken.append((grad,)))
        output: torch.Tensor = function(q, k, v)
        return output

    tensors = {name: torch.randn(2, 4, 9, 16) for name in ("q", "dout")}
    tensors |= {name: torch.randn(2, 2, 9, 16) for name in ("k", "v")}
    entry = calls.StepCall(name="x", function=attend)
    entry.prepare([Inputs(tensors=tensors)], [])
    wanted = attention_backward(
        tensors["dout"], None, *(tensors[n] for n in ("q", "k", "v")), causal=True
    )
    for grad in wanted:
        assert any(
            result.shape == grad.shape and torch.allclose(result, grad, atol=1e-4)
            for (result,) in taken
        )
