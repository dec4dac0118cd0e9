"""Events of a search, and what its journal shows afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.outcome import Ok, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import tune
from attention_autotuner.tuning.progress import Event, listening
from attention_autotuner.tuning.records import RecordStore
from tests.fake_pipeline import FakePipeline, fast

PROBLEM = Problem(batch=2, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024)
POLICY = H100()
DEFAULT = POLICY.default(PROBLEM).name
TOP_K = 4


@pytest.fixture
def records(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")


@pytest.fixture
def challenger() -> str:
    ranked = tune(PROBLEM, POLICY, effort="none", top_k=TOP_K).rows
    return next(row.candidate.name for row in ranked if row.candidate.name != DEFAULT)


def test_what_becomes_of_each_candidate_is_told(records: RecordStore, challenger: str) -> None:
    events: list[Event] = []
    wrong = Wrong(reason="o differs")
    pipeline = FakePipeline(time_us=fast(challenger, 60.0), confirmed_ratio=1.1)
    ranked = tune(PROBLEM, POLICY, effort="none", top_k=TOP_K).rows
    first = next(r.candidate.name for r in ranked if r.candidate.name not in (challenger, DEFAULT))
    pipeline.verify_outcome = lambda name: wrong if name == first else Ok()
    with listening(events.append):
        tune(PROBLEM, POLICY, top_k=TOP_K, records=records, pipeline=pipeline)
    tune(PROBLEM, POLICY, top_k=TOP_K, records=records, pipeline=pipeline)  # not heard any more
    told: dict[str, list[str]] = {}
    for event in events:
        told.setdefault(event.candidate, []).append(event.kind)
    built = ["build_started", "built", "verified"]
    assert told.pop(challenger) == [*built, "timed", "picked"]
    assert told.pop(first) == [*built, "eliminated"]
    assert told.pop(DEFAULT) == [*built, "timed"]  # it is timed to the end
    assert set(told.pop("")) == {"step"}
    assert set(map(tuple, told.values())) == {(*built, "eliminated", "timed")}
    outcomes = {e.candidate: e.outcome for e in events if e.kind == "eliminated"}
    assert outcomes[first] == wrong
    (gain,) = {e.timing.median_us for e in events if e.candidate == challenger and e.timing}
    assert gain == 60.0
    assert {event.seconds for event in events if event.kind == "built"} == {2.0}
