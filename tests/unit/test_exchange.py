"""Records that travel between machines, by the functions and by the command line."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.cli.entry import main
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import RecordError, StoreError
from attention_autotuner.tuning import tune
from attention_autotuner.tuning.exchange import (
    FORMAT,
    later_of,
    read_records,
    take_in,
    write_records,
)
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from tests.fake_pipeline import GPU, FakePipeline, fast
from tests.fake_processes import POLICY, PROBLEM, best

HEADER = json.dumps({"format": FORMAT, "version": 1})
DEFAULT = POLICY.default(PROBLEM).name
Make = Callable[..., TuningRecord]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Tune on some machine at some time."""

    def measured(
        name: str, hour: int, pick: str = "", problem: Problem = PROBLEM, top_k: int = 2, **gpu: Any
    ) -> TuningRecord:
        environment = replace(GPU, time_utc=f"2026-11-22T{hour:02}:00:00+00:00", **gpu)
        pipeline = FakePipeline(
            environment=environment, time_us=fast(pick, 80.0), confirmed_ratio=1.2
        )
        records = RecordStore(tmp_path / name)
        result = tune(problem, POLICY, records=records, pipeline=pipeline, top_k=top_k)
        assert result.record is not None
        return result.record

    return measured


def picks(records: list[TuningRecord]) -> list[str]:
    return [record.pick for record in records]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
def test_what_is_written_is_read(tmp_path: Path, make: Make, name: str) -> None:
    record = make("one", 1, best())
    path = tmp_path / "new" / name
    write_records(path, [record])
    assert read_records([path]) == ([record], [])
    unpack = {"gz": gzip.decompress, "xz": lzma.decompress}.get(name[-2:], bytes)
    assert len(unpack(path.read_bytes()).splitlines()) == 2


def test_the_later_pick_wins_and_entries_of_both_stay(tmp_path: Path, make: Make) -> None:
    early = make("one", 1, best(), top_k=4)
    late = make("two", 2)
    elsewhere = make("three", 3, best(), gpu_name="NVIDIA H200")
    names = {entry.candidate.name for entry in early.entries}
    assert names > {entry.candidate.name for entry in late.entries}
    for order in ([early, late, elsewhere], [elsewhere, late, early]):
        paths = [tmp_path / f"{place}.jsonl" for place in range(3)]
        for path, record in zip(paths, order, strict=True):
            write_records(path, [record])
        records, refused = read_records(paths)
        assert not refused
        assert len(records) == 2  # another GPU's is another record
        (both,) = [record for record in records if record.environment.gpu_name == GPU.gpu_name]
        assert both.pick == DEFAULT
        assert {entry.candidate.name for entry in both.entries} == names
        assert both.entry(best()) is not None
        store = RecordStore(tmp_path / "store")
        take_in(store, records)
        assert take_in(store, records) == 0  # nothing new
        kept = [record for _, record in store.records()]
        assert sorted(picks(kept)) == sorted([DEFAULT, best()])
    # What the cache measured later is not replaced by what another machine measured before.
    here = make("store", 9, "")
    assert take_in(store, [early, late]) == 0
    assert later_of(here, early).pick == later_of(early, here).pick == here.pick


def test_of_another_number_of_sms_nothing_is_mixed(make: Make) -> None:
    early, late = make("one", 1, best(), top_k=4), make("two", 2, best(), num_sms=114)
    assert later_of(late, early) == late


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read the records"),
        ("", "is no file of records"),
        ("{", "is no file of records"),
        ('{"format": "bundle"}', "does not begin with their header"),
        (json.dumps({"format": FORMAT, "version": 7}), "is of version 7, this reads 1"),
        (f"{HEADER}\n[]", "line 2: a record is an object, got list"),
        (f"{HEADER}\n{{", "line 2"),
        (f"{HEADER}\n" + "[" * 100_000, "line 2: it is nested too deeply"),
        (f'{HEADER}\n{{"schema": 3}}', "line 2: the record lacks the field"),
        (f"{HEADER}\nGOOD\n{{", "line 3"),
    ],
)
def test_a_damaged_file_changes_nothing(
    tmp_path: Path,
    make: Make,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    words: str,
) -> None:
    path = tmp_path / "sent.jsonl"
    if text is not None:
        path.write_text(text.replace("GOOD", json.dumps(make("one", 1).to_json())))
    with pytest.raises(RecordError, match=words):
        read_records([path])
    with settings.override(cache_dir=tmp_path / "cache"):
        assert main(["records", "import", str(path)]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_record_of_other_knobs_is_refused_and_the_rest_is_taken(
    tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make("one", 1, best())
    stale = json.loads(json.dumps(make("two", 2, problem=replace(PROBLEM, causal=True)).to_json()))
    for entry in stale["entries"]:
        entry["knob_schema"] = "of another day"
    lines = [HEADER, json.dumps(stale), json.dumps(good.to_json() | {"schema": 99})]
    path = tmp_path / "sent.jsonl"
    path.write_text("\n".join([*lines, json.dumps(good.to_json())]))
    with settings.override(cache_dir=tmp_path / "cache"):
        assert main(["records", "import", str(path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["records"] == 1
    assert [item["place"].rpartition(", ")[2] for item in said["refused"]] == ["line 2", "line 3"]
    assert "knob_schema" in said["refused"][0]["reason"]
    ((_, kept),) = RecordStore(tmp_path / "cache" / "records").records()
    assert kept == good


def test_the_commands_carry_records_from_caches_to_a_cache(
    tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    make("first/records", 1, best())
    make("first/records", 1, problem=replace(PROBLEM, causal=True))
    make("second/records", 2)
    sent = [tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl.gz"]
    for name, path in zip(("first", "second"), sent, strict=True):
        with settings.override(cache_dir=tmp_path / name):
            assert main(["records", "export", str(path)]) == 0
    merged = tmp_path / "merged.jsonl"
    assert main(["records", "merge", str(merged), *map(str, sent)]) == 0
    with settings.override(cache_dir=tmp_path / "third"):
        assert main(["records", "import", str(merged)]) == 0
        assert main(["records", "export", str(tmp_path / "causal.jsonl"), "*causal"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "wrote 2 records",
        "wrote 1 records",
        "wrote 2 records",
        "took in 2 records",
        "wrote 1 records",
    ]
    kept = [record for _, record in RecordStore(tmp_path / "third" / "records").records()]
    assert DEFAULT in picks(kept)
    with pytest.raises(StoreError, match="cannot write the records"):
        write_records(merged / "file", [])
