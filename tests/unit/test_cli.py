"""Every command in-process, with and without --json; what compiles is in tests/build."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings, tune
from attention_autotuner.arch import resolve
from attention_autotuner.cli import (
    caching,
    console,
    doctor,
    main,
    making,
)
from attention_autotuner.cli.names import short_names
from attention_autotuner.codegen.entries import Entry
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.resources import smem_bytes

SMALL = ["--device-type", "A100", "--seqlen", "512", "--dim-qk", "64"]
PROBLEM = Problem(seqlen_q=512, seqlen_k=512, dim_qk=64, dim_v=64)

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


def test_candidates_json_has_the_documented_form(capsys: Capture) -> None:
    said = run_json(capsys, "candidates", *SMALL)
    assert set(said) == {"problem", "candidates", "rejections"}
    assert Problem(**said["problem"]) == PROBLEM
    first = said["candidates"][0]
    assert set(first) == {"name", "family", "config", "smem_bytes", "estimate_us", "limiter"}
    candidate = candidate_from_config(first["config"])
    assert candidate.name == first["name"]
    assert smem_bytes(candidate) == first["smem_bytes"]
    times = [row["estimate_us"] for row in said["candidates"]]
    assert times == sorted(times)
    policy = resolve("A100")
    legal = {candidate.name for candidate in policy.legal(PROBLEM)}
    assert {row["name"] for row in said["candidates"]} == legal
    assert len(said["rejections"]) + len(legal) == len(policy.candidates(PROBLEM))
    assert all(set(row) == {"config", "reason"} for row in said["rejections"])


def test_backward_candidates_are_listed_by_plan_and_the_deterministic_ones_alone(
    capsys: Capture,
) -> None:
    flags = ["candidates", *SMALL, "--direction", "backward"]
    names = {row["name"] for row in run_json(capsys, *flags)["candidates"]}
    alone = run_json(capsys, *flags, "--deterministic")["candidates"]
    assert {row["name"] for row in alone} < names
    assert all(candidate_from_config(row["config"]).deterministic for row in alone)
    assert main([*flags, "--limit", "400", "--full"]) == 0
    said = capsys.readouterr().out
    assert "| one_pass" in said
    assert "| two_kernels" in said
    assert "keys:m" in said
    assert "deterministic" in said


def test_candidates_prints_a_table_of_the_best(capsys: Capture) -> None:
    assert main(["candidates", *SMALL, "--limit", "3"]) == 0
    said = capsys.readouterr().out
    assert "best 3 of" in said
    assert "rejected" in said
    assert "\x1b[" not in said


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], Problem()),
        (["--heads", "8"], Problem(heads_q=8, heads_kv=8)),
        (["--heads", "8", "--heads-kv", "2"], Problem(heads_q=8, heads_kv=2)),
        (["--seqlen", "100"], Problem(seqlen_q=100, seqlen_k=100)),
        (["--seqlen", "100", "--seqlen-k", "7"], Problem(seqlen_q=100, seqlen_k=7)),
        (["--dim-qk", "96"], Problem(dim_qk=96, dim_v=96)),
        (["--dim-qk", "192", "--dim-v", "128"], Problem(dim_qk=192, dim_v=128)),
        (
            ["--dtype", "bf16", "--batch", "2", "--causal"],
            Problem(dtype="bf16", batch=2, causal=True),
        ),
        (
            ["--causal", "--causal-alignment", "top_left"],
            Problem(causal=True, causal_alignment="top_left"),
        ),
        (["--alignment-bytes", "2"], Problem(alignment_bytes=2)),
        (["--op", "attention", "--direction", "forward"], Problem()),
        (["--direction", "backward"], Problem(direction="backward")),
        (
            ["--direction", "backward", "--deterministic"],
            Problem(direction="backward", deterministic=True),
        ),
        (["--op", "retnet"], Problem(op="retnet", mask="explicit")),
        (
            ["--op", "retnet", "--mask", "decay"],
            Problem(op="retnet", mask="decay", causal=True),
        ),
        (
            ["--op", "retention", "--form", "chunkwise"],
            Problem(op="retention", form="chunkwise", causal=True),
        ),
    ],
)
def test_flags_name_the_problem(capsys: Capture, flags: list[str], problem: Problem) -> None:
    said = run_json(capsys, "candidates", "--device-type", "RTX4090", *flags)
    assert Problem(**said["problem"]) == problem


@pytest.mark.parametrize(
    ("flags", "kind", "message"),
    [
        (["--device-type", "A100", "--dim-qk", "20"], "UnsupportedProblemError", "dim_qk must be"),
        (
            ["--device-type", "A100", "--heads", "6", "--heads-kv", "4"],
            "UnsupportedProblemError",
            "6 and 4",
        ),
        (["--device-type", "V100"], "UnsupportedArchitectureError", "'V100'"),
        (["--device-type", "A100", "--deterministic"], "UnsupportedProblemError", "deterministic"),
        (["--device-type", "A100", "--form", "parallel"], "UnsupportedProblemError", "form"),
        (["--device-type", "A100", "--mask", "decay"], "UnsupportedProblemError", "mask"),
    ],
)
def test_a_typed_error_is_one_line_and_status_1_or_that_of_wrong_usage(
    capsys: Capture, flags: list[str], kind: str, message: str
) -> None:
    status = 2 if kind == "UnsupportedProblemError" else 1
    assert main(["candidates", *flags, "--json"]) == status
    captured = capsys.readouterr()
    said = json.loads(captured.out)["error"]
    assert said["type"] == kind
    assert message in said["message"]
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["candidates", "--op", "conv"],
        ["candidates", "--op", "retnet", "--mask", "none"],
        ["candidates", "--limit", "0"],
        ["build", "--count", "1", "--default"],
        ["candidates", "--direction", "step"],
        ["tune", "--budget", "-1"],
        ["tune", "--direction", "backward", "--backward-budget", "3", "--device-type", "A100"],
        ["tune", "--all", "--device-type", "A100"],
        ["cache"],
        ["cache", "gc", "--max-size", "much"],
    ],
)
def test_wrong_usage_is_status_2(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: attention-autotuner" in capsys.readouterr().err


def test_render_prints_what_the_library_renders(capsys: Capture, tmp_path: Path) -> None:
    default = resolve("A100").default(PROBLEM)
    assert main(["render", *SMALL, "--default"]) == 0
    assert capsys.readouterr().out == render(default).text
    said = run_json(capsys, "render", *SMALL, "--candidate", default.name)
    assert [kernel["name"] for kernel in said["kernels"]] == [default.name]
    assert said["kernels"][0]["text"] == render(default).text
    said = run_json(capsys, "render", *SMALL, "--count", "2", "--output", str(tmp_path / "out"))
    for kernel in said["kernels"]:
        assert Path(kernel["file"]).read_text(encoding="utf-8") == kernel["text"]
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_render_says_what_a_kernel_of_one_architecture_is_compiled_for(
    capsys: Capture, tmp_path: Path
) -> None:
    masked = ["--op", "retnet", "--device-type", "H100", "--dim-qk", "64"]
    said = run_json(capsys, "render", *masked, "--default", "--output", str(tmp_path))
    (kernel,) = said["kernels"]
    assert kernel["architecture"] == "90a-real"
    assert Path(kernel["file"]).with_suffix(".architecture").read_text() == "90a-real\n"
    assert main(["render", *masked, "--default", "--output", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(tmp_path.iterdir())) == 2
    said = run_json(capsys, "render", *SMALL, "--output", str(tmp_path / "out"))
    assert said["kernels"][0]["architecture"] is None
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".cu"]


def test_render_to_a_place_that_cannot_be_written_says_so(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = run_json(capsys, "render", *SMALL, "--output", str(tmp_path / "file"), status=1)
    assert str(tmp_path / "file") in said["error"]["message"]


def test_an_unknown_candidate_is_an_error(capsys: Capture) -> None:
    said = run_json(capsys, "render", *SMALL, "--candidate", "no_such", status=1)
    assert said["error"]["type"] == "NoCandidateError"
    assert "'no_such'" in said["error"]["message"]


def test_why_gives_every_point_its_fate(capsys: Capture) -> None:
    said = run_json(capsys, "why", *SMALL)
    policy = resolve("A100")
    assert len(said["explanations"]) == len(policy.candidates(PROBLEM))
    kept = [row for row in said["explanations"] if row["fate"] == "kept"]
    assert [row["name"] for row in kept] == [policy.default(PROBLEM).name]
    assert all(row["reason"] for row in said["explanations"])
    assert [row["layer"] for row in said["passed"]] == ["record", "shipped"]
    assert (said["layer"], said["source"]) == ("default", "default of A100")
    assert main(["why", *SMALL, "--limit", "2"]) == 0
    assert "not legal" in capsys.readouterr().out


class FakeBuild:
    """Stands in for the compiler: remembers what it was asked for, and refuses it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, kernels: Sequence[Any], target: Any, **options: Any) -> list[Any]:
        self.names = [kernel.name for kernel in kernels]
        options["progress"](len(kernels), len(kernels), self.names[-1], 1.0)
        return [BuildFailed(reason="fake", log="/log") for _ in kernels]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild()
    monkeypatch.setattr(making, "build", fake)
    monkeypatch.setattr(making, "find_toolchain", lambda settings: None)
    return fake


def test_build_reports_failures_and_fails(capsys: Capture, refused: FakeBuild) -> None:
    said = run_json(capsys, "build", *SMALL, "--count", "3", status=1)
    assert [kernel["name"] for kernel in said["kernels"]] == refused.names
    assert len(refused.names) == 3
    assert said["kernels"][0]["outcome"] == {
        "kind": "build_failed",
        "reason": "fake",
        "log": "/log",
    }
    assert main(["build", *SMALL]) == 1
    captured = capsys.readouterr()
    assert "build_failed: fake (/log)" in captured.out
    assert "build 1/1" in captured.err


def test_warmup_builds_what_dispatch_would_serve(capsys: Capture, refused: FakeBuild) -> None:
    said = run_json(capsys, "warmup", *SMALL, status=1)
    assert refused.names == [resolve("A100").default(PROBLEM).name]
    assert [kernel["layer"] for kernel in said["kernels"]] == ["default"]


def test_warmup_of_a_step_builds_both_directions_in_one_batch(
    capsys: Capture, refused: FakeBuild
) -> None:
    policy, gradient = resolve("A100"), replace(PROBLEM, direction="backward", deterministic=True)
    said = run_json(capsys, "warmup", *SMALL, "--direction", "step", "--deterministic", status=1)
    assert refused.names == [policy.default(PROBLEM).name, policy.default(gradient).name]
    assert [Problem(**kernel["problem"]) for kernel in said["kernels"]] == [PROBLEM, gradient]
    assert main(["warmup", *SMALL, "--direction", "step"]) == 1
    assert capsys.readouterr().out.count("picked by: default") == 2


def test_cache_commands_on_an_empty_cache(capsys: Capture, cache: Path) -> None:
    assert run_json(capsys, "cache", "ls") == {"root": str(cache), "kernels": [], "records": []}
    assert run_json(capsys, "cache", "verify") == {"checked": 0, "damaged": []}
    assert run_json(capsys, "cache", "gc") == {"removed": [], "freed_bytes": 0}
    assert run_json(capsys, "cache", "rm", "*", status=1) == {"removed": []}
    for action in (["ls"], ["verify"], ["gc", "--max-size", "1M", "--max-age-days", "3"]):
        assert main(["cache", *action]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "bytes_"), [("0", 0), ("17", 17), ("2K", 2048), ("1.5M", 3 << 19), ("2 GiB", 2 << 30)]
)
def test_sizes_are_read_with_their_units(text: str, bytes_: int) -> None:
    assert caching.size(text) == bytes_


def test_a_short_name_removes_its_kernel(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    name = resolve("A100").default(PROBLEM).name
    said: Any = {"state": "built", "path": Path("kernel"), "size_bytes": 1, "last_used": 1.0}
    kernel = Entry(name=name, digest16="0" * 16, **said)
    monkeypatch.setattr(Store, "ls", lambda _: [kernel])
    monkeypatch.setattr(Store, "_remove", lambda _, chosen: chosen)
    (removed,) = run_json(capsys, "cache", "rm", short_names(name))["removed"]
    assert removed["name"] == name
    assert main(["cache", "rm", short_names(name)[:-1]]) == 1


def test_a_negative_age_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        caching.days("-1")


def test_doctor_names_everything_and_what_to_do(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with settings.override(nvcc=str(tmp_path / "no-nvcc")):
        said = run_json(capsys, "doctor", status=1)
    findings = {finding["name"]: finding for finding in said["findings"]}
    assert len(findings) == len(doctor.CHECKS)
    assert findings["nvcc"]["state"] == "broken"
    assert "no-nvcc" in findings["nvcc"]["fix"]
    assert findings["cache"]["state"] == "ok"
    assert all(finding["fix"] for finding in findings.values() if finding["state"] != "ok")


def test_doctor_finds_an_unwritable_cache(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with settings.override(cache_dir=tmp_path / "file"):
        assert doctor.check_cache().state == "broken"


def test_plain_progress_has_phase_count_best_and_time_left(capsys: Capture) -> None:
    with console.progress() as show:
        show("build", 0, 4, "first")
        show("build", 4, 4, "last", best_us=12.5, seconds_left=30.0)
    assert capsys.readouterr().err.splitlines() == [
        "build 0/4: first",
        "build 4/4: last, best 12.5 us, 30 s left",
    ]


def test_the_module_and_its_closed_pipe(tmp_path: Path) -> None:
    environment = {**os.environ, settings.PREFIX + "CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "attention_autotuner", "candidates", "--device-type", "A100"]
    whole = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert whole.startswith("attention forward fp16")
    with subprocess.Popen(
        [*command, "--json"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_a_bad_setting_is_a_typed_error_of_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, settings.PREFIX + "JOBS": "many"}
    command = [sys.executable, "-m", "attention_autotuner", "cache", "ls", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["type"] == "SettingsError"


def test_the_print_setting_shows_a_search_of_a_program(capsys: Capture) -> None:
    with settings.override(print_tuning=True):
        result = tune(PROBLEM, "A100", effort="none", top_k=2)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rank ")
    assert f"{result.pick.name}  <- pick" in said.err
    tune(PROBLEM, "A100", effort="none", top_k=2)
    assert capsys.readouterr().err == ""
