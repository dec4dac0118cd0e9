"""The source of a candidate's library: the store or a build."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import attention_autotuner.codegen.obtain as module
from attention_autotuner import settings
from attention_autotuner.arch import A100
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.obtain import obtain
from attention_autotuner.codegen.store import Store
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.core.problem import Problem
from attention_autotuner.core.report import CompilerReport
from attention_autotuner.errors import BuildError, ToolchainError


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def artifact(candidate: Candidate, path: Path) -> Artifact:
    report = CompilerReport.__new__(CompilerReport)
    return Artifact(
        name=candidate.name,
        digest="d" * 64,
        path=path,
        report=report,
        kernel_digest="k" * 64,
        target=BuildTarget(arch="80"),
        toolchain={},
        build_seconds=1.0,
        build_peak_bytes=1,
    )


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Any) -> None:
        raise ToolchainError("install nvcc")

    monkeypatch.setattr(module, "find_toolchain", refuse)


def test_without_a_compiler_the_store_still_serves(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    candidate = A100().default(Problem())
    stored = artifact(candidate, tmp_path / "kernel.so")
    monkeypatch.setattr(Store, "find", lambda self, candidate, identity, target: [stored])
    with settings.override(cache_dir=tmp_path):
        assert obtain(candidate, "80") is stored


def test_without_a_compiler_and_without_the_kernel_the_error_names_both(
    no_compiler: None, tmp_path: Path
) -> None:
    candidate = A100().default(Problem())
    with (
        settings.override(cache_dir=tmp_path),
        pytest.raises(
            ToolchainError, match=f"{candidate.name} has to be built first: install nvcc"
        ),
    ):
        obtain(candidate, "80")


def test_a_build_is_logged_with_the_way_to_avoid_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    candidate = A100().default(Problem())
    built = artifact(candidate, tmp_path / "kernel.so")
    results: list[Any] = [[built], [BuildFailed(reason="no such type", log="/a/log")]]
    stored: list[Any] = [None, built, None, BuildFailed(reason="remembered", log="/b/log")]
    monkeypatch.setattr(module, "find_toolchain", lambda settings: None)
    monkeypatch.setattr(Store, "get", lambda *_: stored.pop(0))
    monkeypatch.setattr(module, "build", lambda *_, **__: results.pop(0))
    with settings.override(cache_dir=tmp_path):
        assert obtain(candidate, "80") is built
        (line,) = warnings(caplog)
        for part in (candidate.name, "sm_80", str(tmp_path), "attention-autotuner warmup"):
            assert part in line
        assert obtain(candidate, "80") is built
        assert len(warnings(caplog)) == 1
        with pytest.raises(BuildError, match="does not build: no such type; log: /a/log"):
            obtain(candidate, "80")
        with pytest.raises(BuildError, match="does not build: remembered; log: /b/log"):
            obtain(candidate, "80")
