"""The command line's manners: wrong usage, help, spellings, errors in its own words, signals, and doctor's end."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.cli import doctor, entry, main, main_job, making
from attention_autotuner.cli.doctor import Finding
from attention_autotuner.core.problem import DIRECTIONS, Problem
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.version import __version__
from tests.conftest import REPOSITORY

Capture = pytest.CaptureFixture[str]
A100 = ["--device-type", "A100"]
NO_GPU = "this machine has no CUDA driver: libcuda.so.1 cannot be loaded"


def refused(capsys: Capture, *arguments: str) -> str:
    """The stderr of a command line that is wrong usage."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["candidates", "--seqlen", "4x"], "argument --seqlen: must be an integer such as 4096"),
        (["candidates", "--dtype", "fp64"], "argument --dtype: invalid choice: 'fp64'"),
        (["cache", "gc", "--max-size", "much"], "must be a size such as 500M"),
        (["tune", "--all", *A100], "--all chooses the GPUs itself"),
        (["why", "--window-size", "-1"], "must be two integers such as 1023,0, got '-1'"),
        (["why", "--packed-rows", "100"], "must be two integers such as 17000,17000, got '100'"),
    ],
)
def test_wrong_usage_is_one_line_of_usage_and_the_error(
    capsys: Capture, arguments: list[str], error: str
) -> None:
    usage, said = refused(capsys, *arguments).splitlines()
    assert usage.startswith(f"usage: attention-autotuner {arguments[0]}")
    assert said.startswith("error: ")
    assert error in said


def test_the_version_is_printed(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"attention-autotuner {__version__}\n"


def problem_flags(verb: str) -> dict[str, Any]:
    """The defaults of a command's problem options, by their flags."""
    defaults = vars(entry.make_parser().parse_args([verb]))
    return {
        f"--{name.replace('_', '-')}": value
        for name, value in defaults.items()
        if name not in ("json", "full", "run", "usage_error", "command", "limit")
    }


def test_help_says_every_default(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["why", "--help"])
    text = " " + " ".join(capsys.readouterr().out.partition("problem:")[2].split())
    for flag, default in problem_flags("why").items():
        about = text.partition(f" {flag} ")[2].partition(" --")[0]
        if default not in (None, False):
            assert f"default: {default}" in about, flag
        elif default is None:
            assert "default: " in text.partition(f" {flag} ")[2][:150], flag


def test_the_page_has_every_problem_option_with_its_default() -> None:
    page = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    part = page.split("## Naming a problem", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `--")]
    listed: dict[str, str] = {}
    for options, default, *_ in rows:
        flags = re.findall(r"--[\w-]+", options)
        defaults = default.split(", ")
        for flag, value in zip(flags, defaults, strict=True):
            listed[flag] = value.strip("`")
    flags_of_parser = problem_flags("why")
    assert listed.keys() == flags_of_parser.keys()
    for flag, value in flags_of_parser.items():
        if value not in (None, False):
            assert listed[flag] == str(value), flag


def test_the_page_names_the_commands_that_take_a_step() -> None:
    parser = entry.make_parser()
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    taking = []
    for verb, command in verbs.choices.items():
        for action in command._actions:
            if "--direction" in action.option_strings:
                assert set(DIRECTIONS) <= set(action.choices)
                taking += [verb] * ("step" in action.choices)
    page = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `--direction`"))
    assert (
        re.findall(r"`(\w+)`", row.partition("or `backward`")[2].partition("`step`")[0]) == taking
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--seqlen", "4k"], Problem()),
        (["--seqlen", "4K", "--seqlen-k", "1k"], Problem(seqlen_k=1024)),
        (["--dtype", "float16"], Problem()),
        (["--dtype", "half"], Problem()),
        (["--dtype", "bfloat16"], Problem(dtype="bf16")),
        (["--dtype", "BF16"], Problem(dtype="bf16")),
        (["--window-size", "-1,0"], Problem(window_size=(-1, 0))),
        (["--window-size", "-1,-1", "--causal"], Problem(causal=True)),
        (["--window-size=-1,4k"], Problem(window_size=(-1, 4096))),
        (["--op", "gemm"], Problem(op="gemm", batch=1, heads_q=1, heads_kv=1)),
        (["--packed-rows", "16384,9"], Problem(packed_rows=(16384, 9))),
    ],
)
def test_other_spellings_name_the_same_problem(flags: list[str], problem: Problem) -> None:
    from attention_autotuner.cli.options import problem_of

    assert problem_of(entry.make_parser().parse_args(["why", *flags])) == problem


@pytest.mark.parametrize(
    ("flags", "error", "status"),
    [
        (["--dim-qk", "20"], "error: --dim-qk must be a positive multiple of 8, got 20\n", 2),
        (["--heads", "6", "--heads-kv", "4"], "--heads must be a multiple of --heads-kv", 2),
        (["--device-type", "V100"], "error: unknown --device-type 'V100'; known here: A100, ", 1),
        (["--seqlen", "0"], "error: --seqlen must be at least 1, got 0\n", 2),
        (["--form", "parallel"], "error: --form is for retention forward, got 'parallel'", 2),
        (["--operands", "nt"], "error: --operands is for gemm, got 'nt' for attention\n", 2),
        (["--documents", "4"], "error: --documents is a number of documents", 2),
        (["--modifications", "soft"], "error: --modifications must be of ('softcap', ", 2),
        (["--op", "gemm", "--heads", "4"], "--batch, --heads and --heads-kv must be 1 for gemm", 2),
        (
            ["--batch", "1", "--seqlen", "128", "--packed-rows", "128,9000000"],
            "error: --packed-rows must be at most --batch times --seqlen and --seqlen-k",
            2,
        ),
    ],
)
def test_errors_speak_of_options(
    capsys: Capture, flags: list[str], error: str, status: int
) -> None:
    assert main(["candidates", *A100, *flags]) == status
    said = capsys.readouterr().err
    assert error in said
    assert len(said) < 200
    assert "device_type" not in said


@pytest.mark.parametrize("command", ["candidates", "render", "build", "why", "tune", "warmup"])
def test_an_operation_without_kernels_is_wrong_usage(capsys: Capture, command: str) -> None:
    assert main([command, *A100, "--op", "gemm"]) == 2
    said = capsys.readouterr().err
    assert "no kernel of A100 computes gemm forward" in said
    assert "gemm forward has those of sm90" in said


def no_gpu(*_: Any) -> None:
    raise UnsupportedArchitectureError(f"{NO_GPU}; name the architecture, e.g. device_type='A100'")


def test_without_a_gpu_the_option_to_name_one_is_said(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention_autotuner.arch.resolution.detect", no_gpu)
    assert main(["candidates"]) == 1
    said = capsys.readouterr().err
    assert said == f"error: {NO_GPU}; name the architecture, e.g. --device-type A100\n"


@pytest.mark.parametrize("words", [["records", "prove"], ["bring-up"]])
def test_a_command_of_the_present_gpu_is_not_told_to_name_another(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def no_library(_: str) -> None:
        raise OSError

    probe = importlib.import_module(
        "attention_autotuner.arch.probe"
    )  # the package has a function of the name
    monkeypatch.setattr(probe.ctypes, "CDLL", no_library)
    monkeypatch.setattr(probe, "cuda_driver", probe.CudaDriver)  # which is remembered
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.endswith("cannot be loaded; this command works on the GPU of this machine alone\n")
    assert "device" not in said
    if words == ["bring-up"]:
        assert main([*words, "--dry-run"]) == 1
        said = capsys.readouterr().err
        assert said.endswith("cannot be loaded; --properties FILE describes another GPU\n")


@pytest.mark.parametrize("words", [["records", "show"], ["records", "rm"], ["cache", "rm"]])
def test_a_pattern_that_matches_nothing_is_a_failure_and_said(
    capsys: Capture, words: list[str]
) -> None:
    for options in ([], ["--json"]):
        assert main([*words, "nope", *options]) == 1
        assert re.fullmatch(r"error: no .* matches 'nope'\n", capsys.readouterr().err)


def test_the_main_job_says_first_that_there_is_no_gpu(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_job, "detect", no_gpu)
    monkeypatch.setattr(main_job, "tune", stop)
    assert main(["tune", "--all"]) == 130
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"no GPU: {NO_GPU}"
    assert second == main_job.LEFT_OUT


def test_a_setting_that_names_no_compiler_is_named(capsys: Capture, tmp_path: Path) -> None:
    with settings.override(nvcc=tmp_path / "nvcc", cache_dir=tmp_path):
        assert main(["build", *A100, "--default"]) == 1
    said = capsys.readouterr().err
    assert f"ATTENTION_AUTOTUNER_NVCC={tmp_path / 'nvcc'}: cannot run" in said
    assert "PosixPath" not in said


def test_builds_have_a_limit_and_retry_what_failed_when_asked(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def build(kernels: Any, target: Any, **options: Any) -> list[Any]:
        asked.append(options)
        return []

    monkeypatch.setattr(making, "find_toolchain", lambda settings: None)
    monkeypatch.setattr(making, "build", build)
    monkeypatch.setattr(making, "print_results", lambda *_: None)
    with settings.override(cache_dir=tmp_path):
        assert main(["build", *A100, "--default"]) == 0
        assert main(["build", *A100, "--default", "--retry"]) == 0
    assert [options["retry_failed"] for options in asked] == [False, True]
    assert all(options["timeout_seconds"] > 600 for options in asked)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_ctrl_c_does(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def run() -> list[Finding]:
        os.kill(os.getpid(), number)
        signal.pause()
        return []

    before = signal.getsignal(number)
    monkeypatch.setattr(doctor, "diagnose", run)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(number) is before


# --- doctor -----------------------------------------------------------------------------------------

GOOD = {
    name: Finding(name=name, state="ok", detail="")
    for name in ("settings", "GPU", *doctor.COMPILING, "cache", "torch")
}


def diagnosed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, *, kernels: int = 0, **states: Any
) -> tuple[int, str]:
    """Status and last line of doctor on a machine with some states and prebuilt kernels."""
    findings = [replace(GOOD[name], state=states.get(name.split()[0], "ok")) for name in GOOD]
    checks: tuple[Callable[[], Finding], ...] = tuple(lambda f=f: f for f in findings)  # type: ignore[misc]  # bound by default
    monkeypatch.setattr(doctor, "CHECKS", checks)
    monkeypatch.setattr(doctor, "bundles", lambda _: [SimpleNamespace(kernels=range(kernels))])
    status = main(["doctor"])
    return status, capsys.readouterr().out.splitlines()[-1]


def test_doctor_ends_with_what_works_what_does_not_and_what_to_do(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = diagnosed(capsys, monkeypatch)
    assert status == 0
    assert said.startswith("Works here: ranking candidates, building kernels, tuning, running all")
    assert "nothing is missing" in said
    status, said = diagnosed(capsys, monkeypatch, GPU="missing")
    assert status == 0
    assert "does not: measuring and running kernels (no GPU); next: copy the cache folder" in said
    status, said = diagnosed(capsys, monkeypatch, torch="missing")
    assert status == 0
    assert "does not: measuring and running kernels (no torch with CUDA); next: follow" in said
    status, said = diagnosed(capsys, monkeypatch, nvcc="broken")
    assert status == 1
    assert "does not: building kernels (nvcc), measuring and running kernels (none built)" in said
    assert "next: follow the advice above" in said


def test_doctor_blames_the_parts_that_failed_and_no_others(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = diagnosed(capsys, monkeypatch, cache="broken")
    assert status == 1
    assert "does not: building kernels (cache), measuring and running kernels (none built)" in said
    status, said = diagnosed(capsys, monkeypatch, settings="broken", nvcc="broken")
    assert status == 1
    assert "does not: building kernels (settings, nvcc), measuring" in said
    monkeypatch.setitem(GOOD, doctor.BUNDLES, Finding(doctor.BUNDLES, "ok", ""))
    assert "nothing is missing" in diagnosed(capsys, monkeypatch)[1]
    status, said = diagnosed(capsys, monkeypatch, prebuilt="broken")
    assert status == 0
    assert "Works here: ranking candidates, building kernels; does not: measuring and" in said
    assert "(prebuilt kernels); next: follow the advice above" in said
    status, said = diagnosed(capsys, monkeypatch, prebuilt="broken", nvcc="broken")
    assert status == 1
    assert "does not: building kernels (nvcc), measuring" in said


def test_doctor_is_content_with_prebuilt_kernels(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = diagnosed(capsys, monkeypatch, kernels=3, nvcc="broken", CUTLASS="broken")
    assert status == 0
    assert said == (
        "Works here: ranking candidates, running prebuilt kernels; does not: building kernels "
        "(nvcc, CUTLASS headers); next: nothing, unless you need kernels that are not prebuilt."
    )
    status, _ = diagnosed(capsys, monkeypatch, kernels=3, nvcc="broken", cache="broken")
    assert status == 1


def test_a_torch_without_cuda_is_there_and_cupy_is_optional() -> None:
    torch, cupy = doctor.check_torch(), doctor.check_cupy()
    assert torch.state == "ok"
    assert ("without CUDA" in torch.detail) is ("a GPU needs a torch with CUDA" in torch.fix)
    assert cupy.state in ("ok", "optional")
