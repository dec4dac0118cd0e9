"""Events of a search, and what its journal shows afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import H100
from attention_autotuner.cli import main
from attention_autotuner.cli.names import short_names
from attention_autotuner.core.outcome import Ok, Outcome, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import journal, tune
from attention_autotuner.tuning.pipeline import Built
from attention_autotuner.tuning.progress import Event, listening
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.timeline import Timeline, timeline_of
from tests.fake_pipeline import FakeBuilt, FakePipeline, fast
from tests.layout import CHROMIUM, layout

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
    kinds: dict[str, list[str]] = {}
    for event in events:
        kinds.setdefault(event.candidate, []).append(event.kind)
    built = ["build_started", "built", "verified"]
    assert kinds.pop(challenger) == [*built, "timed", "picked"]
    assert kinds.pop(first) == [*built, "eliminated"]
    assert kinds.pop(DEFAULT) == [*built, "timed"]  # it is timed to the end
    assert set(kinds.pop("")) == {"step"}
    assert set(map(tuple, kinds.values())) == {(*built, "eliminated", "timed")}
    outcomes = {e.candidate: e.outcome for e in events if e.kind == "eliminated"}
    assert outcomes[first] == wrong
    (gain,) = {e.timing.median_us for e in events if e.candidate == challenger and e.timing}
    assert gain == 60.0
    assert {event.seconds for event in events if event.kind == "built"} == {2.0}


@dataclass
class Alike(FakePipeline):
    """A pipeline whose compiler makes the same machine code of two kernels, for the GPU and maybe for the host."""

    hosts: int = 1

    def build(self, *arguments: Any, **options: Any) -> Sequence[Built | Outcome]:
        results = super().build(*arguments, **options)
        return [
            replace(cast("FakeBuilt", r), code_digest=f"{i // 2}", host_digest=f"{i % self.hosts}")
            for i, r in enumerate(results)
        ]


def test_where_hosts_launch_equal_machine_code_in_two_ways_both_are_timed(
    records: RecordStore,
) -> None:
    pipeline = Alike(hosts=2)
    tune(PROBLEM, POLICY, top_k=3, records=records, pipeline=pipeline)
    assert len(pipeline.measured) == len(pipeline.built) == 4


def test_of_equal_machine_code_one_is_timed(records: RecordStore) -> None:
    pipeline = Alike()
    result = tune(PROBLEM, POLICY, top_k=3, records=records, pipeline=pipeline)
    assert len(pipeline.built) == 4
    assert len(pipeline.measured) == 2
    assert DEFAULT in pipeline.measured
    same = [row.outcome.reason for row in result.rows if not row.outcome.ok]
    assert same[0].startswith("the same machine code as attention_forward_")
    assert len(same) == 2


# --- the course of a search ------------------------------------------------------------------------


class Clock:
    """Half a second passes between one line of a journal and the next."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        self.now += 0.5
        return self.now


@pytest.fixture
def searched(
    tmp_path: Path, challenger: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """A search that is recorded in the cache: its pick, and a candidate that was wrong."""
    monkeypatch.setattr(journal, "time", Clock())
    rows = tune(PROBLEM, POLICY, effort="none", top_k=TOP_K).rows
    wrong = next(r.candidate.name for r in rows if r.candidate.name not in (challenger, DEFAULT))
    pipeline = FakePipeline(
        time_us=fast(challenger, 60.0),
        confirmed_ratio=1.1,
        verify_outcome=lambda name: Wrong(reason="o <differs>") if name == wrong else Ok(),
    )
    with settings.override(cache_dir=tmp_path):
        tune(PROBLEM, POLICY, top_k=TOP_K, pipeline=pipeline)
        yield challenger, wrong


def test_a_journal_has_the_course_of_each_candidate(searched: tuple[str, str]) -> None:
    pick, wrong = searched
    ((path, record),) = RecordStore(settings.current().cache_dir / "records").records()
    key = journal.key_of(PROBLEM, record.environment)
    candidates = [entry.candidate for entry in record.entries]
    log = path.with_suffix(".jsonl")
    timeline = timeline_of(log, key, candidates)
    assert set(timeline.courses) == {candidate.name for candidate in candidates}
    default, failed = timeline.courses[DEFAULT], timeline.courses[wrong]
    assert default.built == (0.0, 2.0)  # built first, in the two seconds that the pipeline says
    assert default.verified is not None
    assert default.raced is not None
    assert default.built[1] < default.verified < default.raced[0] < default.raced[1]
    assert (timeline.courses[pick].rounds, default.rounds) == (6, 6)
    assert (failed.raced, failed.rounds) == (None, 0)
    assert {c.rounds for n, c in timeline.courses.items() if n not in (pick, DEFAULT, wrong)} == {2}
    assert timeline_of(log, "another key", candidates).courses == {}
    assert timeline_of(log.with_name("none"), key, candidates) == Timeline()
    with log.open("a") as file:  # of a later search that was killed as it wrote
        file.write(f'\n{{"key": "{key}", "at": 9000.0, "built": "')
    assert timeline_of(log, key, candidates) == timeline


def test_a_search_is_written_as_a_page(
    searched: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pick, _ = searched
    shape = ["--batch", "2", "--heads", "8", "--seqlen", "1024", "--device-type", "H100"]
    pages = [tmp_path / "first.html", tmp_path / "second.html"]
    for page in pages:
        assert main(["report", *shape, "--output", str(page)]) == 0
    text = pages[0].read_text()
    assert pages[1].read_text() == text
    assert f"Pick: <code>{short_names(pick)}</code>" in text
    assert text.count("<li>") == text.count("compiled in 2.0 s") // 2 == TOP_K + 1
    assert text.count("<circle") == TOP_K  # of those with both times
    assert "wrong: o &lt;differs&gt;" in text
    assert "timed in 2 rounds" in text
    assert not re.search(r"""(?:src|href)=|url\(|<script|@import""", text), "it needs another file"
    HTMLParser().feed(text)
    capsys.readouterr()
    assert main(["report", *shape, "--output", str(pages[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(pages[0]), "candidates": TOP_K + 1}


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to lay the page out")
def test_nothing_of_a_page_overflows_or_overlaps(searched: tuple[str, str], tmp_path: Path) -> None:
    shape = ["--batch", "2", "--heads", "8", "--seqlen", "1024", "--device-type", "H100"]
    assert main(["report", *shape, "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert {width: layout(page, width, tmp_path) for width in (1400, 390)} == {1400: [], 390: []}


def test_a_page_without_times_says_so(
    searched: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for log in tmp_path.rglob("*.jsonl"):
        log.unlink()
    shape = ["--batch", "2", "--heads", "8", "--seqlen", "1024", "--device-type", "H100"]
    assert main(["report", *shape, "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "compiled in" not in page
    assert "not measured" in page
    assert main(["report", "--device-type", "A100", "--output", str(tmp_path / "none.html")]) == 1
    assert "there is no search to report" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()
