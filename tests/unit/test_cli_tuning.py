"""The command ``tune`` in-process: one direction, a step, and the main job; searches themselves are in test_search."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_autotuner import api as ops
from attention_autotuner import settings
from attention_autotuner.arch import resolve
from attention_autotuner.cli import main, main_job, results, serving, tuning
from attention_autotuner.cli.names import short_names
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.core.outcome import Ok
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.tuning.racing import Timing
from attention_autotuner.tuning.result import Row, TuneResult
from attention_autotuner.tuning.spills import SPILL_WORTH_TIMING
from attention_autotuner.tuning.step import StepResult
from tests.fake_pipeline import FakeBuilt, report

SMALL = ["--device-type", "A100", "--seqlen", "512", "--dim-qk", "64"]
PROBLEM = Problem(seqlen_q=512, seqlen_k=512, dim_qk=64, dim_v=64)
BACKWARD = replace(PROBLEM, direction="backward")

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Any:
    """An empty cache of its own for each test."""
    with settings.override(cache_dir=tmp_path / "cache") as changed:
        yield changed.cache_dir


def run_json(capsys: Capture, *arguments: str, status: int = 0) -> Any:
    """Run a command with ``--json`` and read its one object."""
    assert main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_tune_without_building_ranks(capsys: Capture) -> None:
    said = run_json(capsys, "tune", *SMALL, "--effort", "none", "--top-k", "4")
    assert said["status"] == "predicted"
    assert len(said["candidates"]) == 5
    assert main(["tune", *SMALL, "--effort", "none"]) == 0
    assert f"pick: {short_names(said['pick'])}\n" in capsys.readouterr().out


def result_of(
    *,
    interrupted: bool = False,
    status: str = "measured",
    problem: Problem = PROBLEM,
    artifact: Path | None = None,
) -> TuneResult:
    """A finished search over two candidates."""
    policy = resolve("A100")
    default = policy.default(problem)
    pick = next(other for other in policy.legal(problem) if other != default)
    rows = [
        Row(
            candidate=candidate,
            estimate=estimate(problem, candidate, policy.spec),
            outcome=Ok(),
            built=None if artifact is None else FakeBuilt(path=artifact, report=report()),
            timing=Timing(
                name=candidate.name,
                outcome=Ok(),
                median_us=100.0 * ratio,
                spread_us=1.0,
                samples=20,
                ratio_to_best=ratio,
                error=0.001,
            ),
        )
        for candidate, ratio in ((pick, 1.0), (default, 1.1))
    ]
    return TuneResult(
        problem=problem,
        arch="A100",
        status=status,  # type: ignore[arg-type]  # a parameter of the test's own
        pick=pick,
        default=default,
        rows=tuple(rows),
        gain=0.1,
        confirmed=True,
        interrupted=interrupted,
        record_path=Path("/records/one.json"),
    )


def test_a_measured_result_is_a_ranked_table_and_the_files(capsys: Capture) -> None:
    results.print_result(result_of())
    said = capsys.readouterr().out
    assert "measured ranking of 2 candidates" in said
    assert "10.0 % faster than the default (confirmed by a second process); predicted -" in said
    assert "wrote /records/one.json" in said
    assert said.index("| pick") < said.index("| default")


def test_a_ranking_says_its_gpu_and_why_a_default_stays_behind_lower_estimates(
    capsys: Capture,
) -> None:
    flags = ["--dim-qk", "64", "--effort", "none", "--top-k", "2"]
    assert main(["tune", "--device-type", "A100", *flags]) == 0
    assert "the default: nothing was measured, and no estimate is" in capsys.readouterr().out
    assert main(["tune", "--device-type", "H200", *flags, "--causal"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("attention forward fp16 b4 h16 s4096 d64 causal on H200: predicted")
    assert "nothing was measured" not in said  # the default has the lowest one


def test_ctrl_c_prints_the_best_so_far_and_is_status_130(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: result_of(interrupted=True))
    assert main(["tune", *SMALL]) == 130
    said = capsys.readouterr().out
    assert "interrupted: this is the best so far" in said
    assert f"pick: {short_names(result_of().pick.name)}," in said


def test_ctrl_c_before_anything_is_known_is_status_130(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupt)
    assert main(["tune", *SMALL]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


def step_of(*, interrupted: bool = False) -> StepResult:
    """A finished step."""
    return StepResult(
        forward=result_of(status="recorded"),
        backward=result_of(status="recorded", problem=BACKWARD),
        source="measured",
        picks_us=270.0,
        defaults_us=300.0,
        gain=1 / 9,
        interrupted=interrupted,
    )


def test_tune_step_without_building_ranks_both_directions(capsys: Capture) -> None:
    flags = ["tune", *SMALL, "--direction", "step", "--effort", "none", "--top-k", "2"]
    said = run_json(capsys, *flags, "--backward-budget", "9")
    assert [said[name]["direction"] for name in ("forward", "backward")] == ["forward", "backward"]
    estimates = {
        name: {row["name"]: row["estimate_us"] for row in said[name]["candidates"]}
        for name in ("forward", "backward")
    }
    expected = sum(estimates[name][said[name]["pick"]] for name in estimates)
    assert said["step"]["source"] == "predicted"
    assert said["step"]["picks_us"] == pytest.approx(expected)
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "step, predicted: " in out
    assert out.count("pick: ") == 2


def test_the_commands_options_reach_the_search(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Problem, dict[str, Any]]] = []

    def step(problem: Problem, policy: Any, **options: Any) -> StepResult:
        asked.append((problem, options))
        return step_of(interrupted=True)

    monkeypatch.setattr(tuning, "tune_step", step)
    flags = ["--direction", "step", "--deterministic", "--budget", "7", "--backward-budget", "9"]
    assert main(["tune", *SMALL, *flags, "--no-confirm"]) == 130
    problem, options = asked[0]
    assert problem == replace(BACKWARD, deterministic=True)
    assert (options["budget_seconds"], options["backward_budget_seconds"]) == (7.0, 9.0)
    assert (options["confirm"], options["top_k"]) == (False, main_job.TOP_K)
    out = capsys.readouterr().out
    assert (
        "step, measured: 270.0 us with the picks, 300.0 us with the defaults, 11.1 % faster" in out
    )


def test_the_workspace_of_backward_kernels_is_reported(capsys: Capture, fake_kernel: Any) -> None:
    library = fake_kernel(f"-DWORKSPACE_BYTES={3 << 20}")
    result = result_of(problem=BACKWARD, artifact=library)
    results.print_result(result)
    out = capsys.readouterr().out
    assert "workspace MiB" in out
    assert out.count("| 3.0 ") == 2 or out.count(" 3.0 |") == 2
    said = results.result_json(result)
    assert [row["workspace_bytes"] for row in said["candidates"]] == [3 << 20] * 2
    assert results.result_json(result_of())["candidates"][0]["workspace_bytes"] is None
    results.print_result(result_of())
    assert "workspace" not in capsys.readouterr().out


def served(name: str, *, ok: bool = True) -> serving.Served:
    return serving.Served(
        name=name,
        shape=(4, 16, 512, 64),
        ok=ok,
        reason="" if ok else "NaN",
        max_error=1e-4,
        max_allowed=1e-3,
    )


def test_the_main_job_with_a_gpu_serves_and_fails_on_a_wrong_answer(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_job, "detect", lambda: resolve("H200"))
    monkeypatch.setattr(main_job, "tune_step", lambda *_, **__: step_of())
    for ok, status in ((True, 0), (False, 1)):
        tensors = (served("o"), served("dq", ok=ok))
        monkeypatch.setattr(main_job, "serve", lambda problem, tensors=tensors: tensors)
        said = run_json(capsys, "tune", "--all", status=status)
        assert said["gpu"] == "H200"
        assert said["served"] == [tensor.to_json() for tensor in tensors]
        assert said["left_out"] == ""
        assert said["files"] == ["/records/one.json"] * 2 * 3  # retnet's and retention's steps too
        assert said["step"]["picks_us"] == 270.0
    assert said["complaints"] == ["dq is wrong: NaN"]
    monkeypatch.setattr(main_job, "serve", lambda problem: (served("o"), served("dk")))
    assert main(["tune", "--all"]) == 0
    out = capsys.readouterr().out
    assert "flash_attn_func and its gradient, with the picks" in out
    assert "1.00e-04" in out


def test_the_main_job_without_a_gpu_ranks_both_directions_everywhere(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, int]] = []
    problems: list[Problem] = []

    def tune(problem: Problem, device: str, **options: Any) -> TuneResult:
        asked.append((device, problem.direction, options["top_k"]))
        problems.append(problem)
        return replace(result_of(status="predicted", problem=problem), arch=device)

    monkeypatch.setattr(main_job, "tune", tune)
    said = run_json(capsys, "tune", "--all", "--effort", "none")
    assert [(result["arch"], result["direction"]) for result in said["results"]] == [
        (arch, direction)
        for arch in ("A100", "RTX4090", "H100", *("RTX4090", "H100") * 2)
        for direction in ("forward", "backward")
    ]
    assert [problem.op for problem in problems[6:]] == ["retnet"] * 4 + ["retention"] * 4
    assert [width for _, _, width in asked[6:]] == [0] * 8
    assert asked[:2] == [("A100", "forward", 8), ("A100", "backward", 1)]
    assert not any(problem.deterministic for problem in problems)
    problems.clear()
    run_json(capsys, "tune", "--all", "--effort", "none", "--deterministic")
    assert [problem.deterministic for problem in problems[:6]] == [False, True] * 3
    assert said["served"] == []
    assert "its gradient" in said["left_out"]
    # Nothing usable was built here: each direction is tried wider and wider.
    asked.clear()
    run_json(capsys, "tune", "--all", status=1)
    assert [width for arch, name, width in asked if (arch, name) == ("A100", "backward")] == [
        1,
        3,
        8,
    ]


def test_the_main_job_complains_of_too_few_kernels() -> None:
    predicted = [result_of(status="predicted", problem=problem) for problem in (PROBLEM, BACKWARD)]
    assert main_job.complaints_of(predicted) == [
        "A100: 0 usable forward kernels, expected 2",
        "A100: 0 usable backward kernels, expected 1",
    ]


def spilling(monkeypatch: pytest.MonkeyPatch, spilled: Callable[[str], int]) -> None:
    """Have every artifact's report say that the main loop spills so many bytes a thread."""

    def artifact_of(row: Row) -> Any:
        size = spilled(row.candidate.name)
        report = replace(
            parse_ptxas(""), spill_store_bytes=size - 2, spill_load_bytes=2, loop_spills=True
        )
        return SimpleNamespace(name=row.candidate.name, report=report)

    monkeypatch.setattr(main_job, "artifact_of", artifact_of)


@pytest.mark.parametrize(
    ("problem", "spilled", "complaint"),
    [
        (PROBLEM, 4, True),
        (BACKWARD, SPILL_WORTH_TIMING, False),
        (BACKWARD, SPILL_WORTH_TIMING + 4, True),
    ],
)
def test_the_main_job_complains_of_spills_in_main_loops(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, spilled: int, complaint: bool
) -> None:
    spilling(monkeypatch, lambda name: spilled)
    result = result_of(status="predicted", problem=problem, artifact=Path("/kernels/kernel.so"))
    complaints = main_job.complaints_of([result])
    assert [f"{spilled} bytes" in said for said in complaints] == [True] * len(complaints)
    assert bool(complaints) is complaint


@pytest.mark.parametrize(
    ("spilled_by_pick", "spilled_by_other", "status"),
    [(2, 12, 0), (2, 32, 0), (2, 4000, 0), (12, 4000, 0), (4000, 12, 1)],
)
def test_only_a_pick_that_spills_fails_the_main_job_on_a_gpu(
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    spilled_by_pick: int,
    spilled_by_other: int,
    status: int,
) -> None:
    result = result_of(artifact=Path("/kernels/kernel.so"))
    step = replace(step_of(), forward=result)
    spilling(
        monkeypatch,
        lambda name: spilled_by_pick if name == result.pick.name else spilled_by_other,
    )
    monkeypatch.setattr(main_job, "detect", lambda: resolve("H200"))
    monkeypatch.setattr(main_job, "tune_step", lambda *_, **__: step)
    monkeypatch.setattr(main_job, "serve", lambda problem: (served("o"),))
    said = run_json(capsys, "tune", "--all", status=status)
    reason = f"A100: the pick {result.pick.name}: the main loop spills; 4000 bytes a thread in all"
    # The step's forward half, and that of retnet's and of retention's small step.
    assert said["complaints"] == [reason] * 3 * status
    spilling(monkeypatch, lambda name: 2)
    monkeypatch.setattr(main_job, "serve", lambda problem: (served("o", ok=False),))
    assert run_json(capsys, "tune", "--all", status=1)["complaints"] == ["o is wrong: NaN"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_serving_checks_the_output_and_every_gradient(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    problem = Problem(
        direction="backward",
        batch=2,
        heads_q=4,
        heads_kv=2,
        seqlen_q=33,
        seqlen_k=40,
        dim_qk=16,
        dim_v=24,
        causal=True,
        deterministic=deterministic,
    )
    tensors = serving.serve(problem, "cpu")
    assert [(tensor.name, tensor.ok, tensor.reason) for tensor in tensors] == [
        (name, True, "") for name in ("o", "dq", "dk", "dv")
    ]
    assert {tensor.name: tensor.shape for tensor in tensors}["dv"] == (2, 2, 40, 24)
    right = ops.flash_attn_func

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        assert options["deterministic"] is (True if deterministic else None)
        out = right(q, k, v, **options)
        out.register_hook(lambda grad: grad * 1.1)
        return out

    monkeypatch.setattr(ops, "flash_attn_func", wrong)
    assert [tensor.ok for tensor in serving.serve(problem, "cpu")] == [True, False, False, False]
