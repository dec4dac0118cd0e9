"""The benchmark of attention backward: two modes, whole steps, and peers below and through autograd."""

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
from benchmarks import attention_backward as benchmark
from benchmarks import (
    calls,
    commands,
    comparison,
    gradients,
    report,
    verdict,
)
from benchmarks.cases import GRIDS, Grid
from benchmarks.library_peers import make_sdpa
from benchmarks.peers import PEERS
from benchmarks.rivals import forward_of, meeting_of, variants
from tests.fake_benchmark import (
    GPU,
    LONG,
    POLICY,
    SHORT,
    WIDE,
    FakeMeasurer,
    FakePipeline,
    run_search,
)

NAME = "attention_backward"
BACK = replace(SHORT, direction="backward")
LATER = replace(LONG, direction="backward")
FAST, SLOW = 80.0, 100.0
STRICT = replace(BACK, deterministic=True)


def default_name(problem: Problem) -> str:
    return POLICY.default(problem).name


def other(problem: Problem) -> Any:
    """A candidate that is not a default of either mode."""
    taken = {default_name(BACK), default_name(STRICT)}
    return next(one for one in POLICY.legal(problem) if one.name not in taken)


# --- what is asked ----------------------------------------------------------------------------------


def test_the_grid_has_the_shapes_of_the_forward_one() -> None:
    grid = GRIDS[NAME]
    assert [forward_of(problem) for problem in grid.problems] == list(
        GRIDS["attention_forward"].problems
    )
    assert {p.dim_qk for p in grid.only(["causal"], dims=[64, 256]).problems} == {64, 256}
    assert len(grid.only(["causal"], dims=[64, 256]).problems) == 12
    with pytest.raises(ValueError, match="dim 96"):
        grid.only([], dims=[96])


def test_a_backward_problem_is_tuned_for_both_modes_and_meets_with_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    assert variants(BACK) == [BACK, STRICT]
    assert variants(SHORT) == [SHORT]
    with settings.override(cache_dir=tmp_path, mode="off"):
        meeting = meeting_of(BACK, POLICY)
        assert meeting_of(SHORT, POLICY).opening is None
    assert meeting.deterministic is not None
    assert meeting.opening is not None
    assert meeting.plain.pick == POLICY.default(BACK)
    assert meeting.deterministic.pick == POLICY.default(STRICT)
    assert meeting.opening.pick == POLICY.default(SHORT)
    assert meeting.candidates() == [POLICY.default(p) for p in (BACK, STRICT, SHORT)]


def test_a_class_is_limited_for_each_mode_and_every_problems_best_goes_first() -> None:
    problems = [each for problem in (BACK, LATER) for each in variants(problem)]
    (whole,) = class_pools.pools(problems, POLICY, top_k=3).values()
    (limited,) = class_pools.pools(problems, POLICY, top_k=3, class_limit=2).values()
    defaults = {POLICY.default(problem) for problem in problems}
    assert defaults <= set(limited) <= set(whole)
    rest = [one for one in limited if one not in defaults]
    assert len(rest) <= 4
    assert len([one for one in rest if not one.deterministic]) <= 2
    for problem in problems:
        alone = class_pools.pools([problem], POLICY, top_k=1, class_limit=1)
        assert {one for pool in alone.values() for one in pool} <= set(limited)


def test_deterministic_mode_tries_several_passes_for_dq() -> None:
    ranked = rank(STRICT, POLICY.legal(STRICT), POLICY.spec)
    found = class_pools.other_companions(ranked)
    passes = [one.knobs.dq for one in found]
    assert len(set(passes)) == len(passes) == class_pools.COMPANIONS
    assert ranked[0][0].knobs.dq not in passes
    problems = [STRICT] * class_pools.COMPANIONS
    (pool,) = class_pools.pools(problems, POLICY, top_k=2, class_limit=12).values()
    assert {one.knobs.dq for one in pool} >= {ranked[0][0].knobs.dq, *passes}


def test_deterministic_mode_races_what_is_deterministic_of_the_same_builds(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    records = RecordStore(tmp_path / "records")
    found = run_search([BACK, STRICT], pipeline, records, top_k=2)
    (batch,) = pipeline.batches
    raced = dict(pipeline.raced)
    (pool,) = class_pools.pools([BACK, STRICT], POLICY, top_k=2).values()
    assert set(raced[BACK]) == set(batch) == {one.name for one in pool}
    assert set(raced[STRICT]) == {one.name for one in pool if one.deterministic}
    assert [record.problem for record in found] == [p.bucketed() for p in (BACK, STRICT)]
    assert [record.purpose for record in found] == ["backward", "backward"]
    assert pipeline.claims == {one.name: one.deterministic for one in pool}


# --- comparing --------------------------------------------------------------------------------------


def compared(
    problems: Sequence[Problem],
    time_us: Callable[[Problem, str], float | Outcome],
    names: Sequence[str] = benchmark.BENCHMARK.peers,
    pipeline: FakePipeline | None = None,
) -> list[dict[str, Any]]:
    met = {name: PEERS[NAME][name] for name in names}
    with settings.override(mode="off"):
        meetings = [meeting_of(problem, POLICY) for problem in problems]
    return list(
        comparison.compare(
            meetings,
            met,
            pipeline or FakePipeline(),
            FakeMeasurer(time_us),
            seconds=1.0,
            device_type=None,
            environment=lambda: GPU,
            say=lambda line: None,
        )
    )


TIMES = {
    "sdpa_flash": 110.0,
    "sdpa_cudnn": 50.0,
    "sdpa_flash_step": 180.0,
    "step": 150.0,
    default_name(STRICT): 125.0,
}


def test_a_row_holds_both_modes_and_the_step_each_against_its_own_rival() -> None:
    (row,) = compared([BACK], lambda problem, name: TIMES.get(name, 100.0))
    assert set(row["entries"]) == {
        "pick", "deterministic", "step", "sdpa_flash", "sdpa_cudnn", "sdpa_flash_step",
    }  # fmt: skip  # no autograd: another length is timed so
    ratios = {name: each["ratio"] for name, each in row["ratios"].items()}
    assert ratios == {
        "sdpa_flash": pytest.approx(1.1),
        "sdpa_cudnn": pytest.approx(0.5),
        "sdpa_flash_step": pytest.approx(1.2),
        "deterministic": pytest.approx(0.8),
    }
    assert row["pick"] == default_name(BACK)
    assert row["deterministic"]["pick"] == default_name(STRICT)
    whole = BACK.flops + SHORT.flops
    assert row["entries"]["pick"]["tflops"] == pytest.approx(BACK.flops / 100e6)
    assert row["entries"]["step"]["tflops"] == pytest.approx(whole / 150e6)
    assert row["entries"]["sdpa_flash_step"]["tflops"] == pytest.approx(whole / 180e6)
    assert json.loads(json.dumps(row)) == row


def test_without_peers_for_the_step_none_is_timed() -> None:
    (row,) = compared([BACK], lambda problem, name: 100.0, names=["sdpa_flash"])
    assert set(row["entries"]) == {"pick", "deterministic", "sdpa_flash"}


def test_one_length_is_timed_through_autograd() -> None:
    two_k = replace(BACK, seqlen_q=2048, seqlen_k=2048)
    (row,) = compared([two_k], lambda problem, name: 90.0 if name == "autograd" else 100.0)
    assert row["ratios"]["sdpa_flash_autograd"]["ratio"] == pytest.approx(100 / 90)


def test_a_wrong_forward_takes_the_step_with_it_and_that_is_a_missed_bar() -> None:
    forward = default_name(SHORT)
    pipeline = FakePipeline(
        verify_outcome=lambda name: Wrong(reason="off") if name == forward else Ok()
    )
    (row,) = compared([BACK], lambda problem, name: 100.0, pipeline=pipeline)
    assert "tflops" not in row["entries"]["step"]
    assert "sdpa_flash_step" not in row["ratios"]
    (good,) = compared([LATER], lambda problem, name: 100.0)
    met = {name: PEERS[NAME][name] for name in benchmark.BENCHMARK.peers}
    figures = verdict.summarise(NAME, [row, good], met)
    assert BACK.describe() in figures["sdpa_flash_step"]["missed"]


def test_the_price_of_determinism_has_a_bar() -> None:
    met = {"sdpa_flash": PEERS[NAME]["sdpa_flash"]}
    for us, missed in ((130.0, []), (140.0, ["geometric_mean"])):
        rows = compared(
            [BACK],
            lambda problem, name, us=us: us if name == default_name(STRICT) else 100.0,  # type: ignore[misc]
        )
        found = verdict.summarise(NAME, rows, met)["deterministic"]
        assert found["geometric_mean"] == pytest.approx(100.0 / us)
        assert found["missed"] == missed


def test_a_comparison_settles_and_ships_both_modes_beside_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    monkeypatch.setattr(commands, "collect", lambda: GPU)
    faster, strict_faster = other(BACK), other(STRICT)

    def time_us(problem: Problem, name: str) -> float:
        if name == faster.name or (problem.deterministic and name == strict_faster.name):
            return FAST
        if name == strict_faster.name:
            return 0.95 * SLOW
        return {"sdpa_flash": 120.0, "sdpa_flash_step": 240.0}.get(name, SLOW)

    shipped = tmp_path / "tuned"
    options = ["compare", "--results", str(tmp_path / "results"), "--ship", str(shipped)]
    with settings.override(cache_dir=tmp_path, mode="cached"):
        records = RecordStore(tmp_path / "records")
        forward = run_search([SHORT], FakePipeline(), records)
        shipping.ship(shipped, GPU.gpu_name or "", forward)
        monkeypatch.setattr(class_pools, "shortlist", everything)
        run_search([BACK, STRICT], FakePipeline(time_us=time_us), records)
        dispatch.invalidate()
        status = commands.compare(
            Grid(name=NAME, problems=(BACK,)),
            POLICY,
            FakePipeline(),
            records,
            commands.parse(benchmark.BENCHMARK, options),
            FakeMeasurer(time_us),
        )
    assert status == 0, capsys.readouterr().err
    for problem, wanted in ((BACK, faster), (STRICT, strict_faster)):
        query = Query(problem=problem, arch=POLICY.name, environment=GPU)
        for layer in (RecordStore(tmp_path / "records"), ShippedRecords(shipped)):
            found = layer.find(query)
            assert isinstance(found, Hit)
            assert found.exact
            assert (found.record.candidate, found.record.confirmed) == (wanted, True)
    query = Query(problem=SHORT, arch=POLICY.name, environment=GPU)
    kept = ShippedRecords(shipped).find(query)
    assert isinstance(kept, Hit)
    assert kept.exact


def everything(ranked: Any, default: Any, top_k: int) -> Any:
    """A shortlist of the first few, the default, and both candidates that are to win."""
    wanted = {default, other(BACK), other(STRICT)}
    return [pair for pair in ranked if pair[0] in wanted]


# --- peers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [gradients.FLASH, gradients.CUDNN], ids=["flash", "cudnn"])
@pytest.mark.parametrize("step", [False, True])
def test_the_operators_below_sdpa_are_called_as_their_schemas_say(
    ops: gradients.FusedOps, step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, dout = (
        torch.empty(2, 4, 16, 64, dtype=torch.float16, device="meta") for _ in range(4)
    )
    called: list[tuple[torch.Tensor, ...]] = []

    def backward(*arguments: Any) -> Any:
        found = ops.backward(*arguments)
        called.append((arguments[0], *found))
        return found

    spied = gradients.FusedOps(forward=ops.forward, backward=backward)
    entry = gradients.FusedBackwardEntry(name="x", ops=spied, causal=True, step=step)
    entry.prepare([Inputs(tensors={"q": q, "k": k, "v": v, "dout": dout})], [])
    entry.run(0)
    assert len(called) == 2
    for given, *grads in called:
        # Laid out as the output is: rows of all heads beside each other.
        assert given.stride() == ops.forward((q, k, v), True)[0].stride()
        assert [tuple(g.shape) for g in grads] == [(2, 4, 16, 64)] * 3


def test_peers_below_sdpa_refuse_grouped_heads_and_another_diagonal() -> None:
    for name, peer in PEERS[NAME].items():
        grouped = replace(BACK, heads_kv=BACK.heads_q // 2)
        assert bool(peer.refusal(grouped)) == (not name.endswith("autograd"))
        assert "top-left" in peer.refusal(replace(LATER, seqlen_q=4))
        assert peer.refusal(BACK) == ""


def test_an_autograd_entry_takes_the_gradient_of_every_input() -> None:
    small = replace(LATER, heads_q=4, heads_kv=2, seqlen_q=9, seqlen_k=9, dim_qk=16, dim_v=16)
    taken: list[tuple[torch.Tensor, ...]] = []
    function = make_sdpa(SDPBackend.MATH)(small)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for leaf in (q, k, v):
            leaf.register_hook(lambda grad: taken.append((grad,)))
        found: torch.Tensor = function(q, k, v)
        return found

    tensors = {name: torch.randn(2, 4, 9, 16) for name in ("q", "dout")}
    tensors |= {name: torch.randn(2, 2, 9, 16) for name in ("k", "v")}
    entry = calls.StepCall(name="x", function=attend)
    entry.prepare([Inputs(tensors=tensors)], [])
    wanted = attention_backward(
        tensors["dout"], None, *(tensors[n] for n in ("q", "k", "v")), causal=True
    )
    for grad in wanted:
        assert any(
            found.shape == grad.shape and torch.allclose(found, grad, atol=1e-4)
            for (found,) in taken
        )


# --- the README -------------------------------------------------------------------------------------


def test_the_section_has_a_table_for_each_kind_and_a_verdict_for_each_rival() -> None:
    rows = compared(
        [BACK, replace(WIDE, direction="backward")], lambda problem, name: TIMES.get(name, 100.0)
    )
    met = {name: PEERS[NAME][name] for name in benchmark.BENCHMARK.peers}
    lines = report.backward_section(verdict.document(NAME, rows, met, POLICY, GPU))
    text = "\n".join(lines)
    assert lines[0] == "### Attention backward on NVIDIA H100 80GB HBM3"
    assert text.count("| d64 |") == text.count("| d128 |") == 2
    assert f"| d64 | {BACK.flops / 100e6:.0f} (1.10) |" in text
    assert f"| d64 | {(BACK.flops + SHORT.flops) / 150e6:.0f} (1.20) |" in text
    assert "Speed over cuDNN (torch SDPA), 2 problems: geometric mean 0.500" in text
    assert "Deterministic mode takes 1." in text
    assert "through autograd" not in text
