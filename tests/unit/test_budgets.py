"""Budgets of searches: whatever takes long, they end in time with the best so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.leases import Lease
from attention_autotuner.core.outcome import Ok, Postponed
from attention_autotuner.tuning import search as search_module
from attention_autotuner.tuning import tune
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.result import TuneResult
from tests import fake_processes
from tests.fake_processes import POLICY, PROBLEM, SlowPipeline

DEFAULT = POLICY.default(PROBLEM)


class Dragging(SlowPipeline):
    """A pipeline of which one kind of step takes long."""

    drags: str = ""

    def _step(self, kind: str, name: str) -> None:
        if kind == self.drags:
            time.sleep(0.1)
        super()._step(kind, name)


Search = Callable[..., tuple[TuneResult, Dragging, float]]


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    fake_processes.search(tmp_path / "first")  # reads the headers, which takes a second
    monkeypatch.setattr(search_module, "CHECK_SECONDS", 0.03)  # fakes are faster than a GPU
    monkeypatch.setattr(search_module, "SET_UP_SECONDS", 0.01)

    def run(drags: str = "", **options: Any) -> tuple[TuneResult, Dragging, float]:
        pipeline = Dragging(folder=tmp_path)
        pipeline.drags = drags
        records = RecordStore(tmp_path / "records")
        began = time.monotonic()
        result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline, **options)
        return result, pipeline, time.monotonic() - began

    return run


@pytest.mark.parametrize("drags", ["build", "verify", "round", "confirm"])
def test_a_budget_bounds_every_stage_and_ends_with_a_pick(
    search: Search, tmp_path: Path, drags: str
) -> None:
    result, _, seconds = search(drags, top_k=60, budget_seconds=1.5)
    # A race is of a few rounds at least.
    assert seconds < 2.0 + (0.1 * fake_processes.ROUNDS if drags == "round" else 0.0)
    assert (result.status, result.pick.name) == ("measured", fake_processes.best())
    assert not result.interrupted
    tried = [line.split()[1] for line in fake_processes.log(tmp_path) if line.startswith("build")]
    assert tried[:2] == [DEFAULT.name, fake_processes.best()]  # what promises most comes first
    assert result.record is not None
    known = {entry.candidate.name for entry in result.record.entries}
    assert {DEFAULT.name, fake_processes.best(), fake_processes.wrong()} <= known
    late = [row for row in result.rows if isinstance(row.outcome, Postponed)]
    assert late
    assert not known & {row.candidate.name for row in late}
    assert len(known) + len(late) == len(result.rows)


def test_what_a_budget_left_is_what_the_next_search_does(search: Search, tmp_path: Path) -> None:
    first, _, _ = search("build", top_k=12, budget_seconds=1.2)
    late = {row.candidate.name for row in first.rows if isinstance(row.outcome, Postponed)}
    assert 0 < len(late) < 11
    search(top_k=12)
    checked = [
        line.split()[1] for line in fake_processes.log(tmp_path) if line.startswith("verify")
    ]
    assert len(checked) == len(set(checked)) == 13  # pick and default, which race again, once too
    third, _, _ = search(top_k=12)
    assert third.status == "recorded"


@pytest.mark.parametrize("gpu", [True, False])
def test_a_budget_in_which_nothing_is_built_leaves_the_default(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    def build(self: Any, kernels: Any, progress: Any, stop: Callable[[], bool]) -> Any:
        while not stop():  # a compiler that hangs
            time.sleep(0.01)
        return [Postponed(reason="the budget ended before it was compiled") for _ in kernels]

    monkeypatch.setattr(Dragging, "build", build)
    monkeypatch.setattr(Dragging, "can_measure", lambda self: gpu)
    result, _, seconds = search(budget_seconds=0.8)
    assert seconds < 1.5
    assert (result.status, result.pick, result.record) == ("predicted", DEFAULT, None)
    assert {row.outcome.kind for row in result.rows} == {"postponed"}
    assert RecordStore(tmp_path / "records").count() == 0


@pytest.mark.parametrize("name", ["search", "gpu"])
def test_a_budget_bounds_the_wait_for_another_process(
    search: Search, tmp_path: Path, name: str
) -> None:
    records = RecordStore(tmp_path / "records")
    path = records.root / "gpus" / "gpu-0.lease"
    if name == "search":
        gpu_name = SlowPipeline().environment.gpu_name
        path = records.path(PROBLEM, POLICY.name, gpu_name).with_suffix(".search.lease")
    with Lease(path).wait():
        result, _, seconds = search(budget_seconds=1.0)
    assert seconds < 2.0
    assert (result.status, result.pick) == ("predicted", DEFAULT)
    assert "another process holds" in "".join(row.outcome.reason for row in result.rows)
    again, _, _ = search()
    assert (again.status, again.pick.name) == ("measured", fake_processes.best())
    assert {row.outcome.kind for row in again.rows if row.outcome != Ok()} == {"wrong"}
