"""Searches that are killed, and many at once: nothing is done twice, nothing is lost but what was in flight."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from attention_autotuner.core.outcome import Crashed, Ok, OutOfMemory, Postponed, Wrong
from attention_autotuner.errors import StoreError
from attention_autotuner.tuning.journal import Journal, kernel_id, key_of
from attention_autotuner.tuning.racing import Race
from attention_autotuner.tuning.records import RecordStore
from tests import fake_processes
from tests.fake_pipeline import GPU
from tests.fake_processes import PROBLEM, ROUNDS, TOP_K, log, search, search_until_killed

FORK = multiprocessing.get_context(
    "fork"
)  # a fresh interpreter takes a second, which kills are many of
STEPS = 2 * (TOP_K + 1) + ROUNDS + 1  # builds, checks, rounds, a confirmation
KEY = key_of(PROBLEM, GPU)


def check_done(folder: Path, *, lost: int) -> None:
    """Check the log and the record of a search that came to its end after some kills."""
    result = search(folder)
    assert result.status in ("measured", "recorded")
    steps = log(folder)
    assert set(Counter(steps).values()) == {1}, "a step was done twice"
    assert len(steps) == STEPS, f"{lost} kills"
    ((_, record),) = RecordStore(folder / "records").records()
    assert (record.pick, record.confirmed) == (fake_processes.best(), True)
    samples = {
        entry.candidate.name: entry.measurement and entry.measurement.samples
        for entry in record.entries
    }
    assert samples.pop(fake_processes.wrong()) is None
    assert samples[record.pick] == samples[record.default] == ROUNDS
    assert not list((folder / "records").rglob("*.lease"))


@pytest.mark.parametrize("kill_at", [1, 3, 5, 6, 8, 10, 11, 12, 15, 22, STEPS])
def test_a_search_that_is_killed_goes_on_where_it_was(tmp_path: Path, kill_at: int) -> None:
    killed = FORK.Process(target=search_until_killed, args=(tmp_path, 0.0, kill_at))
    killed.start()
    killed.join(30.0)
    assert killed.exitcode == -signal.SIGKILL
    assert len(log(tmp_path)) == kill_at - 1
    check_done(tmp_path, lost=1)


def test_thirty_kills_at_random_moments(tmp_path: Path) -> None:
    clock = random.Random(17)
    progress: list[int] = []
    for _ in range(30):
        process = FORK.Process(target=search, args=(tmp_path, 0.03))
        process.start()
        aim = sum(progress[-1:]) + clock.randrange(3)  # steps, as the machine may be slow just now
        while len(log(tmp_path)) < aim and process.is_alive():
            time.sleep(0.002)
        time.sleep(clock.uniform(0.0, 0.1))
        process.kill()
        process.join(30.0)
        progress.append(len(log(tmp_path)))
    assert len(set(progress)) >= 6  # kills hit it at so many places
    steps = Counter(log(tmp_path))
    # A step that was done, and not yet written down when its process was killed, is in flight.
    assert sum(steps.values()) - len(steps) <= 2
    result = search(tmp_path)
    assert result.pick.name == fake_processes.best()
    assert len(Counter(log(tmp_path))) == STEPS


def test_sixteen_processes_do_the_work_of_one(tmp_path: Path) -> None:
    processes = [FORK.Process(target=search, args=(tmp_path, 0.02)) for _ in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
        assert process.exitcode == 0
    check_done(tmp_path, lost=0)


def test_a_record_that_is_removed_takes_its_journal_along(tmp_path: Path) -> None:
    check_done(tmp_path, lost=0)
    records = RecordStore(tmp_path / "records")
    records.remove([kept.key for kept in records.kept()])
    assert not [path for path in records.root.rglob("*") if path.is_file()]
    search(tmp_path)
    assert set(Counter(log(tmp_path)).values()) == {1, 2}  # but for the builds all of it again


# --- the file ------------------------------------------------------------------------------------


def test_what_is_written_is_read_and_what_may_pass_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    journal = Journal(path, KEY)
    first, second = kernel_id("one", "1" * 64), kernel_id("two", "2" * 64)
    journal.add_outcome(first, Ok())
    journal.add_outcome(second, Wrong(reason="off by 3"))
    journal.add_outcome("three", OutOfMemory(reason="another process has it"))
    journal.add_outcome("three", Postponed(reason="later"))
    journal.add_ratio(first, second, 1.25)
    journal.add_ratio(second, first, None)
    race = Race(["one", "two"], history=journal.race({"one": first, "two": second}))
    race.order()
    race.add({"two": 3.0, "one": 2.0})
    race.fail("two", Crashed(reason="SIGSEGV"))
    again = Journal(path, KEY)
    assert [again.outcome(name) for name in (first, second, "three")] == [
        Ok(),
        Wrong(reason="off by 3"),
        None,
    ]
    assert (again.ratio(first, second), again.ratio(second, first)) == (1.25, None)
    history = again.race({"one": first, "two": second, "new": "new"})
    assert (history.rounds, history.failed) == (
        [{"two": 3.0, "one": 2.0}],
        {"two": Crashed(reason="SIGSEGV")},
    )
    resumed = Race(["one", "two", "new"], history=history)
    assert (resumed.rounds, resumed.running, resumed.balanced) == (1, ["one", "new"], False)
    assert resumed.order() == ["one"]  # the reverse of the round before, without what failed
    # Another source, another problem or another driver: nothing holds.
    assert again.race({"one": kernel_id("one", "3" * 64)}).rounds == []
    assert Journal(path, "another").outcome(first) is None
    again.end()
    ended = Journal(path, KEY)
    assert ended.outcome(first) == Ok()
    assert (ended.race({"one": first}).rounds, ended.ratio(first, second)) == ([], None)


@pytest.mark.parametrize(
    "damage",
    [
        b'\n{"key":"KEY","kernel":"x","outc',
        b"\n\xff\xfe\n",
        b"\n[1]\n",
        b'\n{"key":"KEY","kernel":"x","outcome":{"kind":"brilliant"}}\n',
        b'\n{"key":"KEY","round":{"x":-1.0}}\n',
        b'\n{"key":"KEY","round":{"x":NaN}}\n',
        b'\n{"key":"KEY","round":7}\n',
        b'\n{"key":"KEY","ratio":[]}\n',
        b"\n" + b"[" * 100_000 + b"\n",
    ],
)
def test_a_damaged_line_costs_itself_alone(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.jsonl"
    Journal(path, KEY).add_outcome("before", Ok())
    with path.open("ab") as file:
        file.write(damage.replace(b"KEY", KEY.encode()))
    journal = Journal(path, KEY)
    journal.add_outcome("after", Ok())
    again = Journal(path, KEY)
    assert (again.outcome("before"), again.outcome("after"), again.outcome("x")) == (
        Ok(),
        Ok(),
        None,
    )
    assert again.race({"x": "x"}).rounds == []
    assert json.loads(path.read_bytes().splitlines()[-1])["kernel"] == "after"


def test_a_fresh_search_reads_nothing_and_ends_what_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    Journal(path, KEY, fresh=True)
    assert not path.exists()
    journal = Journal(path, KEY)
    journal.add_outcome("x", Ok())
    journal.race({"x": "x"}).add({"x": 1.0})
    fresh = Journal(path, KEY, fresh=True)
    assert (fresh.outcome("x"), fresh.race({"x": "x"}).rounds) == (None, [])
    assert Journal(path, KEY).race({"x": "x"}).rounds == []


def test_a_journal_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot (read|write) the journal .*file/a\.jsonl"):
        Journal(tmp_path / "file" / "a.jsonl", KEY).add_outcome("x", Ok())
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(StoreError, match="cannot read the journal"):
        Journal(tmp_path / "a.jsonl", KEY)
