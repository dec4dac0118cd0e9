"""Leases: one owner at a time, whatever became of the others."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attention_autotuner.core import leases
from attention_autotuner.core.leases import Lease
from attention_autotuner.errors import LeaseError

SPAWN = multiprocessing.get_context("spawn")
HOLDER = """
import sys, time
from pathlib import Path
from attention_autotuner.core.leases import Lease
Lease(Path(sys.argv[1])).wait()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "a.lease"


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds a lease until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_at_a_time(path: Path) -> None:
    first, second = Lease(path), Lease(path)
    with first.wait():
        assert first.attempt()
        assert not second.attempt()
        with pytest.raises(
            LeaseError, match=r"another process holds .*a\.lease for more than 0\.03"
        ):
            second.wait(0.03)
    assert not path.exists()
    assert second.attempt()
    second.release()
    second.release()
    assert list(path.parent.iterdir()) == []


def test_the_lease_of_a_killed_process_is_free_at_once(path: Path) -> None:
    process = holder(path)
    lease = Lease(path)
    assert not lease.attempt()
    os.kill(process.pid, signal.SIGKILL)  # not waited for yet: a zombie holds nothing
    began = time.monotonic()
    lease.wait(10.0)
    assert time.monotonic() - began < 5.0
    process.communicate()
    lease.release()


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("", "BLANK_SECONDS"),  # killed before it wrote its name
        ('{"machine": ["another boot", "pid:[1]"], "pid": 1, "started": "7"}', "STALE_SECONDS"),
        ("[1]", "STALE_SECONDS"),
    ],
)
def test_a_lease_that_nobody_touches_is_taken_over(
    path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limit: str
) -> None:
    path.parent.mkdir()
    path.write_text(text)
    lease = Lease(path)
    assert not lease.attempt()
    monkeypatch.setattr(leases, limit, 0.2)
    for _ in range(4):  # its owner lives
        time.sleep(0.1)
        os.utime(path)
        assert not lease.attempt()
    began = time.monotonic()
    lease.wait(10.0)
    assert 0.1 < time.monotonic() - began < 5.0
    lease.release()


def test_it_is_touched_while_it_is_held(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(leases, "_KEEPER", leases._Keeper())  # whose thread has that pace
    with Lease(path).wait():
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 10.0
        while path.stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_who_lost_a_lease_does_not_take_the_next_owners_away(path: Path) -> None:
    slept, awake = Lease(path), Lease(path)
    slept.wait()
    path.unlink()
    assert awake.attempt()
    slept.release()
    assert json.loads(path.read_bytes())["pid"] == os.getpid()
    awake.release()
    assert not path.exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Lease(tmp_path / "file" / "a.lease").attempt()


def count_up(path: Path, times: int) -> None:
    """Add to a number in a file, which goes wrong where two processes do it at once."""
    counter = path.with_name("counter")
    for _ in range(times):
        with Lease(path).wait():
            number = int(counter.read_text())
            time.sleep(0.001)
            counter.write_text(str(number + 1))


def test_many_processes_one_of_which_was_killed(path: Path) -> None:
    process = holder(path)
    path.with_name("counter").write_text("0")
    workers = [SPAWN.Process(target=count_up, args=(path, 10)) for _ in range(4)]
    for worker in workers:
        worker.start()
    process.kill()
    process.communicate()
    for worker in workers:
        worker.join(30.0)
    assert path.with_name("counter").read_text() == "40"
