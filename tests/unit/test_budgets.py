"""Budgets of searches: whatever takes long, they end in time with the best so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner.core.leases import Lease
from attention_autotuner.core.outcome import Ok, Postponed
from attention_autotuner.tuning import progress, stages, tune
from attention_autotuner.tuning import search as search_module
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.result import TuneResult
from tests import fake_processes
from tests.fake_processes import POLICY, PROBLEM, SlowPipeline

DEFAULT = POLICY.default(PROBLEM)
SECONDS = {"build": 1.0, "verify": 0.5, "round": 0.0, "confirm": 3.0}  # of a step


@dataclass
class Clocked(SlowPipeline):
    """A pipeline whose steps take no time but that of a clock; rounds take all that they are given."""

    seconds: dict[str, float] = field(default_factory=lambda: dict(SECONDS))
    now: float = 0.0

    def _step(self, kind: str, name: str) -> None:
        self.now += self.seconds[kind]
        super()._step(kind, name)

    def measure(self, *arguments: Any, **options: Any) -> Any:
        self.now += options["budget_seconds"]
        return super().measure(*arguments, **options)


Search = Callable[..., tuple[TuneResult, Clocked]]


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    """Search by a clock that only steps move."""

    def run(seconds: dict[str, float] | None = None, **options: Any) -> tuple[TuneResult, Clocked]:
        pipeline = Clocked(folder=tmp_path, seconds=SECONDS | (seconds or {}))
        clock = SimpleNamespace(monotonic=lambda: pipeline.now)
        for module in (search_module, stages, progress):
            monkeypatch.setattr(module, "time", clock)
        records = RecordStore(tmp_path / "records")
        return tune(PROBLEM, POLICY, records=records, pipeline=pipeline, **options), pipeline

    return run


@pytest.mark.parametrize(
    ("seconds", "budget"),
    [({}, 20), ({}, 60), ({"build": 4.0}, 20), ({"verify": 3.0}, 20), ({"build": 0.1}, 20)],
)
def test_a_budget_bounds_every_stage_and_ends_with_a_pick(
    search: Search, tmp_path: Path, seconds: dict[str, float], budget: float
) -> None:
    result, pipeline = search(seconds, top_k=120, budget_seconds=budget)
    assert 0.75 * budget < pipeline.now <= budget + 2.0
    assert (result.status, result.pick.name) == ("measured", fake_processes.best())
    assert result.confirmed
    assert not result.interrupted
    tried = [line.split()[1] for line in fake_processes.log(tmp_path) if line.startswith("build")]
    assert tried[:2] == [DEFAULT.name, fake_processes.best()]  # what promises most comes first
    assert result.record is not None
    known = {entry.candidate.name for entry in result.record.entries}
    assert {DEFAULT.name, fake_processes.best()} <= known
    late = [row for row in result.rows if isinstance(row.outcome, Postponed)]
    assert late
    assert not known & {row.candidate.name for row in late}
    assert len(known) + len(late) == len(result.rows)


def test_what_a_budget_left_is_what_the_next_search_does(search: Search, tmp_path: Path) -> None:
    first, _ = search(top_k=12, budget_seconds=14.0)
    late = {row.candidate.name for row in first.rows if isinstance(row.outcome, Postponed)}
    assert 0 < len(late) < 11
    search(top_k=12)
    checked = [
        line.split()[1] for line in fake_processes.log(tmp_path) if line.startswith("verify")
    ]
    assert len(checked) == len(set(checked)) == 13  # pick and default, which race again, once too
    third, _ = search(top_k=12)
    assert third.status == "recorded"


@pytest.mark.parametrize("gpu", [True, False])
def test_a_budget_in_which_nothing_is_built_leaves_the_default(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    def build(self: Any, kernels: Any, progress: Any, stop: Callable[[], bool]) -> Any:
        while not stop():  # a compiler that hangs
            self.now += 0.1
        return [Postponed(reason="the budget ended before it was compiled") for _ in kernels]

    monkeypatch.setattr(Clocked, "build", build)
    monkeypatch.setattr(Clocked, "can_measure", lambda self: gpu)
    result, pipeline = search(budget_seconds=20.0)
    assert 19.0 < pipeline.now < 20.5
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
    began = time.monotonic()
    with Lease(path).wait():
        result, _ = search({"build": 0.0, "verify": 0.0}, top_k=2, budget_seconds=0.4)
    assert time.monotonic() - began < 10.0
    assert (result.status, result.pick) == ("predicted", DEFAULT)
    assert "another process holds" in "".join(row.outcome.reason for row in result.rows)
    again, _ = search()
    assert (again.status, again.pick.name) == ("measured", fake_processes.best())
    assert {row.outcome.kind for row in again.rows if row.outcome != Ok()} == {"wrong"}
