"""Lists of problems: tuned together, built ahead, and the cost of a bucket's pick at other lengths."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import H100
from attention_autotuner.cli import main
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArchitectureError, UnsupportedArgumentError
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.tuning import listed
from attention_autotuner.tuning.listed import bucket_cost, tune_problems
from attention_autotuner.tuning.racing import Timing
from attention_autotuner.tuning.records import RecordStore
from tests.fake_machine import FakeSweepPipeline

POLICY = H100()
PROBLEM = Problem(batch=1, heads_q=8, heads_kv=8, seqlen_q=1000, seqlen_k=1000)
BACKWARD = replace(PROBLEM, direction="backward", deterministic=True)
LISTED = [PROBLEM, replace(PROBLEM, seqlen_q=999), BACKWARD, replace(BACKWARD, deterministic=False)]


@pytest.fixture
def records(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")


@pytest.mark.parametrize("budget_seconds", [None, 500.0])
def test_the_problems_of_a_list_are_tuned_once_each(
    records: RecordStore, budget_seconds: float | None
) -> None:
    pipeline = FakeSweepPipeline(time_us=lambda name: 100.0 - len(name) % 7)
    options: Any = {"records": records, "pipeline": pipeline}
    with settings.override(jobs=2):
        result = tune_problems(LISTED, POLICY, budget_seconds=budget_seconds, **options)
        again = tune_problems(LISTED, POLICY, **options)
    assert [s.status for s in result.settled] == ["measured"] * 3
    assert [s.status for s in again.settled] == ["recorded"] * 3
    assert pipeline.problems == [
        PROBLEM,
        *LISTED[2:],
    ]  # a bucket's first alone, and only the first time
    for settled in result.settled:
        assert settled.record is not None
        for entry in settled.record.entries:  # the pool is shared, and not all of it may serve
            assert entry.candidate.deterministic or not settled.problem.deterministic


def test_a_list_is_of_problems_and_its_listener_a_function(records: RecordStore) -> None:
    wrong: Any = [PROBLEM, {"batch": 1}]
    number: Any = 5
    options: Any = {"records": records, "pipeline": FakeSweepPipeline()}
    with pytest.raises(UnsupportedArgumentError, match=r"a Problem, got dict \{'batch': 1\}"):
        tune_problems(wrong, POLICY, **options)
    with pytest.raises(UnsupportedArgumentError, match=r"listener must be a function .* got 5"):
        tune_problems(LISTED, POLICY, listener=number, **options)


def test_a_list_needs_a_gpu(records: RecordStore) -> None:
    without = FakeSweepPipeline(gpu=False)
    with pytest.raises(UnsupportedArchitectureError, match=r"no GPU to measure on.* one at a time"):
        tune_problems(LISTED, POLICY, records=records, pipeline=without)
    with pytest.raises(UnsupportedArchitectureError, match=r"no GPU to measure on.*drive it$"):
        bucket_cost(PROBLEM, POLICY.default(PROBLEM), POLICY, pipeline=without)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "untuned.jsonl"
    path.write_text("".join(json.dumps(values_of(problem)) + "\n" for problem in LISTED))
    return path


def test_the_command_tunes_a_file(
    file: Path, records: RecordStore, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(listed, "LocalPipeline", lambda *_: FakeSweepPipeline())
    arguments = ["tune", "--device-type", "H100", "--problems", str(file)]
    with settings.override(cache_dir=records.root.parent, jobs=2):
        assert main(arguments) == 0
        assert "picks for 3 of 3 problems" in capsys.readouterr().out
        assert main([*arguments, "--json", "--budget", "0.001"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in said["problems"]] == ["recorded"] * 3


@pytest.mark.parametrize("name", ["tune", "warmup"])
def test_a_file_is_not_mixed_with_a_problem(
    file: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--problems", str(file), "--seqlen", "512", "--causal"])
    assert "leave out --seqlen, --causal" in capsys.readouterr().err


def test_options_of_one_search_are_not_of_a_list(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--problems", str(file), "--effort", "full", "--top-k", "2", "--no-confirm"])
    said = capsys.readouterr().err
    assert "--budget alone limits the search of a list; leave out --effort, --top-k, --no-c" in said
    assert "names the problems" not in said


@dataclass
class AtLengths(FakeSweepPipeline):
    """Times by the length of the problem: one candidate is the best of short ones, another of long ones."""

    short: str = ""
    long: str = ""

    def measure(
        self, problem: Problem, *arguments: Any, **options: Any
    ) -> tuple[list[Timing], bool]:
        best = self.short if problem.seqlen_q < 700 else self.long
        self.time_us = lambda name: 80.0 if name == best else 100.0
        return super().measure(problem, *arguments, **options)


def candidates() -> list[Candidate]:
    ranked = rank(PROBLEM, POLICY.legal(PROBLEM), POLICY.spec)
    default = POLICY.default(PROBLEM)
    return [next(c for c, _ in ranked if c != default), default]


def test_the_pick_of_a_bucket_is_raced_at_other_lengths() -> None:
    pick, default = candidates()
    pipeline = AtLengths(short=default.name, long=pick.name)
    costs = bucket_cost(PROBLEM, pick, POLICY, top_k=2, pipeline=pipeline)
    assert [cost.seqlen_q for cost in costs] == [513, 640, 768, 896, 1024]
    assert [cost.best for cost in costs] == [default.name] * 2 + [pick.name] * 3
    assert [cost.cost for cost in costs] == pytest.approx([0.25] * 2 + [0.0] * 3)
    assert all(c.low is not None and c.cost and 0 < c.low < c.cost for c in costs[:2])
    decode = replace(PROBLEM, seqlen_q=1, seqlen_k=5000)
    default = POLICY.default(decode)
    costs = bucket_cost(decode, default, POLICY, top_k=1, pipeline=FakeSweepPipeline())
    lengths = [(cost.seqlen_q, cost.seqlen_k) for cost in costs]
    assert lengths == [(1, 4097), (1, 5120), (1, 6144), (1, 7168), (1, 8192)]


def test_the_command_bucket_prints_costs(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    pick, default = candidates()
    pipeline = AtLengths(short=pick.name, long=default.name)
    monkeypatch.setattr(listed, "LocalPipeline", lambda *_: pipeline)
    shape = ["--batch", "1", "--heads", "8", "--seqlen", "1000", "--top-k", "8"]
    with settings.override(cache_dir=tmp_path):
        assert main(["bucket", "--device-type", "H100", *shape]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        assert main(["bucket", "--device-type", "H100", *shape, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert not list(tmp_path.rglob("*.json*"))  # nothing is recorded
    assert len(lines) == 1 + len(said["lengths"])
    assert said["pick"] == default.name
    assert [round(at["cost"], 2) for at in said["lengths"]] == [0.25, 0.25, 0.0, 0.0, 0.0]
