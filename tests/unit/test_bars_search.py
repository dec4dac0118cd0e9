"""The bars of searches, as far as no GPU is needed: how journals and picks are judged, and a search's process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import tune
from attention_autotuner.tuning.records import RecordStore
from tests.fake_pipeline import FakePipeline
from tests.gpu import bars_search
from tests.gpu.bars_search import BACKWARD, FORWARD, SMALL, Search, audit, disagreements

CLEAN: dict[str, Any] = {"twice": [], "lost": {}}


def test_a_journal_with_work_done_twice_or_lost_is_told_from_a_clean_one(tmp_path: Path) -> None:
    pipeline, store = FakePipeline(confirmed_ratio=1.2), RecordStore(tmp_path)
    result = tune(Problem(**SMALL[0]), H100(), records=store, pipeline=pipeline, top_k=2)
    assert result.record_path is not None
    path = result.record_path
    journal = path.with_suffix(".jsonl").read_text()
    entries = json.loads(path.read_text())["entries"]
    clean = audit(journal, entries)
    assert clean == {**CLEAN, "torn": 0, "rounds": 6}

    lines = [line for line in journal.splitlines() if line]
    check = next(line for line in lines if '"outcome"' in line)
    assert len(audit(journal + check, entries)["twice"]) == 1
    timed = next(line for line in lines if '"round"' in line)
    assert set(audit(journal.replace(timed, "", 1), entries)["lost"]) == {
        entry["name"] for entry in entries if entry["measurement"]
    }
    assert audit(journal + timed[:20], entries) == {**CLEAN, "torn": 1, "rounds": 6}


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        ({"pick": "a", "ties": []}, []),
        ({"pick": "b", "ties": ["b", "a"]}, []),
        ({"pick": "b", "ties": ["b", "c"]}, ["b"]),
    ],
)
def test_another_pick_is_one_that_is_not_tied_with_the_usual(
    other: dict[str, Any], apart: list[str]
) -> None:
    assert disagreements([{"pick": "a", "ties": []}] * 2 + [other]) == apart


def test_a_search_runs_in_a_process_of_its_own_and_can_be_killed(tmp_path: Path) -> None:
    options = {"device_type": "H100", "effort": "none"}
    said = Search(tmp_path, [FORWARD, BACKWARD], **options).result()
    assert [item["status"] for item in said] == ["predicted", "predicted"]
    assert said[0]["wall"] >= said[0]["seconds"]
    assert Search(tmp_path, [FORWARD], **options).kill(0.01)
    assert not Search(tmp_path, [FORWARD], **options).kill(60.0)
    assert bars_search.left_behind(tmp_path) == []
    with pytest.raises(RuntimeError, match="no_such"):
        Search(tmp_path, [{"no_such": 1}]).result()


def test_the_processes_of_a_cache_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars_search, "GONE_SECONDS", 0.0)
    search = Search(tmp_path, [FORWARD] * 50, device_type="H100", effort="none")
    try:
        while not bars_search.left_behind(tmp_path):
            assert search.process.poll() is None
        assert bars_search.left_behind(tmp_path) == [search.process.pid]
    finally:
        search.kill(0.0)
    assert os.getpid() not in bars_search.left_behind(tmp_path)


def test_every_bar_of_the_page_is_there_and_without_a_gpu_none_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = bars_search.__doc__ or ""
    assert all(name in said for name in bars_search.BARS)
    path = tmp_path / "bars.json"
    assert bars_search.main(["--output", str(path), "--only", "kills"]) == 2
    assert capsys.readouterr().out
    assert not path.exists()


def test_a_bar_that_fails_is_missed_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path, options: Any) -> Any:
        raise RuntimeError("a search ended with 1")

    path = tmp_path / "bars.json"
    path.write_text(json.dumps({"bars": {"cold": {"passed": True}}}))
    monkeypatch.setattr(bars_search, "detect", lambda device: None)
    monkeypatch.setitem(bars_search.BARS, "budget", fails)
    assert bars_search.main(["--output", str(path), "--only", "budget"]) == 1
    assert "MISS budget: RuntimeError: a search ended with 1" in capsys.readouterr().out
    bars = json.loads(path.read_text())["bars"]
    assert (bars["cold"], bars["budget"]["passed"]) == ({"passed": True}, False)
