"""Six commands as a terminal of 80 columns shows them: golden files, whole words, and progress.

``WRITE_GOLDEN=1`` writes the files.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from attention_autotuner import settings
from attention_autotuner.arch import resolve
from attention_autotuner.cli import console, doctor, inspecting, main, making, results, tuning
from attention_autotuner.cli.doctor import Finding
from attention_autotuner.cli.names import short_names
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.core.outcome import BuildFailed, Outcome, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import search
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.result import TuneResult
from tests.conftest import REPOSITORY
from tests.fake_pipeline import GPU, FakePipeline, report
from tests.record_entries import PROVEN

GOLDEN = REPOSITORY / "tests" / "data" / "cli"
WIDTH = 80
STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
PROBLEM = ["--device-type", "A100", "--dim-qk", "64", "--causal"]

COMMANDS = {
    "candidates": ["candidates", *PROBLEM, "--limit", "5"],
    "build": ["build", *PROBLEM, "--count", "3"],
    "tune": ["tune", *PROBLEM, "--top-k", "6"],
    "warmup": ["warmup", *PROBLEM, "--direction", "step"],
    "why": ["why", *PROBLEM, "--limit", "8"],
    "doctor": ["doctor"],
}

Capture = pytest.CaptureFixture[str]


class Pipeline(FakePipeline):
    """Builds into the layout of the cache."""

    def build(self, kernels: Sequence[Any], *rest: Any) -> Sequence[Any]:
        folder = Path("/cache/kernels/kernel")
        built: Sequence[Artifact | Outcome] = super().build(kernels, *rest)
        return [
            kernel if isinstance(kernel, Outcome) else replace(kernel, path=path)
            for kernel, path in zip(
                built, [folder / kernel.name for kernel in kernels], strict=True
            )
        ]


def build(kernels: Sequence[Any], target: BuildTarget, **_: Any) -> list[Artifact | BuildFailed]:
    """Stands in for the compiler, which refuses the third kernel."""
    results: list[Artifact | BuildFailed] = [
        Artifact(
            name=kernel.name,
            digest="0" * 64,
            path=Path("/cache/kernels") / f"{kernel.name}.{'0' * 16}" / "kernel.so",
            report=report(168, loop_spills=bool(place), spilled_each_way=14),
            kernel_digest="1" * 64,
            target=target,
            toolchain={},
            build_seconds=4.0 + place,
            build_peak_bytes=1,
        )
        for place, kernel in enumerate(kernels)
    ]
    failure = BuildFailed(reason="ptxas stopped with status 255", log="/cache/failed/build.log")
    return [*results[:2], *(failure for _ in results[2:])]


def finding(name: str, detail: str, state: Any = "ok", fix: str = "") -> Callable[[], Finding]:
    return lambda: Finding(name=name, state=state, detail=detail, fix=fix)


CHECKS = (
    finding("settings", "MODE=cached, EFFORT=quick, ALWAYS_TUNE=False, CACHE_DIR=/cache"),
    finding("GPU", "this machine has no CUDA driver", "missing", "kernels cannot be run here"),
    finding("nvcc", "13.0.88 at /usr/local/cuda-13.0/bin/nvcc, toolkit /usr/local/cuda-13.0"),
    finding("C++ compiler", "/usr/bin/g++: g++ 12.2.0"),
    finding("CUTLASS headers", "4.2.0 in /srv/third_party/cutlass/include"),
    finding("CMake, Ninja", "cmake 4.1.0 at /usr/bin/cmake, ninja 1.13.0 at /usr/bin/ninja"),
    finding("cache", "/cache, writable, 75.6 GiB free"),
    finding("torch", "2.13.0, without CUDA", fix="CPU tensors run the reference"),
    finding("cupy", "not installed", "optional", "needed to search"),
)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose compiler and GPU are fakes, so that every run prints the same."""
    records = RecordStore(tmp_path / "records")
    names = [candidate.name for candidate in resolve("A100").legal(problem())]
    default = resolve("A100").default(problem()).name
    pipeline = Pipeline(
        time_us=lambda name: 430.0 if name == default else 400.0 + names.index(name) % 17,
        spills=lambda name: "_s3_" in name,
        verify_outcome=lambda name: Wrong(reason="o is off by 0.25") if "_m192" in name else PROVEN,
        confirmed_ratio=1.07,
    )

    def tune(asked: Problem, policy: Any, **options: Any) -> TuneResult:
        with settings.override(always_tune=True):
            result = search.tune(asked, policy, records=records, pipeline=pipeline, **options)
        return replace(result, record_path=Path("/cache/records/record.json"))

    monkeypatch.setattr(inspecting, "collect", lambda: GPU)
    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(results, "artifact_of", lambda row: SimpleNamespace(report=report()))
    monkeypatch.setattr(making, "build", build)
    monkeypatch.setattr(making, "find_toolchain", lambda settings: None)
    monkeypatch.setattr(doctor, "CHECKS", list(CHECKS))
    with settings.override(cache_dir=tmp_path):
        yield


def problem() -> Problem:
    return Problem(dim_qk=64, dim_v=64, causal=True)


def shown(capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str, width: int) -> str:
    """The command's output on a terminal of a width, without its styles and trailing spaces."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    if name == "why" and not list(RecordStore(settings.current().cache_dir / "records").records()):
        assert main(COMMANDS["tune"]) == 0  # the search whose record it explains
        capsys.readouterr()
    assert main(COMMANDS[name]) == (1 if name == "build" else 0)
    plain = STYLE.sub("", capsys.readouterr().out)
    return "".join(line.rstrip() + "\n" for line in plain.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_of_80_columns_shows_the_golden_file(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text = shown(capsys, monkeypatch, name, WIDTH)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= WIDTH
    # No word is broken: each stands on a terminal that needs no line breaks, too.
    whole = set(shown(capsys, monkeypatch, name, 100 * WIDTH).split())
    assert {word for word in text.split() if word.strip("─")} <= whole


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(COMMANDS)


def test_full_tables_have_full_names_whatever_the_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "tune", [*COMMANDS["tune"], "--full"])
    text = shown(capsys, monkeypatch, "tune", WIDTH)
    assert resolve("A100").default(problem()).name in text
    assert "schedule" in text
    assert "of best" in text


def test_a_narrow_terminal_shows_records_without_their_digests(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "show", ["records", "show", "*"])
    shown(capsys, monkeypatch, "tune", WIDTH)
    text, roomy = (shown(capsys, monkeypatch, "show", width) for width in (WIDTH, 100 * WIDTH))
    *table, last = text.splitlines()
    assert last.startswith("proof, source, code: on terminals of 120 columns")
    assert max(map(len, table)) <= WIDTH
    assert "…" not in text
    words = {word for line in table for word in line.split() if word.strip("─")}
    assert words <= set(roomy.split())
    assert "source" not in words
    assert {"proof", "source", "code"} <= set(roomy.split())
    assert "120 columns" not in roomy


def test_a_narrow_table_breaks_names_and_paths_at_their_joints() -> None:
    name = "pair_keys_m64n96p6s1_dq_r128c32w4x1s2_rows"
    assert console.wrapped(f"x {name}", 24, whole=False) == [
        "x pair_keys_m64n96p6s1_",
        "dq_r128c32w4x1s2_rows",
    ]
    assert console.wrapped(f"x {name}", 24) == ["x", name]
    assert console.wrapped("/usr/local/cuda/bin/nvcc", 15, whole=False) == [
        "/usr/local/",
        "cuda/bin/nvcc",
    ]


@pytest.mark.parametrize(
    "asked",
    [
        Problem(),
        Problem(direction="backward"),
        Problem(op="retnet", mask="explicit"),
        Problem(op="retnet", mask="explicit", direction="backward"),
        Problem(op="retention", causal=True),
        Problem(op="retention", causal=True, direction="backward"),
        Problem(op="retention", causal=True, form="recurrent", seqlen_q=1, seqlen_k=1),
    ],
    ids=lambda asked: str(asked.describe()),
)
def test_short_names_tell_the_candidates_of_a_problem_apart(asked: Problem) -> None:
    names = [candidate.name for candidate in resolve("A100").legal(asked)]
    short = set(map(short_names, names))
    assert len(short) == len(names)
    assert max(map(len, short)) < max(map(len, names)) - 25


def test_a_short_name_chooses_its_candidate(capsys: Capture) -> None:
    default = resolve("A100").default(problem()).name
    short = short_names(f"{default} spills")
    assert short == f"{short_names(default)} spills"
    assert main(["render", *PROBLEM, "--candidate", short_names(default)]) == 0
    assert f'"{default}"' in capsys.readouterr().out


def test_progress_of_80_columns_keeps_phase_bar_count_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=WIDTH, color_system=None)
    monkeypatch.setattr(console, "Console", lambda **_: terminal)
    name = resolve("A100").default(Problem(direction="backward")).name
    with console.progress() as show:
        show("measure", 2, 25, f"backward: {name}", best_us=12.5, seconds_left=30.0)
    lines = STYLE.sub("", stream.getvalue()).replace("\r", "\n").splitlines()
    line = [line for line in lines if "measure" in line][-1]
    assert len(line) <= WIDTH
    assert line.startswith("measure  ━")
    assert " 2/25 0:00:00 backwar" in line
    assert "…" in line
    assert line.rstrip().endswith("best 12.5 us, 30 s left")
