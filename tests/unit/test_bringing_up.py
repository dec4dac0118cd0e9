from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import H100, measured_specs, resolution, resolve
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.core.outcome import BuildFailed, Infeasible, Ok, Outcome, Wrong
from attention_autotuner.errors import RecordError, StoreError
from attention_autotuner.settings import Settings
from attention_autotuner.tuning import sweep
from attention_autotuner.tuning.bring_up import BroughtUp, bring_up
from attention_autotuner.tuning.progress import Event
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipping import shipped
from attention_autotuner.tuning.spec_measuring import expected_peaks
from attention_autotuner.tuning.sweep_plan import (
    CONFIRM_SECONDS,
    CONFIRM_START_SECONDS,
    RACE_SECONDS,
    SET_UP_SECONDS,
    racing_seconds,
)
from attention_autotuner.tuning.sweeps import default_sweep, only
from tests.devices import H200
from tests.fake_machine import PEAKS, FakeMachine, FakeSweepPipeline

FEW = only(default_sweep(), ["retention", "forward"])
D64 = only(default_sweep(), ["forward", "d64"])
POLICY = H100(H200_SPEC)
HEADER = '{"schema": 3, "gpu_name": "NVIDIA H200", "environments": {}}'


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Settings]:
    """Settings with a cache of their own."""
    with settings.override(cache_dir=tmp_path / "cache") as changes:
        resolution.forget_measured()
        yield changes
    resolution.forget_measured()


def quicker_than_defaults(name: str) -> float:
    """Everything beats the defaults by 20 %, the lesser names by a little more."""
    return 100.0 if name in swept_defaults() else 83.0 + len(name) / 1000


@functools.cache
def swept_defaults() -> set[str]:
    return {POLICY.default(problem).name for problem in default_sweep()}


def test_a_gpu_is_described_tuned_and_written_down(here: Settings, tmp_path: Path) -> None:
    machine = FakeMachine(work=FakeSweepPipeline(time_us=quicker_than_defaults))
    said: list[Event] = []
    out = tmp_path / "out"

    result = bring_up(machine, FEW, here, output=out, listener=said.append)

    assert result.sweep is not None
    assert result.plan is not None
    assert [settled.status for settled in result.sweep.settled] == ["measured"] * len(FEW)
    for settled in result.sweep.settled:
        assert settled.record is not None
        assert settled.record.confirmed
        assert settled.record.pick != settled.record.default
        assert settled.gain == pytest.approx(0.2, abs=0.02)
        assert settled.record.entry(settled.record.default) is not None  # it was in the race
    assert sorted(machine.work.built) == sorted(
        candidate.name for candidate in result.plan.candidates
    )
    assert sorted(machine.work.verified) == sorted(machine.work.built)
    assert {event.phase for event in said} == {"peaks", "build", "verify", "race", "confirm"}
    # What is written: the picks in the form of the package, the spec, the properties, and all of it as a report.
    assert sorted(path.name for path in out.iterdir()) == [
        "nvidia-h200.bring_up.json",
        "nvidia-h200.evidence.jsonl",
        "nvidia-h200.jsonl",
        "nvidia-h200.properties.json",
        "nvidia-h200.spec.json",
    ]
    assert len(shipped(out, "NVIDIA H200")) == len(FEW)
    assert measured_specs.read(out / "nvidia-h200.spec.json") == result.measured
    report = json.loads((out / "nvidia-h200.bring_up.json").read_text())
    assert report["ceilings"]["wgmma_fp16"]["value"] == 790e12
    assert report["peaks"] == {
        "tensor_flops_per_second": 790e12,
        "hbm_bytes_per_second": 4.27e12,
    }
    assert [row["gain"] for row in report["problems"]] == [s.gain for s in result.sweep.settled]
    assert report["seconds"]["total"] >= report["gpu_seconds"]
    assert len(list(RecordStore(here.cache_dir / "records").records())) == len(FEW)


def test_from_then_on_the_gpu_is_what_was_measured(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = bring_up(FakeMachine(), D64, here)
    spec = result.measured.spec
    assert spec.mma_flops_per_clk_per_sm == pytest.approx(632e12 / (132 * 1785e6))
    assert spec.exp_per_clk_per_sm == pytest.approx(15.88, abs=0.01)  # a rate of its own clock
    assert spec.sm_clock_mhz == 1785
    assert spec.hbm_bytes_per_second == 4.27e12
    assert spec.launch_overhead_us == pytest.approx(2.3)
    assert result.measured.policy == "H100"
    assert result.measured.sources["l2_bytes_per_clk"] == (
        "measured on NVIDIA H200, 2026-11-21, driver 580.95.05: l2"
    )
    assert result.measured.sources["num_sms"] == "driver"
    monkeypatch.setattr(resolution, "probe", lambda device: H200)
    monkeypatch.setattr(resolution, "current_device", lambda: 0)
    for policy in (resolve(None), resolve("H200"), resolve("nvidia h200"), result.policy):
        assert isinstance(policy, H100)
        assert policy.spec == spec
    assert resolve("H100").spec != spec


def test_what_could_not_be_measured_keeps_its_number(here: Settings) -> None:
    machine = FakeMachine(peaks={**PEAKS, "l2": Infeasible(reason="no code")})
    result = bring_up(machine, D64, here)
    assert result.measured.spec.l2_bytes_per_clk == H200_SPEC.l2_bytes_per_clk
    assert result.measured.sources["l2_bytes_per_clk"] == "not measured, the policy's"
    # A later run measures again what failed.
    assert not bring_up(machine, D64, here).reused


def test_an_unknown_gpu_gets_a_policy_of_its_own(here: Settings) -> None:
    device = replace(H200, name="NVIDIA RTX PRO 6000", compute_capability=(12, 0), num_sms=188)
    environment = replace(FakeMachine().work.environment, gpu_name=device.name, num_sms=188)
    machine = FakeMachine(device=device, work=FakeSweepPipeline(environment=environment))
    result = bring_up(machine, D64, here)
    assert result.measured.policy is None
    assert result.policy.name == result.measured.spec.name == "RTXPRO6000"
    assert result.policy.build_arch == "120"
    assert not any(name.startswith("wgmma") for name in machine.measured[0])
    assert resolve("RTX PRO 6000").spec == result.measured.spec


def statuses(result: BroughtUp) -> list[str]:
    assert result.sweep is not None
    return [settled.status for settled in result.sweep.settled]


@pytest.mark.parametrize("ratio", [1.0, 1.009, 0.9])
def test_a_pick_that_a_second_process_does_not_confirm_leaves_the_default(
    here: Settings, ratio: float
) -> None:
    work = FakeSweepPipeline(time_us=quicker_than_defaults, confirm_ratio=lambda doubt: ratio)
    result = bring_up(FakeMachine(work=work), FEW, here)
    assert result.sweep is not None
    for settled in result.sweep.settled:
        assert settled.record is not None
        assert (settled.record.pick, settled.record.confirmed) == (settled.record.default, True)
        assert settled.gain == 0.0


def test_a_gain_within_the_noise_is_not_even_asked_about(here: Settings) -> None:
    defaults = {POLICY.default(problem).name for problem in FEW}
    work = FakeSweepPipeline(time_us=lambda name: 100.0 if name in defaults else 99.5)
    assert statuses(bring_up(FakeMachine(work=work), FEW, here)) == ["measured"] * len(FEW)
    assert work.asked == []


def test_while_the_second_process_fails_the_default_serves(here: Settings) -> None:
    work = FakeSweepPipeline(time_us=quicker_than_defaults, confirm_ratio=lambda doubt: None)
    result = bring_up(FakeMachine(work=work), FEW, here)
    assert result.sweep is not None
    assert statuses(result) == ["unconfirmed"] * len(FEW)
    assert all(
        s.record is not None and s.record.pick == s.record.default for s in result.sweep.settled
    )
    assert shipped(here.cache_dir / "bring_up" / "nvidia-h200", "NVIDIA H200") == []
    # The next run asks again, and only then is the pick replaced.
    work.confirm_ratio = lambda doubt: 1.2
    again = bring_up(FakeMachine(work=work), FEW, here)
    assert statuses(again) == ["measured"] * len(FEW)


def test_what_is_measured_is_not_measured_again_unless_asked(here: Settings) -> None:
    machine = FakeMachine(work=FakeSweepPipeline(time_us=quicker_than_defaults))
    first = bring_up(machine, FEW, here)
    machine.work.built.clear()
    second = bring_up(machine, FEW, here)
    assert second.reused
    assert statuses(second) == ["recorded"] * len(FEW)
    assert machine.work.built == []
    assert len(machine.measured) == 1
    assert first.sweep is not None
    assert second.sweep is not None
    assert [s.gain for s in second.sweep.settled] == pytest.approx(
        [s.gain for s in first.sweep.settled]
    )
    third = bring_up(machine, FEW, here, again=True)
    assert statuses(third) == ["measured"] * len(FEW)
    assert len(machine.measured) == 2


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    here: Settings, tmp_path: Path
) -> None:
    machine = FakeMachine()
    (tmp_path / "a file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write to .*a file/out"):
        bring_up(machine, FEW, here, output=tmp_path / "a file" / "out")
    with (
        settings.override(cache_dir=tmp_path / "a file") as unwritable,
        pytest.raises(StoreError, match=r"cannot write to .*a file/arch"),
    ):
        bring_up(machine, FEW, unwritable, output=tmp_path / "out")
    assert machine.measured == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": 2}', '{"records": 7}', f"{HEADER}\n7", f'{HEADER}\n{{"pick": 7}}'],
)
def test_damaged_picks_are_said_before_anything_is_measured(
    here: Settings, tmp_path: Path, text: str
) -> None:
    machine = FakeMachine()
    (tmp_path / "nvidia-h200.jsonl").write_text(text)
    with pytest.raises(RecordError, match=r"nvidia-h200\.jsonl are damaged"):
        bring_up(machine, FEW, here, output=tmp_path)
    assert machine.measured == []
    assert (tmp_path / "nvidia-h200.jsonl").read_text() == text


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("user", "policy", "V100"), ("user", "schema", 7), ("report", "ceilings", [])],
)
def test_what_an_earlier_run_left_damaged_is_measured_again(
    here: Settings, name: str, field: str, value: object
) -> None:
    machine = FakeMachine()
    first = bring_up(machine, FEW, here)
    user = measured_specs.user_path(here.cache_dir, H200.name)
    path = user if name == "user" else first.files["report"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert not bring_up(machine, FEW, here).reused
    assert bring_up(machine, FEW, here).reused


def test_ctrl_c_keeps_what_is_done_and_the_next_run_goes_on(here: Settings) -> None:
    work = FakeSweepPipeline()
    done: set[str] = set()  # threads decide which problems' kernels are built and raced first

    def interrupt(event: Event) -> None:
        if event.phase == "race" and event.done == 2:
            raise KeyboardInterrupt
        if event.phase == "race" and event.kind == "step":
            done.add(event.message)

    def expected(of_done: str, of_others: str) -> list[str]:
        return [of_done if problem.describe() in done else of_others for problem in FEW]

    result = bring_up(FakeMachine(work=work), FEW, here, listener=interrupt)
    assert result.interrupted
    assert len(done) == 2
    assert statuses(result) == expected("measured", "left")
    assert len(shipped(here.cache_dir / "bring_up" / "nvidia-h200", "NVIDIA H200")) == 2
    after = bring_up(FakeMachine(work=work), FEW, here)
    assert statuses(after) == expected("recorded", "measured")


def test_a_spent_budget_leaves_the_rest(here: Settings) -> None:
    work = FakeSweepPipeline(build_seconds=0.2)
    result = bring_up(FakeMachine(work=work), FEW, here, budget_seconds=1.0)
    assert result.sweep is not None
    assert result.sweep.exhausted
    assert not result.interrupted
    assert statuses(result) == ["left"] * len(FEW)
    assert result.sweep.settled[0].reason == "the budget was spent"
    assert len(work.built) < len(set(POLICY.legal(FEW[0])))


def test_a_budget_that_the_plan_finds_too_short_is_used_all_the_same(here: Settings) -> None:
    budget = racing_seconds(len(FEW)) - 8.0
    work = FakeSweepPipeline(build_seconds=0.05, time_us=quicker_than_defaults)
    result = bring_up(FakeMachine(work=work), FEW, here, budget_seconds=budget)
    assert statuses(result) == ["measured"] * len(FEW)


@pytest.mark.parametrize("hanging", ["a default", "another"])
def test_a_compiler_that_hangs_costs_its_kernel_and_no_time_beyond_the_budget(
    here: Settings, hanging: str
) -> None:
    defaults = [POLICY.default(problem).name for problem in FEW]
    hung: list[str] = []

    class Hanging(FakeSweepPipeline):
        def build(self, kernels: Any, progress: Any, stop: Any = lambda: False) -> Any:
            (name,) = [kernel.name for kernel in kernels]
            if (name in defaults) is (hanging == "a default") and not hung:
                hung.append(name)
            while name in hung and not stop():
                time.sleep(0.01)
            return super().build(kernels, progress, stop)

    began = time.monotonic()
    work = Hanging(time_us=quicker_than_defaults)
    result = bring_up(FakeMachine(work=work, job_count=32), FEW, here, budget_seconds=6.0)
    assert time.monotonic() - began < 7.0
    assert hung[0] not in work.built
    assert result.sweep is not None
    left = {s.problem for s in result.sweep.settled if s.status == "left"}
    assert left == {problem for problem in FEW if POLICY.default(problem).name == hung[0]}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("build")]


def test_where_verifying_is_slow_fewer_kernels_race_and_all_problems_do(here: Settings) -> None:
    def slowly(name: str) -> Outcome:
        time.sleep(0.3)
        return Ok()

    work = FakeSweepPipeline(verify_outcome=slowly)
    needed = 4 * (RACE_SECONDS + SET_UP_SECONDS + CONFIRM_SECONDS) + CONFIRM_START_SECONDS
    machine = FakeMachine(work=work, job_count=32)
    result = bring_up(machine, FEW, here, budget_seconds=needed + 4.0)
    assert statuses(result) == ["measured"] * len(FEW)
    assert result.plan is not None
    assert len(FEW) <= len(work.verified) < len(result.plan.candidates)
    assert {POLICY.default(problem).name for problem in FEW} <= set(work.verified)


def test_races_do_not_wait_for_the_last_build(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "MIN_DOUBTS", 1)
    work = FakeSweepPipeline(build_seconds=0.2, time_us=quicker_than_defaults)
    result = bring_up(FakeMachine(work=work), FEW, here)
    assert statuses(result) == ["measured"] * len(FEW)
    assert work.raced_while_building >= 2
    assert len(work.asked) > 1  # picks are confirmed while there is nothing to race
    assert len(work.built) == len(set(work.built))


def test_kernels_that_fail_are_named_and_cost_nobody_else(here: Settings) -> None:
    defaults = {POLICY.default(problem).name for problem in FEW}
    damaged: dict[str, Outcome] = {}

    def build_outcome(name: str) -> Outcome | None:
        if name not in defaults and not damaged:
            damaged[name] = BuildFailed(reason="ptxas gave up")
        return damaged.get(name)

    result = bring_up(FakeMachine(work=FakeSweepPipeline(build_outcome=build_outcome)), FEW, here)
    assert statuses(result) == ["measured"] * len(FEW)
    assert result.sweep is not None
    assert dict(result.sweep.failures) == damaged


def test_a_class_of_which_nothing_is_right_fails_and_the_others_go_on(here: Settings) -> None:
    work = FakeSweepPipeline(
        verify_outcome=lambda name: Wrong(reason="off by one") if "_d64x64_" in name else Ok()
    )
    result = bring_up(FakeMachine(work=work), FEW, here)
    assert statuses(result) == ["measured", "measured", "measured", "failed"]
    assert result.sweep is not None
    assert "off by one" in result.sweep.settled[3].reason


def test_where_kernels_cannot_run_the_spec_is_measured_all_the_same(here: Settings) -> None:
    result = bring_up(FakeMachine(work=FakeSweepPipeline(gpu=False)), FEW, here)
    assert result.sweep is None
    assert "torch is missing" in result.why_no_sweep
    assert result.files["spec"].is_file()
    assert json.loads(result.files["report"].read_text())["problems"] == []


def test_what_a_spec_promises_is_the_vendors_peak() -> None:
    promised = expected_peaks(POLICY)
    assert promised["wgmma_fp16"] == pytest.approx(989.4e12, rel=2e-3)
    assert promised["hbm_copy"] == 4.8e12
    assert "wgmma_fp16" not in expected_peaks(resolve("A100"))
