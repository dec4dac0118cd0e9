"""The command ``bring-up`` in-process, on a machine that only pretends to have a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import resolution, resolve
from attention_autotuner.cli import bringing_up, main
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Wrong
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.operations.gemm.problem import of_sizes
from attention_autotuner.operations.registry import OPERATIONS
from attention_autotuner.settings import Settings
from attention_autotuner.tuning.class_pools import class_of
from attention_autotuner.tuning.sweep_plan import BUILD_SECONDS, make_plan
from attention_autotuner.tuning.sweeps import default_sweep, only
from tests.conftest import REPOSITORY
from tests.devices import H200
from tests.fake_machine import FakeMachine, FakeSweepPipeline

PROPERTIES = REPOSITORY / "tests" / "data" / "properties"
D64 = ["--only", "forward", "d64"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache of its own for each test."""
    with settings.override(cache_dir=tmp_path / "cache") as changed:
        resolution.forget_measured()
        yield changed.cache_dir
    resolution.forget_measured()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """The machine that the command finds."""
    fake = FakeMachine()

    def local(*, settings: Settings) -> FakeMachine:
        fake.job_count = settings.jobs or 2
        return fake

    monkeypatch.setattr(bringing_up, "Machine", local)
    return fake


def run_json(capsys: Capture, *arguments: str, status: int = 0) -> Any:
    assert main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


# --- the sweep and its plan -----------------------------------------------------------------------


def test_the_default_sweep_is_24_problems_of_six_pairs_of_head_dims() -> None:
    sweep = default_sweep()
    assert len(set(sweep)) == 24
    assert len({(p.padded_dim_qk, p.padded_dim_v) for p in sweep}) == 6
    kinds = {(p.op, p.direction) for p in sweep}
    assert kinds == {(o, d) for o in ("attention", "retention") for d in ("forward", "backward")}


def test_more_cores_and_more_time_try_more_candidates() -> None:
    problems = only(default_sweep(), ["forward", "d64"])
    _, policy = bringing_up.read_properties(PROPERTIES / "l40s.json")
    limits = [
        make_plan(problems, policy, budget_seconds=s, jobs=jobs).class_limit
        for s, jobs in ((10, 1), (100, 1), (100, 4), (5000, 16))
    ]
    assert limits == sorted(limits)
    assert (limits[0], limits[-1]) == (1, 8)
    plan = make_plan(problems, policy, budget_seconds=100, jobs=4)
    assert len(plan.candidates) == len(set(plan.candidates))
    assert {policy.default(problem) for problem in problems} <= set(plan.candidates)
    assert plan.seconds >= max(plan.build_seconds, plan.gpu_seconds)


def test_the_build_of_every_kernel_has_its_seconds() -> None:
    assert BUILD_SECONDS.keys() == {
        (op, direction) for kernel in KERNELS.values() for op, direction, _ in kernel.serves
    }
    assert {op for op, _ in BUILD_SECONDS} == set(OPERATIONS)


def test_products_of_matrices_are_planned() -> None:
    plan = make_plan([of_sizes(4096, 4096, 4096)], resolve("H100"), budget_seconds=100, jobs=2)
    assert {candidate.op for candidate in plan.candidates} == {"gemm"}
    assert plan.build_seconds > 0


# --- without a GPU --------------------------------------------------------------------------------


GPUS = [("rtx3090", "RTX3090", "86"), ("l40s", "L40S", "89"), ("rtx5090", "RTX5090", "120")]


@pytest.mark.parametrize(("name", "gpu", "arch"), GPUS)
def test_a_dry_run_says_what_would_be_done(capsys: Capture, name: str, gpu: str, arch: str) -> None:
    path = str(PROPERTIES / f"{name}.json")
    said = run_json(capsys, "bring-up", "--dry-run", "--properties", path, "--only", "d64")
    assert (said["policy"], said["build_arch"]) == (gpu, arch)
    assert len(said["problems"]) == 6
    for row in said["problems"]:
        assert 0 < row["best_us"] <= row["default_us"] < 1e6
    plan = said["plan"]
    assert (plan["problems"], plan["classes"]) == (6, 1)
    assert plan["kernels"] == len({k for group in plan["groups"] for k in group["kernels"]})
    assert 0 < plan["seconds"] < 540
    assert said["built"] == []


@pytest.mark.parametrize("name", [name for name, _, _ in GPUS])
def test_every_class_of_the_sweep_has_legal_candidates_on_gpus_unseen(name: str) -> None:
    _, policy = bringing_up.read_properties(PROPERTIES / f"{name}.json")
    seen = {class_of(problem): problem for problem in default_sweep()}
    assert len(seen) == 16
    for problem in seen.values():
        assert len(policy.legal(problem)) >= 10
        assert isinstance(policy.default(problem), Candidate)


def test_a_dry_run_takes_rates_that_the_file_gives(capsys: Capture, tmp_path: Path) -> None:
    slow = tmp_path / "slow.json"
    data = json.loads((PROPERTIES / "rtx3090.json").read_text())
    slow.write_text(json.dumps({**data, "mma_flops_per_clk_per_sm": 256.0}))
    times = []
    for path in (PROPERTIES / "rtx3090.json", slow):
        said = run_json(capsys, "bring-up", "--dry-run", "--properties", str(path), *D64)
        times.append(said["problems"][0]["best_us"])
    assert times[1] > 1.5 * times[0]


def test_a_sweep_of_the_other_dtype(capsys: Capture, machine: FakeMachine) -> None:
    said = run_json(capsys, "bring-up", "--dtype", "bf16", *D64)
    for row in said["problems"]:
        assert " bf16 " in row["problem"]
        assert "_bf16_" in row["pick"]


def test_a_dry_run_prints_tables(capsys: Capture) -> None:
    path = str(PROPERTIES / "rtx5090.json")
    assert main(["bring-up", "--dry-run", "--properties", path, *D64]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA GeForce RTX 5090: policy RTX5090, built for 120" in text
    assert "attention forward fp16 b8 h32 s2048 d64 causal" in text
    assert "3 problems of one pair of head dims" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"color": 1}, "color is neither a property nor a rate of a spec"),
        ({"sm_clock_mhz": "fast"}, "sm_clock_mhz must be a number, got 'fast'"),
        ({"sm_clock_mhz": 0}, "sm_clock_mhz must be positive, got 0"),
        ({"l2_bytes_per_clk": float("nan")}, "l2_bytes_per_clk must be a number, got nan"),
        ({"num_sms": "82"}, "num_sms must be an integer of at least 1, got '82'"),
        ({"num_sms": 0}, "num_sms must be an integer of at least 1, got 0"),
        ({"memory_bus_bits": -1}, "memory_bus_bits must be an integer of at least 0, got -1"),
    ],
)
def test_a_damaged_properties_file_is_named(
    capsys: Capture, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(asdict(H200) | change))
    assert main(["bring-up", "--dry-run", "--properties", str(path)]) == 1
    assert f"error: {path}: {said}" in capsys.readouterr().err


def test_options_that_do_not_go_together_are_refused(capsys: Capture) -> None:
    for wrong in (["--compile", "1"], ["--properties", "gpu.json"]):
        with pytest.raises(SystemExit, match="2"):
            main(["bring-up", *wrong])
        assert "--properties and --compile are of a --dry-run" in capsys.readouterr().err


def test_a_sweep_that_nothing_is_left_of_is_refused(capsys: Capture, machine: FakeMachine) -> None:
    assert main(["bring-up", "--only", "d65"]) == 1
    assert "no problem of the sweep is described by 'd65'" in capsys.readouterr().err


def test_without_a_gpu_the_dry_run_is_the_way(
    capsys: Capture, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise UnsupportedArchitectureError("this machine has no CUDA driver")

    monkeypatch.setattr(machine, "properties", none)
    assert main(["bring-up"]) == 1
    assert "this machine has no CUDA driver" in capsys.readouterr().err


# --- with one -------------------------------------------------------------------------------------


def test_the_report_says_what_was_found_picked_and_spent(
    capsys: Capture, machine: FakeMachine, tmp_path: Path
) -> None:
    assert main(["bring-up", *D64, "--output", str(tmp_path / "out"), "--jobs", "3"]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA H200: policy H100, built for 90" in text
    assert "measured on NVIDIA H200, 2026-11-21, driver 580.95.05: mma_fp16" in text
    assert "790 TFLOP/s" in text
    assert "4.27 Tbytes/s" in text
    assert "2.30 us" in text
    assert "picks for 3 of 3 problems" in text
    assert "the default" in text
    assert f"wrote {tmp_path / 'out' / 'nvidia-h200.jsonl'}" in text
    assert machine.job_count == 3


def test_the_report_as_json_is_the_file(
    capsys: Capture, machine: FakeMachine, tmp_path: Path
) -> None:
    said = run_json(capsys, "bring-up", *D64, "--output", str(tmp_path))
    assert said == json.loads((tmp_path / "nvidia-h200.bring_up.json").read_text())
    assert said["gpu_name"] == "NVIDIA H200"
    assert len(said["problems"]) == 3


def test_ctrl_c_ends_with_its_status_and_what_is_done(
    capsys: Capture, machine: FakeMachine
) -> None:
    machine.work = FakeSweepPipeline(interrupt_in="measure")
    said = run_json(capsys, "bring-up", *D64, status=130)
    assert said["interrupted"]
    assert {row["status"] for row in said["problems"]} == {"left"}
    main(["bring-up", *D64])
    assert "interrupted: what was measured is kept" in capsys.readouterr().out


def test_a_problem_without_a_usable_kernel_is_a_failure(
    capsys: Capture, machine: FakeMachine
) -> None:
    machine.work = FakeSweepPipeline(verify_outcome=lambda name: Wrong(reason="off by one"))
    said = run_json(capsys, "bring-up", *D64, status=1)
    assert {row["status"] for row in said["problems"]} == {"failed"}


def test_a_machine_without_torch_is_described_and_not_tuned(
    capsys: Capture, machine: FakeMachine
) -> None:
    machine.work = FakeSweepPipeline(gpu=False)
    assert main(["bring-up", *D64]) == 1
    assert "nothing was tuned: kernels cannot be run here" in capsys.readouterr().out


def test_a_gpu_that_is_too_old_is_refused(capsys: Capture, machine: FakeMachine) -> None:
    machine.device = replace(H200, name="Tesla V100", compute_capability=(7, 0))
    assert main(["bring-up"]) == 1
    assert "at least 8.0, Tesla V100 has 7.0" in capsys.readouterr().err
