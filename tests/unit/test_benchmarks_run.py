"""Suites against peers, up to the point of timing: cases, reasons, intervals, budgets, files and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.core.outcome import BuildFailed, Crashed, Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ArtifactError
from attention_autotuner.serving import dispatch
from attention_autotuner.tuning.racing import Race
from benchmarks import commands
from benchmarks import run as command
from benchmarks.calls import BackwardCall, ForwardCall, StepCall
from benchmarks.confidence import interval, verdict
from benchmarks.gradients import FusedBackwardEntry
from benchmarks.implementations import IMPLEMENTATIONS, WAYS, Implementation
from benchmarks.library_peers import fa2_function, fa3_function, make_sdpa
from benchmarks.peer import GuardedEntry, Peer, PeerError
from benchmarks.suite_results import SuiteFile, rate, speed_text, table
from benchmarks.suite_run import Run
from benchmarks.suites import SUITES, Trial, trials
from tests.fake_benchmark import GPU, LONG, POLICY, SHORT, FakeMeasurer, FakePipeline

MLA = replace(SHORT, dim_qk=192, dim_v=128)
GROUPED = replace(SHORT, heads_kv=8)
LATER = replace(LONG, seqlen_q=4)


# --- cases ----------------------------------------------------------------------------------------


def test_every_case_is_a_problem_of_its_own_with_a_source() -> None:
    for suite in SUITES.values():
        names = [case.name for case in suite.cases]
        assert len(set(names)) == len(names), suite.name
        for case in suite.cases:
            assert case.source.startswith(("arXiv ", "the hidden size")), case.name
            assert case.name == case.name.lower()
            assert " " not in case.name
            for way in case.measured(WAYS):
                problem = case.problem(way, "bf16")
                assert (problem.dtype, problem.direction == "forward") == ("bf16", way == "forward")
                assert POLICY.default(problem).op == problem.op  # there is a kernel for it


def test_work_is_counted_by_the_convention() -> None:
    of = {case.name: case.shape for suite in SUITES.values() for case in suite.cases}
    assert of["llama3_8b_8k"].flops == 4 * 32 * 8192 * 8192 * 128 // 2
    assert of["deepseek_v3_mla_4k"].flops == 2 * 128 * 4096 * 4096 * (192 + 128) // 2
    assert of["flux1_dev_1024"].flops == 4 * 24 * 4608 * 4608 * 128
    assert of["retnet_6_7b"].flops == 2 * 4 * 16 * 2048 * 256 * 512 * 2
    one = of["llama3_8b_batch_1_1_on_8k"]
    assert not one.causal  # a mask would hide nothing, and the convention would halve the work
    assert one.bytes_moved == 2 * 256 * (32 + 8 * 8192)


def test_the_named_models_are_there() -> None:
    names = " ".join(case.name for case in SUITES["models"].cases)
    for model in ("llama3_8b", "llama3_70b", "qwen2_5_7b", "deepseek_v3_mla", "sdxl", "flux1"):
        assert model in names
    assert {"retnet_1_3b", "retnet_6_7b"} <= set(names.split())
    decoded = {case.shape.seqlen_q for case in SUITES["decode"].cases}
    assert decoded == {1, 4, 16}
    assert all(case.shape.seqlen_k >= 8192 for case in SUITES["decode"].cases)
    assert all(case.shape.seqlen_k <= 512 for case in SUITES["short"].cases)


def test_trials_are_chosen_by_suite_word_and_way() -> None:
    assert {t.way for t in trials(["models"], words="llama3_8b")} == {"forward", "step"}
    assert [t.way for t in trials(["models"], words="llama3_8b", ways=["backward"])] == ["backward"]
    assert {t.suite for t in trials(["short", "decode"])} == {"short", "decode"}
    with pytest.raises(ValueError, match=r"no case of decode .* measured step"):
        trials(["decode"], ways=["step"])
    with pytest.raises(ValueError, match="no suite is named 'tall'"):
        trials(["tall"])


# --- peers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("sdpa_flash", MLA, "one head dim, not 192/128"),
        ("sdpa_flash", LATER, None),
        ("sdpa_flash", replace(LATER, causal_alignment="top_left"), "aligned bottom-right"),
        ("sdpa_cudnn", LATER, "top-left"),
        ("sdpa_cudnn", GROUPED, None),
        ("sdpa_efficient", GROUPED, "as many heads"),
        ("flex", LATER, None),
        ("flash_attn_2", SHORT, "not installed"),
        ("flash_attn_3", SHORT, "not installed"),
        ("fla", SHORT, "computes retention, not attention"),
        ("compiled", replace(LONG, op="retnet", mask="decay"), "mask as a tensor"),
    ],
)
def test_a_peer_says_why_it_cannot_run(name: str, problem: Problem, reason: str | None) -> None:
    found = IMPLEMENTATIONS[name].can_run(problem)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_way_is_timed_below_autograd_where_there_are_operators() -> None:
    flash, flex = IMPLEMENTATIONS["sdpa_flash"], IMPLEMENTATIONS["flex"]
    back, grouped = replace(SHORT, direction="backward"), replace(GROUPED, direction="backward")
    assert isinstance(flash.entry(SHORT, "forward"), ForwardCall)
    assert isinstance(flash.entry(back, "backward"), FusedBackwardEntry)
    assert isinstance(flash.entry(grouped, "backward"), BackwardCall)
    assert isinstance(flex.entry(back, "step"), StepCall)
    held = [flash.against(back, "step"), flash.against(grouped, "step"), flex.against(back, "step")]
    assert held == ["step", "autograd", "autograd"]
    fla = IMPLEMENTATIONS["fla"]
    assert [fla.against(LONG, way) for way in WAYS] == ["call", "pick", "autograd"]
    assert fla.peer(LONG, "forward").against == "call"


def test_a_mask_that_ends_at_the_bottom_right_reaches_sdpa() -> None:
    from torch.nn.attention import SDPBackend

    from attention_autotuner.reference import attention

    small = replace(LATER, heads_q=4, heads_kv=4, seqlen_q=3, seqlen_k=9, dim_qk=16, dim_v=16)
    q, k, v = (torch.randn(2, 4, rows, 16) for rows in (3, 9, 9))
    found = make_sdpa(SDPBackend.MATH, lower_right=True)(small)(q, k, v)
    torch.testing.assert_close(found, attention(q, k, v, causal=True)[0])


def test_flash_attn_packages_are_called_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def flash_attn_func(q: Any, k: Any, v: Any, causal: bool) -> Any:
            return (f"{q}{k}{v}", causal)

    monkeypatch.setattr("benchmarks.library_peers.import_module", lambda name: Module)
    assert fa2_function(LONG)("q", "k", "v") == ("qkv", True)
    assert fa3_function(SHORT)("q", "k", "v") == "qkv"  # without the LSE beside it


class Breaks:
    """An entry that raises what it is told to, when it is told to."""

    name = "peer"

    def __init__(self, when: str, error: Exception) -> None:
        self.when, self.error = when, error

    def prepare(self, inputs: Any, outputs: Any) -> None:
        if self.when == "prepare":
            raise self.error

    def run(self, index: int) -> None:
        if self.when == "run":
            raise self.error


@pytest.mark.parametrize("when", ["entry", "prepare", "run"])
@pytest.mark.parametrize(
    "error", [TypeError("no such option"), RuntimeError("no kernel"), ArtifactError("x")]
)
def test_what_a_peer_raises_becomes_an_error_that_a_race_knows(when: str, error: Exception) -> None:
    def make(problem: Problem) -> Any:
        if when == "entry":
            raise error
        return Breaks(when, error)

    peer = Peer(name="peer", title="Peer", entry=make, refusal=lambda problem: "")
    guarded = GuardedEntry(peer, SHORT)

    def call(entry: GuardedEntry) -> None:
        entry.prepare([], [])
        entry.run(0)

    with pytest.raises((RuntimeError, ArtifactError), match=str(error)) as raised:
        call(guarded)
    if when == "entry" or isinstance(error, TypeError):
        assert isinstance(raised.value, PeerError)
        assert str(raised.value).startswith(type(error).__name__)


# --- confidence -----------------------------------------------------------------------------------


def test_an_interval_is_symmetric_in_logarithms() -> None:
    low, high = interval(1.2, 0.01)
    assert low * high == pytest.approx(1.2**2)
    assert high / 1.2 == pytest.approx(exp(1.959964 * 0.01))
    assert list(interval(0.9, 0.0)) == pytest.approx([0.9, 0.9])
    assert interval(1.0, 0.01, 0.99)[1] > interval(1.0, 0.01, 0.95)[1]
    for wrong in ((0.0, 0.1, 0.95), (1.0, -0.1, 0.95), (1.0, 0.1, 1.0)):
        with pytest.raises(ValueError, match="an interval needs"):
            interval(*wrong)
    assert [verdict(*each) for each in ((1.01, 1.1), (0.8, 0.99), (0.99, 1.01))] == [
        "faster", "slower", "even",
    ]  # fmt: skip


def test_an_interval_of_a_race_holds_the_ratio_that_made_it() -> None:
    import random

    noise = random.Random(3)
    race = Race(["ours", "theirs"], keep=["ours", "theirs"])
    for _ in range(40):
        clock = exp(noise.gauss(0.0, 0.1))  # both see it
        noisy = {
            name: clock * time * exp(noise.gauss(0.0, 0.005))
            for name, time in (("ours", 100.0), ("theirs", 117.0))
        }
        race.add(noisy)
    ratio, error = race.compare("theirs", "ours")
    low, high = interval(ratio, error)
    assert low < 1.17 < high
    assert log(high / low) < 0.02  # the clock's 10 % do not widen it


# --- running --------------------------------------------------------------------------------------


def implementation(name: str = "sdpa_flash", **rest: Any) -> Implementation:
    return replace(
        IMPLEMENTATIONS[name], make=lambda problem: lambda q, k, v: q, fused=None, **rest
    )


@pytest.fixture(autouse=True)
def on_a_gpu_of_paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    with settings.override(cache_dir=tmp_path / "cache", mode="cached"):
        dispatch.invalidate()
        yield
    dispatch.invalidate()


class Ticking:
    """A clock that moves by a step whenever it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def a_run(
    wanted: list[Trial],
    time_us: Callable[[Problem, str], float | Outcome] = lambda problem, name: 100.0,
    **rest: Any,
) -> Run:
    given: dict[str, Any] = {
        "peers": [implementation()],
        "policy": POLICY,
        "pipeline": FakePipeline(),
        "measurer": FakeMeasurer(time_us),
        "seconds": 0.1,
        "budget_seconds": None,
        "device_type": None,
        "environment": lambda: replace(GPU, sm_clock_mhz=1700.0, power_draw_w=500.0),
        "alive": lambda: True,
        "say": lambda line: None,
    }
    return Run(trials=wanted, **(given | rest))


def test_rows_hold_ratios_with_intervals_and_where_they_were_taken() -> None:
    slow = {"sdpa_flash": 120.0, "step": 90.0, "autograd": 100.0}
    run = a_run(trials(["models"], words="llama3_8b"), lambda p, name: slow.get(name, 80.0))
    (forward, first), (step, second) = run.rows()
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (forward.way, step.way) == ("forward", "step")
    ratio = first["ratios"]["sdpa_flash"]
    assert ratio["ratio"] == pytest.approx(1.5)
    assert ratio["low"] < 1.5 < ratio["high"]
    assert first["contests"] == {"sdpa_flash": ["pick", "sdpa_flash"]}
    assert first["clocks"]["sm_clock_mhz"] == 1700.0
    assert "arXiv" in first["source"]
    assert second["contests"] == {"sdpa_flash": ["autograd", "sdpa_flash"]}  # heads are grouped
    assert second["ratios"]["sdpa_flash"]["ratio"] == pytest.approx(1.2)
    assert second["ours"] == "step"
    assert second["entries"]["step"]["median_us"] == pytest.approx(90.0)
    assert json.loads(json.dumps(second)) == second


def test_all_kernels_are_built_in_one_batch_before_the_first_race() -> None:
    pipeline = FakePipeline()
    list(a_run(trials(["short"]), pipeline=pipeline).rows())
    assert len(pipeline.batches) == 1
    assert len(set(pipeline.batches[0])) == len(pipeline.batches[0]) > 1


def test_peers_that_break_or_cannot_are_reasons_of_their_row() -> None:
    def time_us(problem: Problem, name: str) -> float | Outcome:
        return Crashed(reason="RuntimeError: no kernel") if name == "sdpa_cudnn" else 100.0

    peers = [implementation(), implementation("sdpa_cudnn"), implementation("sdpa_efficient")]
    wanted = trials(["models"], words="deepseek", ways=["forward"])
    ((trial, row),) = a_run(wanted, time_us, peers=peers).rows()
    assert isinstance(row, dict)
    assert set(row["ratios"]) == {"sdpa_efficient"}
    file = SuiteFile(Path("/nowhere"), "models", GPU, POLICY, peers, 0.1)
    file._rows = {trial.key: {**row, "run": "x"}}
    text = "\n".join(table(file.document()))
    assert "sdpa_flash: it takes one head dim, not 192/128 (1 rows)" in text
    assert "sdpa_cudnn: crashed: RuntimeError: no kernel (1 rows)" in text


def test_a_trial_that_cannot_be_run_is_said_and_the_next_one_is() -> None:
    class Full(FakeMeasurer):
        def measure(self, problem: Problem, *rest: Any, **more: Any) -> Any:
            if problem.dim_qk == 192:
                raise torch.cuda.OutOfMemoryError("no room for the inputs")
            return super().measure(problem, *rest, **more)

    wanted = trials(["models"], words="4", ways=["forward"])
    run = a_run(wanted, measurer=Full(lambda problem, name: 100.0))
    found = {trial.case.name: row for trial, row in run.rows()}
    assert found["deepseek_v3_mla_4k"] == "OutOfMemoryError: no room for the inputs"
    assert isinstance(found["sdxl_self_4096"], dict)


def test_our_own_failure_is_a_row_without_our_time() -> None:
    pipeline = FakePipeline(build_outcome=lambda name: BuildFailed(reason="no compiler"))
    ((_, row),) = a_run(trials(["decode"], words="70b_batch_1_1_on_8k"), pipeline=pipeline).rows()
    assert isinstance(row, dict)
    assert row["entries"]["pick"]["outcome"]["kind"] == "build_failed"
    assert row["ratios"] == {}


def test_a_budget_ends_a_run_before_what_would_not_fit() -> None:
    wanted = trials(["short"], ways=["forward"])
    # One look at the clock before a trial, two around it: 3 s each, so that a third one would end at 9 s.
    run = a_run(wanted, budget_seconds=8.0, clock=Ticking(1.0))
    found = [row if isinstance(row, str) else "timed" for _, row in run.rows()]
    assert found[:2] == ["timed", "timed"]
    assert found[-1] == "the 8 s were used up"
    assert set(found) == {"timed", "the 8 s were used up"}


@pytest.mark.parametrize("end", ["lost", "interrupted"])
def test_a_lost_gpu_or_an_interrupt_ends_the_run_and_keeps_what_there_is(end: str) -> None:
    measurer = FakeMeasurer(lambda problem, name: 100.0)
    alive = iter([True, False])

    def check() -> bool:
        if end == "interrupted":
            measurer.interrupted = True
            return True
        return next(alive)

    run = a_run(trials(["short"], ways=["forward"]), measurer=measurer, alive=check)
    found = [row if isinstance(row, str) else "timed" for _, row in run.rows()]
    timed = 2 if end == "lost" else 1
    assert found[:timed] == ["timed"] * timed
    assert all("stopped answering" in each or "interrupted" in each for each in found[timed:])
    assert len(found) == 5


def test_peers_get_ready_for_what_they_will_run_while_kernels_are_built() -> None:
    told: list[tuple[int, int]] = []
    said: list[str] = []

    def fail(problems: Sequence[Problem], jobs: int) -> None:
        raise OSError("no more processes")

    peers = [
        implementation(ready=lambda problems, jobs: told.append((len(problems), jobs))),
        implementation("flex", ready=fail),
    ]
    wanted = trials(["models"], ways=["forward"])
    found = [row for _, row in a_run(wanted, peers=peers, jobs=3, say=said.append).rows()]
    assert told == [(7, 3)]  # without MLA, and without retention
    assert "flex is not ready: no more processes" in said
    assert all(isinstance(row, dict) for row in found)


# --- files and the command line -------------------------------------------------------------------


def test_rows_of_earlier_runs_stay_until_they_are_measured_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = a_run(trials(["short"]), budget_seconds=8.0, clock=Ticking(1.0))
    assert command.measure(first, tmp_path) == 1
    path = tmp_path / "nvidia-h100-80gb-hbm3" / "suite_short.json"
    before = json.loads(path.read_text())
    assert [row["key"] for row in before["rows"]] == [
        "bert_base_128 forward fp16", "bert_base_128 step fp16",
    ]  # fmt: skip
    assert len(before["unmeasured"]) == 7
    assert set(before["runs"]) == {row["run"] for row in before["rows"]}
    assert "not measured: clip_text step fp16: the 8 s were used up" in capsys.readouterr().out

    late = replace(GPU, time_utc="2026-11-22T00:00:00+00:00")
    again = a_run(
        trials(["short"], ways=["step"]),
        lambda p, name: 50.0,
        pipeline=FakePipeline(environment=late),
    )
    assert command.measure(again, tmp_path) == 0
    after = json.loads(path.read_text())
    rows = {row["key"]: row for row in after["rows"]}
    assert rows["bert_base_128 forward fp16"] == before["rows"][0]
    assert rows["bert_base_128 step fp16"]["entries"]["step"]["median_us"] == 50.0
    assert len(after["runs"]) == 2
    assert len(after["unmeasured"]) == 4  # the forward ones
    shown = capsys.readouterr().out
    assert "bert_base_128" in shown
    assert "1.000 ±" in shown


def test_marks_show_who_is_behind_and_memory_is_the_decoders_unit() -> None:
    assert speed_text({"ratio": 0.9, "low": 0.88, "high": 0.92}) == "0.90 ±2.2%!"
    assert speed_text({"ratio": 1.0, "low": 0.99, "high": 1.01}) == "1.000 ±1.0%="
    assert speed_text(None) == ""
    ((_, row),) = a_run(trials(["decode"], words="70b_batch_1_1_on_8k")).rows()
    assert isinstance(row, dict)
    moved = Problem(**row["problem"]).bytes_moved
    assert rate(row, "pick", "gb_per_s") == pytest.approx(moved / 100.0 / 1e3)
    assert rate(row, "call", "gb_per_s") is None


def test_a_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--suite", "models", "--filter", "deepseek"]) == 0
    said = capsys.readouterr().out
    assert "sdpa_flash: it takes one head dim, not 192/128" in said
    assert "arXiv 2412.19437" in said
    assert command.main(["--list", "--filter", "gpt5"]) == 2
    with pytest.raises(SystemExit):
        command.main(["--peers", "nobody"])
    assert "'nobody' is no peer" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pipeline = FakePipeline()
    monkeypatch.setattr(pipeline, "can_measure", lambda: False)
    monkeypatch.setattr(commands, "LocalPipeline", lambda policy, in_force: pipeline)
    monkeypatch.setattr(commands, "resolve", lambda name: POLICY)
    assert command.main(["--output", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/suite_*"))
