"""Suites against baselines, up to the point of timing: cases, reasons, intervals, budgets, files and the command."""

from __future__ import annotations

import json
import sys
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
from attention_autotuner.tuning.records import RecordStore
from benchmarks import run as command
from benchmarks.baselines import BASELINES
from benchmarks.baselines.base import MODES, Baseline, BaselineError, GuardedEntry
from benchmarks.baselines.flash_attn import FlashAttention2, FlashAttention4, add_site
from benchmarks.baselines.sdpa import FusedBackwardEntry, make_sdpa
from benchmarks.calls import BackwardCall, ForwardCall, Function, StepCall
from benchmarks.results import SuiteFile, interval, rate, speed_text, standing, table
from benchmarks.session import Session
from benchmarks.suites import SUITES, Trial, shape, trials
from tests.fake_benchmark import GPU, LONG, POLICY, SHORT, FakeMeasurer, FakePipeline, session_of

MLA = replace(SHORT, dim_qk=192, dim_v=128)
GROUPED = replace(SHORT, heads_kv=8)
LATER = replace(LONG, seqlen_q=4)


# --- cases ----------------------------------------------------------------------------------------


def test_every_case_is_a_problem_of_its_own_with_a_source() -> None:
    for suite in SUITES.values():
        names = [case.name for case in suite.cases]
        assert len(set(names)) == len(names), suite.name
        for case in suite.cases:
            assert case.source.startswith(("arXiv ", "the hidden size", "square products")), (
                case.name
            )
            assert case.name == case.name.lower()
            assert " " not in case.name
            for (mode,) in case.measured(MODES):
                problem = case.problem(mode, "bf16")
                assert (problem.dtype, problem.direction == "forward") == (
                    "bf16",
                    mode == "forward",
                )
                assert POLICY.default(problem).op == problem.op  # there is a kernel for it


def test_work_is_counted_by_the_convention() -> None:
    of = {case.name: case.shape for suite in SUITES.values() for case in suite.cases}
    assert of["llama3_8b_8k"].flops == 4 * 32 * 8192 * 8192 * 128 // 2
    assert of["deepseek_v3_mla_4k"].flops == 2 * 128 * 4096 * 4096 * (192 + 128) // 2
    assert of["flux1_dev_1024"].flops == 4 * 24 * 4608 * 4608 * 128
    assert of["retnet_6_7b"].flops == 2 * 4 * 16 * 2048 * 256 * 512 * 2
    single = of["llama3_8b_batch_1_1_on_8k"]
    assert not single.causal  # a mask would hide nothing, and the convention would halve the work
    assert single.bytes_moved == 2 * 256 * (32 + 8 * 8192)


def test_a_shape_is_written_as_problems_describe_it() -> None:
    for suite in SUITES.values():
        for case in suite.cases:
            text = case.shape.describe().split(" fp16 ")[1].removesuffix(" explicit")
            fields = {"op": case.shape.op, "mask": case.shape.mask}
            assert shape(text, **fields) == case.shape
    with pytest.raises(ValueError, match="is no shape"):
        shape("b1 h2 d64")


def test_the_named_models_are_there() -> None:
    names = " ".join(case.name for case in SUITES["models"].cases)
    for model in ("llama3_8b", "llama3_70b", "qwen2_5_7b", "deepseek_v3_mla", "sdxl", "flux1"):
        assert model in names
    assert {"retnet_1_3b", "retnet_6_7b"} <= set(names.split())
    decoded = {case.shape.seqlen_q for case in SUITES["decode"].cases}
    assert decoded == {1, 4, 16, 128}
    assert all(case.shape.seqlen_k >= 8192 for case in SUITES["decode"].cases)
    assert all(case.shape.seqlen_k <= 512 for case in SUITES["short"].cases)


def test_trials_are_chosen_by_suite_word_and_mode() -> None:
    llama = ["llama3_8b"]
    assert len({t.modes for t in trials(["models"], words=llama)}) == 3
    (backward,) = trials(["models"], modes=["backward"], words=llama)
    assert (backward.modes, backward.key) == (("backward",), "llama3_8b_8k backward fp16")
    assert {t.suite.name for t in trials(["short", "decode"])} == {"short", "decode"}
    with pytest.raises(ValueError, match=r"no case of decode .* measured step"):
        trials(["decode"], modes=["step"])
    with pytest.raises(ValueError, match="no suite is named 'tall'"):
        trials(["tall"])


# --- baselines ------------------------------------------------------------------------------------


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
        ("flex", replace(LATER, modifications=("softcap", "alibi_slopes")), None),
        ("flex", replace(LATER, modifications=("sinks",)), "not called with sinks"),
        ("sdpa_cudnn", replace(SHORT, window_size=(3, 3)), "not called with window"),
        ("plain", replace(LATER, modifications=("sinks",), window_size=(3, 3)), None),
        ("plain", LATER, "no score modifications"),
        ("flash_attn_2", SHORT, "not installed"),
        ("flash_attn_3", SHORT, "not installed"),
        ("flash_attn_4", SHORT, "not installed"),
        ("flash_attn_4_deterministic", SHORT, "not installed"),
        ("fla", SHORT, "computes retention, not attention"),
        ("copy", SHORT, "memory is not all"),
        ("copy", replace(SHORT, seqlen_q=1), None),
        ("copy", replace(SHORT, seqlen_q=1, direction="backward"), "memory is not all"),
        ("compiled", replace(LONG, op="retnet", mask="decay"), "mask as a tensor"),
    ],
)
def test_a_baseline_says_why_it_cannot_run(name: str, problem: Problem, reason: str | None) -> None:
    answer = BASELINES[name].available(problem)
    assert (reason in answer) if reason else not answer


def test_a_mode_is_timed_below_autograd_where_there_are_operators() -> None:
    flash, flex = BASELINES["sdpa_flash"], BASELINES["flex"]
    back, grouped = replace(SHORT, direction="backward"), replace(GROUPED, direction="backward")
    assert isinstance(flash.entry(SHORT, "forward", "x"), ForwardCall)
    assert isinstance(flash.entry(back, "backward", "x"), FusedBackwardEntry)
    assert isinstance(flash.entry(grouped, "backward", "x"), BackwardCall)
    assert isinstance(Quiet("flex").entry(back, "step", "x"), StepCall)
    labels = [flash.ours(back, "step"), flash.ours(grouped, "step"), flex.ours(back, "step")]
    assert labels == ["step", "autograd", "autograd"]
    fla = BASELINES["fla"]
    assert [fla.ours(LONG, mode) for mode in MODES] == ["call", "pick", "autograd", "autograd"]
    assert flex.modes(["backward", "step", "autograd"]) == ["backward", "step"]
    assert flash.modes(["backward", "step", "autograd"]) == ["backward", "step", "autograd"]


def test_a_mask_that_ends_at_the_bottom_right_reaches_sdpa() -> None:
    from torch.nn.attention import SDPBackend

    from attention_autotuner.reference import attention

    small = replace(LATER, heads_q=4, heads_kv=4, seqlen_q=3, seqlen_k=9, dim_qk=16, dim_v=16)
    q, k, v = (torch.randn(2, 4, rows, 16) for rows in (3, 9, 9))
    output = make_sdpa(SDPBackend.MATH, small, lower_right=True)(q, k, v)
    torch.testing.assert_close(output, attention(q, k, v, causal=True)[0])


def test_flash_attn_packages_are_called_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def flash_attn_func(q: Any, k: Any, v: Any, causal: bool) -> Any:
            return (f"{q}{k}{v}", causal) if causal else f"{q}{k}{v}"

    monkeypatch.setattr("benchmarks.baselines.flash_attn.import_module", lambda name: Module)
    for problem in (LONG, SHORT):  # with the LSE beside the output, and without
        assert FlashAttention2().function(problem)("q", "k", "v") == "qkv"


def test_flash_attn_4_comes_from_a_folder_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(FileNotFoundError, match="flash_attn/cute"):
        add_site(tmp_path)
    assert command.main(["--list", "--flash-attn-4", str(tmp_path)]) == 2
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("")
    (tmp_path / "nvidia_cutlass_dsl" / "dsl_packages").mkdir(parents=True)
    add_site(tmp_path)
    assert sys.path[0] == str(tmp_path)
    assert sys.path[1].endswith("dsl_packages")
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert FlashAttention4().available(MLA) == ""
    session = session_of(trials(["attention_forward"])[:1], extra=("flash_attn_4",))
    names = [baseline.name for baseline in session.baselines_of(session.trials[0])]
    assert names == ["sdpa_flash", "sdpa_cudnn", "flash_attn_4"]
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


class Breaks:
    """An entry that raises an error at one point."""

    name = "x"

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
def test_errors_of_a_baseline_become_those_that_a_race_knows(when: str, error: Exception) -> None:
    def make() -> Any:
        if when == "entry":
            raise error
        return Breaks(when, error)

    guarded = GuardedEntry("x", make)

    def call(entry: GuardedEntry) -> None:
        entry.prepare([], [])
        entry.run(0)

    with pytest.raises((RuntimeError, ArtifactError), match=str(error)) as raised:
        call(guarded)
    if when == "entry" or isinstance(error, TypeError):
        assert isinstance(raised.value, BaselineError)
        assert str(raised.value).startswith(type(error).__name__)


# --- confidence -----------------------------------------------------------------------------------


def test_an_interval_is_symmetric_in_logarithms() -> None:
    low, high = interval(1.2, 0.01)
    assert low * high == pytest.approx(1.2**2)
    assert high / 1.2 == pytest.approx(exp(1.959964 * 0.01))
    assert list(interval(0.9, 0.0)) == pytest.approx([0.9, 0.9])
    for wrong in ((0.0, 0.1), (1.0, -0.1)):
        with pytest.raises(ValueError, match="an interval needs"):
            interval(*wrong)
    assert [standing(ratio, 0.01) for ratio in (1.1, 0.9, 1.01)] == [
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


class Quiet(Baseline):
    """A baseline of the registry, called through autograd, whose function returns q."""

    def __init__(self, name: str = "sdpa_flash", get_ready: Any = None) -> None:
        self.inner = BASELINES[name]
        self.name, self.title, self.op = name, self.inner.title, self.inner.op
        self.compile = get_ready

    def function(self, problem: Problem) -> Function:
        return lambda q, k, v: q

    def limit(self, problem: Problem) -> str:
        return self.inner.limit(problem)

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        if self.compile is not None:
            self.compile(problems, processes)


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
) -> Session:
    return session_of(wanted, time_us, **({"baselines": [Quiet()]} | rest))


def test_rows_hold_ratios_and_where_they_were_taken() -> None:
    slow = {"sdpa_flash forward": 120.0, "sdpa_flash step": 120.0, "step": 90.0, "autograd": 100.0}
    raced = trials(["models"], words=["llama3_8b"], modes=["forward", "step"])
    (forward, first), (step, second) = a_run(raced, lambda _, name: slow.get(name, 80.0)).rows()
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (forward.modes, step.modes) == (("forward",), ("step",))
    ratio = first["ratios"]["sdpa_flash forward"]
    assert ratio["ratio"] == pytest.approx(1.5)
    assert ratio["ours"] == "pick"
    assert first["clocks"]["sm_clock_mhz"] == 1700.0
    # Heads are grouped, so that the baseline's step goes through autograd.
    assert second["ratios"]["sdpa_flash step"]["ours"] == "autograd"
    assert second["ratios"]["sdpa_flash step"]["ratio"] == pytest.approx(1.2)
    assert second["ours"] == "step"
    assert second["entries"]["step"]["median_us"] == pytest.approx(90.0)
    assert json.loads(json.dumps(second)) == second


def test_all_kernels_are_built_in_one_batch_before_the_first_race() -> None:
    pipeline = FakePipeline()
    list(a_run(trials(["short"]), pipeline=pipeline).rows())
    assert len(pipeline.batches) == 1
    assert len(set(pipeline.batches[0])) == len(pipeline.batches[0]) > 1


def test_baselines_that_fail_or_cannot_are_reasons_of_their_row(tmp_path: Path) -> None:
    def time_us(problem: Problem, name: str) -> float | Outcome:
        return Crashed(reason="RuntimeError: no kernel\n  input") if "cudnn" in name else 100.0

    baselines = [Quiet(name) for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")]
    wanted = trials(["models"], words=["deepseek"], modes=["forward"])
    ((trial, row),) = a_run(wanted, time_us, baselines=baselines).rows()
    assert isinstance(row, dict)
    assert set(row["ratios"]) == {"sdpa_efficient forward"}
    file = SuiteFile(tmp_path, SUITES["models"], GPU, POLICY, 0.1)
    file.take(trial, row)
    text = "\n".join(table(file.document()))
    assert "sdpa_flash forward: it takes one head dim, not 192/128 (1 rows)" in text
    assert "sdpa_cudnn forward: crashed: RuntimeError: no kernel (1 rows)" in text


def test_a_trial_that_cannot_be_run_is_said_and_the_next_one_is() -> None:
    class Full(FakeMeasurer):
        def measure(self, problem: Problem, *rest: Any, **more: Any) -> Any:
            if problem.dim_qk == 192:
                raise torch.cuda.OutOfMemoryError("no room for the inputs")
            return super().measure(problem, *rest, **more)

    wanted = trials(["models"], words=["4"], modes=["forward"])
    run = a_run(wanted, measurer=Full(lambda problem, name: 100.0))
    rows = {trial.case.name: row for trial, row in run.rows()}
    assert rows["deepseek_v3_mla_4k"] == "OutOfMemoryError: no room for the inputs"
    assert isinstance(rows["sdxl_self_4096"], dict)


def test_our_own_failure_is_a_row_without_our_time() -> None:
    pipeline = FakePipeline(build_outcome=lambda name: BuildFailed(reason="no compiler"))
    ((_, row),) = a_run(trials(["decode"], words=["70b_batch_1_1_on_8k"]), pipeline=pipeline).rows()
    assert isinstance(row, dict)
    assert row["entries"]["pick"]["outcome"]["kind"] == "build_failed"
    assert row["ratios"] == {}


def test_a_budget_ends_a_run_before_what_would_not_fit() -> None:
    wanted = trials(["short"], modes=["forward"])
    # One look at the clock before a trial, two around it: 3 s each, so that a third one would end at 9 s.
    run = a_run(wanted, budget_seconds=8.0, clock=Ticking(1.0))
    outcomes = [row if isinstance(row, str) else "timed" for _, row in run.rows()]
    assert outcomes[:2] == ["timed", "timed"]
    assert outcomes[-1] == "the 8 s were used up"
    assert set(outcomes) == {"timed", "the 8 s were used up"}


@pytest.mark.parametrize("end", ["lost", "interrupted"])
def test_a_lost_gpu_or_an_interrupt_ends_the_run_and_keeps_what_there_is(end: str) -> None:
    measurer = FakeMeasurer(lambda problem, name: 100.0)
    alive = iter([True, False])

    def check() -> bool:
        if end == "interrupted":
            measurer.interrupted = True
            return True
        return next(alive)

    run = a_run(trials(["short"], modes=["forward"]), measurer=measurer, alive=check)
    outcomes = [row if isinstance(row, str) else "timed" for _, row in run.rows()]
    timed = 2 if end == "lost" else 1
    assert outcomes[:timed] == ["timed"] * timed
    assert all("stopped answering" in text or "interrupted" in text for text in outcomes[timed:])
    assert len(outcomes) == 5


def test_baselines_get_ready_while_kernels_are_built() -> None:
    calls: list[tuple[int, int]] = []
    said: list[str] = []

    def fail(problems: Sequence[Problem], jobs: int) -> None:
        raise OSError("no more processes")

    baselines = [
        Quiet(get_ready=lambda problems, jobs: calls.append((len(problems), jobs))),
        Quiet("flex", get_ready=fail),
    ]
    wanted = trials(["models"], modes=["forward"])
    rows = [row for _, row in a_run(wanted, baselines=baselines, jobs=3, say=said.append).rows()]
    assert calls == [(8, 3)]  # without MLA, and without retention
    assert "flex is not ready: no more processes" in said
    assert all(isinstance(row, dict) for row in rows)


# --- files and the command line -------------------------------------------------------------------


def test_rows_of_earlier_runs_stay_until_they_are_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = a_run(trials(["short"]), budget_seconds=8.0, clock=Ticking(1.0))
    assert command.compare(first, tmp_path, RecordStore(tmp_path)) == 1
    path = tmp_path / "nvidia-h100-80gb-hbm3" / "short.json"
    before = json.loads(path.read_text())
    assert [row["key"] for row in before["rows"]] == [
        "bert_base_128 forward fp16", "bert_base_128 step fp16",
    ]  # fmt: skip
    assert len(before["unmeasured"]) == 7
    assert set(before["runs"]) == {row["run"] for row in before["rows"]}
    assert "not measured: clip_text step fp16: the 8 s were used up" in capsys.readouterr().out

    late = replace(GPU, time_utc="2026-11-22T00:00:00+00:00")
    again = a_run(
        trials(["short"], modes=["step"]),
        lambda p, name: 50.0,
        pipeline=FakePipeline(environment=late),
    )
    assert command.compare(again, tmp_path, RecordStore(tmp_path)) == 0
    after = json.loads(path.read_text())
    rows = {row["key"]: row for row in after["rows"]}
    assert rows["bert_base_128 forward fp16"] == before["rows"][0]
    assert rows["bert_base_128 step fp16"]["entries"]["step"]["median_us"] == 50.0
    assert len(after["runs"]) == 2
    assert len(after["unmeasured"]) == 4  # the forward ones
    shown = capsys.readouterr().out
    assert "bert_base_128" in shown
    assert "1.000 ±" in shown


def test_marks_show_losses_and_memory_is_the_decoders_unit() -> None:
    assert speed_text({"ratio": 0.9, "error": 0.01}) == "0.90 ±2.0%!"
    assert speed_text({"ratio": 1.0, "error": 0.01}) == "1.000 ±2.0%="
    assert speed_text(None) == ""
    ((_, row),) = a_run(trials(["decode"], words=["70b_batch_1_1_on_8k"])).rows()
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
        command.main(["--baselines", "nobody"])
    assert "'nobody' is no baseline" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pipeline = FakePipeline()
    monkeypatch.setattr(pipeline, "can_measure", lambda: False)
    monkeypatch.setattr(command, "LocalPipeline", lambda policy, in_force: pipeline)
    monkeypatch.setattr(command, "resolve", lambda name: POLICY)
    assert command.main(["--output", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*.json"))
