"""The benchmarks' grids: what is compared, how figures meet bars, and what a comparison writes, settles and ships."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from attention_autotuner import settings
from attention_autotuner.arch import resolve
from attention_autotuner.codegen.render import render
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed, LaunchFailed, Ok, Outcome, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.reference import attention
from attention_autotuner.serving import dispatch
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipped import ShippedRecords
from benchmarks import comparison, results, run
from benchmarks.baselines import BASELINES
from benchmarks.baselines.flash_attn import FROM_SITE
from benchmarks.baselines.sdpa import SdpaFlash, make_sdpa
from benchmarks.calls import Function
from benchmarks.comparison import Comparison, opponents_of
from benchmarks.contenders import Contenders, Selection
from benchmarks.suites import SUITES, Case, Suite, column_label, row_label, trials
from tests.fake_benchmark import (
    GPU,
    LONG,
    POLICY,
    SHORT,
    WIDE,
    FakeMeasurer,
    FakePipeline,
    candidates_of,
    run_search,
    session_of,
)

BARS = {"sdpa_flash forward": {"geometric_mean": 1.05, "min": 0.97}}  # not those of the GPU's day
SUITE = replace(SUITES["attention_forward"], bars=BARS)
GRID = [case.shape for case in SUITE.cases]


# --- cases and baselines --------------------------------------------------------------------------


def test_the_grid_is_the_published_one() -> None:
    assert len(GRID) == len(set(GRID)) == 36
    for problem in GRID:
        assert problem.batch * problem.seqlen_q == 16384
        assert problem.heads_q * problem.dim_qk == problem.heads_kv * problem.dim_v == 2048
        assert (problem.dtype, problem.seqlen_q) == ("fp16", problem.seqlen_k)
    assert {(p.dim_qk, p.causal) for p in GRID} == {
        (dim, causal) for dim in (64, 128, 256) for causal in (False, True)
    }
    rows = [row_label(p) for p in GRID]
    assert list(dict.fromkeys(rows)) == [
        "d64", "d64 causal", "d128", "d128 causal", "d256", "d256 causal",
    ]  # fmt: skip
    assert [column_label(p) for p in GRID[:6]] == ["512", "1k", "2k", "4k", "8k", "16k"]
    assert column_label(replace(SHORT, seqlen_k=1000)) == "1000"
    assert row_label(replace(SHORT, dim_v=128)) == "d64/128"


def test_a_part_of_the_grid_is_chosen_by_words() -> None:
    assert len(trials(["attention_forward"])) == 36
    part = trials(["attention_forward"], words=["d64", "causal"])
    assert {(t.problem.dim_qk, t.problem.causal) for t in part} == {(64, True)}
    with pytest.raises(ValueError, match="d96"):
        trials(["attention_forward"], words=["d96"])


def test_the_grids_race_cudnn_beside_flash_attention_and_bars_name_comparisons() -> None:
    for suite in SUITES.values():
        names = set(suite.baselines or BASELINES)
        assert names <= set(BASELINES)
        for trial in trials([suite.name]):
            opponents = opponents_of(trial.problem, trial.modes, [BASELINES[n] for n in names])
            if suite.name.startswith("attention_"):
                assert {"sdpa_flash", "sdpa_cudnn"} <= {o.baseline.name for o in opponents}
                assert not any(o.reason for o in opponents)
                assert {o.mode for o in opponents} == set(trial.modes)
        raced = {*names, *FROM_SITE}  # which join a suite by flags
        every = {
            f"{name} {mode}" for name in raced for t in trials([suite.name]) for mode in t.modes
        }
        assert {*suite.bars, *suite.row_bars} <= {*every, "deterministic"}


def test_sdpa_refuses_what_it_masks_otherwise() -> None:
    baseline = BASELINES["sdpa_cudnn"]
    assert baseline.available(LONG) == ""
    assert baseline.available(replace(SHORT, seqlen_q=4)) == ""
    assert "top-left" in baseline.available(replace(LONG, seqlen_q=4))
    assert baseline.available(replace(LONG, seqlen_q=4, causal_alignment="top_left")) == ""


@pytest.mark.parametrize("problem", [SHORT, LONG], ids=Problem.describe)
def test_an_sdpa_baseline_computes_our_attention(problem: Problem) -> None:
    small = replace(problem, heads_q=4, heads_kv=2, seqlen_q=9, seqlen_k=9, dim_qk=16, dim_v=16)
    tensors = [torch.randn(2, heads, 9, 16) for heads in (4, 2, 2)]
    output = make_sdpa(SDPBackend.MATH, small)(*tensors)
    torch.testing.assert_close(output, attention(*tensors, causal=small.causal)[0])


# --- comparing ------------------------------------------------------------------------------------


class Flash(SdpaFlash):
    """Runs nothing, and refuses long sequences."""

    def function(self, problem: Problem) -> Function:
        return lambda q, k, v: q

    def limit(self, problem: Problem) -> str:
        return "too long" if problem.seqlen_q > 9000 else ""


FLASH_NAME = "sdpa_flash forward"
OTHER = next(c for c in POLICY.legal(SHORT) if c != POLICY.default(SHORT))


def contenders(problem: Problem = SHORT, pick: Candidate | None = None) -> Contenders:
    default = POLICY.default(problem)
    return Contenders(
        plain=Selection(
            problem=problem,
            pick=pick or default,
            layer="record" if pick else "default",
            default=default,
        )
    )


def race(
    entrants: Contenders,
    time_us: Callable[[Problem, str], float | Outcome],
    pipeline: FakePipeline | None = None,
    measurer: FakeMeasurer | None = None,
) -> dict[str, Any]:
    pipeline = pipeline or FakePipeline()
    kernels = [render(candidate) for candidate in entrants.candidates()]
    built = pipeline.build(kernels, lambda *_: None)
    opponents = opponents_of(entrants.problem, ["forward"], [Flash()])
    compared = Comparison(
        entrants, opponents, pipeline, dict(zip(entrants.candidates(), built, strict=True)), None
    )
    row = compared.row(measurer or FakeMeasurer(time_us), 1.0)
    problem = json.loads(json.dumps(vars(entrants.problem)))
    key = entrants.problem.describe()
    return {**row, "key": key, "case": key, "problem": problem}


def test_ratios_are_paired_and_stand_with_the_figures_of_both() -> None:
    row = race(contenders(), lambda problem, name: 120.0 if name == FLASH_NAME else 100.0)
    assert row["pick"] == POLICY.default(SHORT).name
    assert row["layer"] == "default"
    assert not {"default", "gain_over_default"} & row.keys()  # the pick is the default
    assert row["ratios"][FLASH_NAME]["ratio"] == pytest.approx(1.2)
    assert row["ratios"][FLASH_NAME]["ours"] == "pick"
    assert set(row["entries"]) == {"pick", FLASH_NAME}
    assert row["entries"]["pick"]["tflops"] == pytest.approx(SHORT.flops / 100.0 / 1e6)
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize(
    ("us", "picked", "layer"), [(95.0, OTHER, "record"), (99.5, POLICY.default(SHORT), "default")]
)
def test_a_pick_must_beat_the_default_here_too(us: float, picked: Candidate, layer: str) -> None:
    time = {OTHER.name: us, FLASH_NAME: 110.0}
    row = race(contenders(pick=OTHER), lambda problem, name: time.get(name, 100.0))
    assert (row["pick"], row["layer"]) == (picked.name, layer)
    assert row["default"] == POLICY.default(SHORT).name
    assert row["gain_over_default"] == pytest.approx(100.0 / us - 1.0)
    assert set(row["entries"]) == {"pick", "default", FLASH_NAME}
    ours = us if picked == OTHER else 100.0
    assert row["ratios"][FLASH_NAME]["ratio"] == pytest.approx(110.0 / ours)


def test_a_pick_that_is_wrong_is_not_timed_and_the_default_takes_its_place() -> None:
    pipeline = FakePipeline(check=lambda name: Wrong(reason="off") if name == OTHER.name else Ok())
    row = race(contenders(pick=OTHER), lambda problem, name: 100.0, pipeline)
    assert row["pick"] == POLICY.default(SHORT).name


def test_losses_without_a_time_are_missed_bars() -> None:
    pipeline = FakePipeline(build_outcome=lambda name: BuildFailed(reason="no"))
    row = race(contenders(), lambda problem, name: 100.0, pipeline)
    assert row["entries"]["pick"]["outcome"]["kind"] == "build_failed"
    assert row["ratios"] == {}
    assert "build_failed: no" in comparison.describe(SHORT, row)
    good = race(contenders(LONG), lambda problem, name: 100.0)
    summary = results.summarise(SUITE, [row, good])
    assert SHORT.describe() in summary[FLASH_NAME]["missed"]


def test_baselines_that_refuse_or_fail_are_reported_as_such() -> None:
    far = replace(SHORT, seqlen_q=16384, seqlen_k=16384)
    failure = LaunchFailed(reason="no kernel image")
    rows = [
        race(contenders(problem), lambda p, name: failure if name == FLASH_NAME else 100.0)
        for problem in (SHORT, far)
    ]
    reasons = [row["entries"][FLASH_NAME]["outcome"]["reason"] for row in rows]
    assert reasons == ["no kernel image", "too long"]
    assert results.summarise(SUITE, rows) == {}


def test_the_summary_names_the_worst_problem_and_the_missed_bars() -> None:
    speed = {SHORT: 96.0, LONG: 130.0, WIDE: 100.0}
    rows = [
        race(contenders(problem), lambda p, name: speed[p] if name == FLASH_NAME else 100.0)
        for problem in speed
    ]
    figures = results.summarise(SUITE, rows)[FLASH_NAME]
    assert figures["problems"] == 3
    assert figures["geometric_mean"] == pytest.approx((0.96 * 1.3) ** (1 / 3))
    assert (figures["min"], figures["min_at"]) == (pytest.approx(0.96), SHORT.describe())
    assert (figures["faster"], figures["even"], figures["slower"]) == (1, 1, 1)
    assert figures["missed"] == ["min"]
    another = Suite(name="another", title="Another", cases=())
    assert results.summarise(another, rows)[FLASH_NAME]["missed"] == []


def test_an_interrupted_comparison_stops() -> None:
    measurer = FakeMeasurer(lambda problem, name: 100.0)
    measurer.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        race(contenders(), measurer.time_us, measurer=measurer)


# --- the whole run, without a GPU -----------------------------------------------------------------


@pytest.fixture
def forward_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    """The forward suite with two cases, on a GPU that is not there."""
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    cases = tuple(
        Case(name=name, title=name, source="", shape=shape)
        for name, shape in (("short", SHORT), ("long", LONG))
    )
    suite = replace(SUITE, cases=cases, baselines=("sdpa_flash",))
    monkeypatch.setitem(SUITES, suite.name, suite)
    yield suite
    dispatch.invalidate()


@pytest.mark.parametrize(("us", "confirmed_pick"), [(80.0, "best"), (100.0, "default")])
def test_a_comparison_writes_settles_and_ships(
    us: float,
    confirmed_pick: str,
    forward_of_two: Suite,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, best, *_ = candidates_of(SHORT, [SHORT])
    times = {best.name: us, FLASH_NAME: 120.0}
    with settings.override(cache_dir=tmp_path, mode="cached"):
        records = RecordStore(tmp_path / "records")
        tuning = FakePipeline(time_us=lambda problem, name: 80.0 if name == best.name else 100.0)
        run_search([SHORT], tuning, records)
        dispatch.invalidate()
        session = session_of(
            trials([forward_of_two.name]), lambda problem, name: times.get(name, 100.0)
        )
        status = run.compare(session, tmp_path / "results", records, tmp_path / "tuned")
    said = capsys.readouterr()
    assert status == 0, said.err
    path = tmp_path / "results" / "nvidia-h100-80gb-hbm3" / "attention_forward.json"
    written = json.loads(path.read_text())
    assert [row["key"] for row in written["rows"]] == ["short forward fp16", "long forward fp16"]
    assert [results.problem_of(row) for row in written["rows"]] == [SHORT, LONG]
    (environment,) = [taken["environment"] for taken in written["runs"].values()]
    assert environment["gpu_name"] == GPU.gpu_name
    assert path.read_text().count('\n{"key":') == len(written["rows"])  # a row is a line
    assert "\nlong   forward  " in said.out
    query = Query(problem=SHORT, arch=POLICY.name, environment=GPU)
    for layer in (RecordStore(tmp_path / "records"), ShippedRecords(tmp_path / "tuned")):
        hit = layer.find(query)
        assert isinstance(hit, Hit)
        wanted = best if confirmed_pick == "best" else POLICY.default(SHORT)
        assert (hit.record.candidate, hit.record.confirmed) == (wanted, True)
        shipped = hit.layer == "shipped"
        names = {entry.candidate.name for entry in hit.record.entries}
        assert (names == {hit.record.pick, hit.record.default}) == shipped


def test_picks_alone_are_raced_without_their_defaults_and_settle_nothing(
    forward_of_two: Suite, tmp_path: Path
) -> None:
    _, best, *_ = candidates_of(SHORT, [SHORT])
    with settings.override(cache_dir=tmp_path, mode="cached"):
        records = RecordStore(tmp_path / "records")
        tuning = FakePipeline(time_us=lambda problem, name: 80.0 if name == best.name else 100.0)
        run_search([SHORT], tuning, records)
        dispatch.invalidate()
        session = session_of(
            trials([forward_of_two.name], words=["short"]),
            lambda problem, name: 120.0 if name == FLASH_NAME else 100.0,
            defaults=False,
        )
        assert run.compare(session, tmp_path / "results", records, tmp_path / "tuned") == 0
        assert session.measurer.raced == [[best.name, FLASH_NAME]]  # type: ignore[attr-defined]
        hit = records.find(Query(problem=SHORT, arch=POLICY.name, environment=GPU))
    assert isinstance(hit, Hit)
    assert not hit.record.confirmed
    assert not (tmp_path / "tuned").exists()


def test_missed_bars_are_said_and_are_the_status(
    forward_of_two: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with settings.override(cache_dir=tmp_path, mode="off"):
        session = session_of(trials([forward_of_two.name]), lambda problem, name: 100.0)
        assert run.compare(session, tmp_path, RecordStore(tmp_path)) == 1
    assert "missed: sdpa_flash forward: geometric_mean" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = FakePipeline()
    monkeypatch.setattr(pipeline, "can_measure", lambda: False)
    monkeypatch.setattr(run, "LocalPipeline", lambda policy, in_force: pipeline)
    monkeypatch.setattr(run, "resolve", lambda name: resolve("H200"))
    arguments = ["tune", "--suite", "attention_forward", "--cache-dir", str(tmp_path)]
    assert run.main(arguments) == 2
    assert "no GPU" in capsys.readouterr().err

    def refuse(name: str | None) -> None:
        raise UnsupportedArchitectureError("this machine has no CUDA driver")

    monkeypatch.setattr(run, "resolve", refuse)
    assert run.main(arguments) == 2
    assert "no CUDA driver" in capsys.readouterr().err


def test_all_is_both_halves_each_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []

    class Done:
        returncode = 0

    def start(command: list[str], **rest: Any) -> Done:
        commands.append(command[3:])
        return Done()

    monkeypatch.setattr(subprocess, "run", start)
    rest = ["--suite", "attention_forward", "--filter", "d64", "--seed", "3"]
    assert run.main(["all", *rest]) == 0
    assert commands == [[half, *rest] for half in ("tune", "compare")]
    Done.returncode = 1
    assert run.main(["all", *rest]) == 1
    assert len(commands) == 3


def test_a_file_is_compact_and_keeps_its_figures(tmp_path: Path) -> None:
    document = {"a": 1.0, "rows": [{"x": 1.23456789, "y": [1e-7 / 3, None]}, {"x": 2**40 + 0.5}]}
    results.write(tmp_path / "deep" / "file.json", document)
    text = (tmp_path / "deep" / "file.json").read_text()
    assert (
        text
        == '{\n"a": 1,\n"rows": [\n{"x":1.23457,"y":[3.33333e-08,null]},\n{"x":1099510000000}\n]\n}\n'
    )
