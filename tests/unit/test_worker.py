"""The two sides of a worker: answers, and everything that may come in their place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.outcome import Crashed, OutOfMemory, Postponed
from attention_autotuner.errors import ArtifactError
from attention_autotuner.tuning.rounds import FaultError
from attention_autotuner.tuning.worker import Limits, Worker
from tests.plain_tasks import REFUSED

TASKS = "tests.plain_tasks"
LIMITS = Limits(launch_seconds=1.0, other_seconds=20.0, output_bytes=1 << 16)
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Worker]:
    worker = Worker(0, limits=LIMITS, tasks=TASKS)
    yield worker
    worker.close()


@pytest.fixture
def worker(server: Worker) -> Iterator[Worker]:
    """A worker that still answers after the test."""
    yield server
    assert server.call("echo", value="still here") == "still here"


def fault_of(worker: Worker, task: str, **arguments: Any) -> FaultError:
    with pytest.raises(FaultError) as caught:
        worker.call(task, **arguments)
    return caught.value


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone, or going while it is read
        return False
    return state != "Z"


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, f"of {pids} some are still there"
        time.sleep(0.02)


def test_answers_are_the_tasks_and_the_process_is_one(worker: Worker) -> None:
    assert worker.call("echo", value=[1, {"a": None}, "é"]) == [1, {"a": None}, "é"]
    assert worker.call("proven", checks=["a", "b"]).proof.checks == ("a", "b")
    pid = worker.call("pid")
    assert pid != os.getpid()
    assert worker.call("pid") == pid
    assert os.getpgid(pid) == pid


def test_a_renewed_worker_is_another_process(worker: Worker) -> None:
    pid = worker.call("pid")
    worker.renew()
    assert worker.call("pid") != pid
    wait_until_gone(pid)


def test_a_crash_names_the_signal_and_who_was_at_it(worker: Worker) -> None:
    fault = fault_of(worker, "crash", at="one")
    assert fault.outcome == Crashed(reason="its process was ended by signal 11 (SIGSEGV)")
    assert fault.at == "one"
    assert fault_of(worker, "crash").at is None  # those before had ended


def test_a_process_that_is_killed_was_out_of_memory(worker: Worker) -> None:
    outcome = fault_of(worker, "crash", number=signal.SIGKILL).outcome
    assert isinstance(outcome, OutOfMemory)
    assert "signal 9 (SIGKILL)" in outcome.reason


@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_ends_with_the_last_words(worker: Worker, status: int) -> None:
    outcome = fault_of(worker, "leave", status=status).outcome
    expected = f"its process ended with status {status}; it printed: these are the last words"
    assert outcome == Crashed(reason=expected)


def test_a_hang_is_cut_short_at_the_limit_of_what_it_does(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = fault_of(worker, "hang", seconds=0.0, at="two")
    assert (fault.outcome.kind, fault.at) == ("timed_out", "two")
    assert fault.outcome.reason == "it did not end within 1 s"
    worker.call("pid")
    monkeypatch.setattr(worker, "limits", Limits(launch_seconds=0.1))
    assert fault_of(worker, "hang", seconds=0.4).outcome.reason.endswith("within 0.5 s")
    worker.call("pid")
    monkeypatch.setattr(worker, "limits", Limits(launch_seconds=20.0, other_seconds=0.4))
    assert fault_of(worker, "hang", seconds=None).outcome.reason.endswith("within 0.4 s")
    monkeypatch.undo()


def test_a_deadline_ends_what_runs_and_blames_nobody(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.call("pid")
    began = time.monotonic()
    monkeypatch.setattr(worker, "deadline", began + 0.3)
    for _ in range(2):  # what is asked for later, too, while the process comes up
        fault = fault_of(worker, "hang", seconds=0.0, at="two")
        assert fault.outcome == Postponed(reason="the budget ended while it ran")
    assert time.monotonic() - began < 5.0
    monkeypatch.undo()


def test_a_flood_of_output_ends_the_process_and_a_trickle_does_not(worker: Worker) -> None:
    pid = worker.call("pid")
    for _ in range(4):
        assert worker.call("write", count=LIMITS.output_bytes // 2) == LIMITS.output_bytes // 2
    assert worker.call("pid") == pid
    outcome = fault_of(worker, "write", count=4 * MEGABYTE).outcome
    assert isinstance(outcome, Crashed)
    assert outcome.reason.startswith(f"it printed more than {LIMITS.output_bytes} bytes")
    assert len(outcome.reason) < 500
    wait_until_gone(pid)


def test_an_answer_that_was_overwritten_is_a_fault(worker: Worker) -> None:
    assert "wrote over the answer" in fault_of(worker, "overwrite").outcome.reason


def test_an_error_of_a_task_is_a_fault_with_what_it_knows(worker: Worker) -> None:
    fault = fault_of(worker, "fail", known=True)
    assert (fault.outcome, fault.at) == (Crashed(reason="the context is lost"), "third")
    fault = fault_of(worker, "fail", known=False)
    assert (fault.outcome.kind, fault.at) == ("launch_failed", None)


def test_what_a_task_started_ends_with_it(worker: Worker) -> None:
    child = worker.call("start_a_child")
    assert runs(child)
    worker.renew()
    wait_until_gone(child)


def test_ctrl_c_ends_the_task_and_no_late_answer_is_taken_for_another(worker: Worker) -> None:
    pid = worker.call("pid")
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.call("hang", seconds=None)
    timer.join()
    assert not runs(pid)


def test_a_dead_server_is_replaced(worker: Worker) -> None:
    assert worker.server is not None
    child = worker.call("pid")
    worker.server.kill()
    wait_until_gone(child)
    assert fault_of(worker, "pid").outcome.reason.startswith("its process is gone")


def test_many_threads_start_one_process() -> None:
    worker = Worker(0, limits=LIMITS, tasks=TASKS)
    threads = [threading.Thread(target=worker.start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pid = worker.call("pid")
    group = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _served(p)]
    assert len(group) == 2  # the server and its child
    worker.close()
    wait_until_gone(pid, *group)


def _served(process: Path) -> bool:
    """True for a server of this test and its children."""
    try:
        command = (process / "cmdline").read_bytes()
        status = (process / "environ").read_bytes()
    except OSError:
        return False
    return TASKS.encode() in command and f"PYTEST_CURRENT_TEST={_test_name()}".encode() in status


def _test_name() -> str:
    return os.environ["PYTEST_CURRENT_TEST"]


@pytest.mark.parametrize(
    ("device", "tasks", "words"),
    [
        (REFUSED, TASKS, "the device is busy or unavailable"),
        (0, "tests.no_such_tasks", "No module named 'tests.no_such_tasks'"),
    ],
)
def test_a_worker_that_cannot_start_says_why_and_what_to_do(
    device: int, tasks: str, words: str
) -> None:
    worker = Worker(device, limits=LIMITS, tasks=tasks)
    with pytest.raises(ArtifactError, match="no process runs candidates") as caught:
        worker.call("pid")
    assert words in str(caught.value)
    assert f"cuda:{device}" in str(caught.value)
    assert "in_process=True" in str(caught.value)
    worker.close()


CALLER = """
import sys
from attention_autotuner.tuning.worker import Worker
worker = Worker(0, tasks="tests.plain_tasks")
print(worker.call("pid"), flush=True)
worker.call("hang", seconds=None)
"""


@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda how: how.name
)
def test_nothing_is_left_of_a_worker_whose_caller_ends(how: signal.Signals) -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert caller.stdout is not None
    child = int(caller.stdout.readline())
    server = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    assert runs(child)
    assert runs(server)
    caller.send_signal(how)
    caller.wait(10)
    caller.stdout.close()
    wait_until_gone(child, server)


def test_processes_that_begin_get_the_bound_on_memory_of_that_moment(worker: Worker) -> None:
    assert worker.call("memory") is None
    worker.memory_bytes = 1 << 30
    assert worker.call("memory") is None
    worker.renew()
    assert worker.call("memory") == 1 << 30
    worker.memory_bytes = None
    worker.renew()
