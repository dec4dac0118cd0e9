"""Settings of searches on every path to one: a call, ``tune``, a step, and a sweep as a bring-up runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import H100, resolution
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving import dispatch, runtime
from attention_autotuner.tuning import search, step
from attention_autotuner.tuning.bring_up import bring_up
from attention_autotuner.tuning.progress import Event
from attention_autotuner.tuning.sweeps import default_sweep, only
from tests.devices import H200
from tests.fake_machine import FakeMachine, FakeSweepPipeline

PROBLEM = Problem(batch=2, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024, dim_qk=96)
ONE = only(default_sweep(), ["retention", "forward", "s8192"])
POLICY = H100()

PATHS: dict[str, Callable[[FakeSweepPipeline], object]] = {
    "call": lambda work: dispatch.kernel_for(PROBLEM, POLICY, device=0),
    "tune": lambda work: search.tune(PROBLEM, POLICY, top_k=1),
    "step": lambda work: step.tune_step(PROBLEM, POLICY, top_k=1),
    "sweep": lambda work: bring_up(FakeMachine(work=work), ONE, settings.current()),
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A path's name, its run as by a fresh process, and the pipeline that it searches with."""
    work = FakeSweepPipeline()
    for module in (search, step):
        monkeypatch.setattr(module, "LocalPipeline", lambda *_: work)
    monkeypatch.setattr(dispatch, "probe", lambda device: H200)
    monkeypatch.setattr(dispatch, "detect", lambda device: POLICY)
    monkeypatch.setattr(dispatch, "collect", lambda device, **_: work.environment)
    monkeypatch.setattr(dispatch, "obtain", lambda candidate, arch, settings: candidate)

    def load(candidate: Any) -> Any:
        info = SimpleNamespace(name=candidate.compiled.name)
        return SimpleNamespace(info=info, path=Path(), prepare=lambda device: None)

    monkeypatch.setattr(dispatch, "load", load)

    def run() -> None:
        work.measured.clear()
        with runtime.fresh():
            PATHS[request.param](work)

    with settings.override(mode="tune", cache_dir=tmp_path):
        resolution.forget_measured()
        yield SimpleNamespace(name=request.param, run=run, work=work)
    resolution.forget_measured()


def test_always_tune_ignores_what_was_recorded(path: Any) -> None:
    path.run()
    assert path.work.measured
    path.run()
    assert not path.work.measured
    with settings.override(always_tune=True):
        path.run()
    assert path.work.measured


def test_print_shows_progress_and_the_ranking(
    path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path.run()
    assert capsys.readouterr() == ("", "")
    with settings.override(print_tuning=True, always_tune=True):
        path.run()
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert any(line.startswith(("measure ", "race ")) for line in lines)
    assert sum(line.endswith("<- pick") for line in lines) == (2 if path.name == "step" else 1)


def test_debug_logs_steps_and_fates_that_info_leaves_out(
    path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with settings.override(log_level="info"):
        path.run()
    assert {record.levelname for record in caplog.records} >= {"INFO"}
    assert not any(record.levelno == logging.DEBUG for record in caplog.records)
    assert any("pick " in record.getMessage() for record in caplog.records)
    caplog.clear()
    with settings.override(log_level="debug", always_tune=True):
        path.run()
    debug = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert any(message.startswith(("verify ", "build ")) for message in debug)
    assert any(message.endswith(": ok ") for message in debug)
    if path.name == "call":
        assert any(" serves " in message for message in debug)


def test_a_listener_hears_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[Event] = []
    with settings.override(print_tuning=True, cache_dir=tmp_path):
        search.tune(PROBLEM, POLICY, effort="none", listener=heard.append)
    assert [event.phase for event in heard] == ["rank"]
    assert "rank " in capsys.readouterr().err
