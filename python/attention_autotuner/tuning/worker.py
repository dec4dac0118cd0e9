"""A process that runs kernels nobody has run before: a crash, a hang or a flood of output ends it and nobody else.

:class:`Worker` is the caller's side. It starts a server (:mod:`.worker_server`) that imports the tasks, and cupy
with them, once and then forks a child whenever it is asked for one: the first is there when the kernels are built, and
the next within milliseconds. Requests and answers are lines of JSON on a socket; what a child prints goes down a pipe
that is drained.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from math import inf
from typing import Any

from ..core.outcome import Crashed, Outcome, OutOfMemory, Postponed, TimedOut, outcome_from_json
from ..errors import ArtifactError
from . import worker_server
from .rounds import FaultError
from .worker_server import FORK, STOP

TASKS = "attention_autotuner.tuning.cupy_tasks"
REMEDY = (
    "Where a GPU takes one process alone, candidates run in the caller's with in_process=True "
    "(ATTENTION_AUTOTUNER_IN_PROCESS=1)"
)
DIED = Crashed(reason="its process died")  # its exit status says more
LAST_WORDS = 400  # characters of what a child printed that a reason ends with
STOP_SECONDS = 30.0  # for a killed child to be gone: the driver clears up after it
SERVER_SECONDS = 2.0  # for a server to end by itself


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a task.

    Attributes:
        launch_seconds: of a kernel's load, and of launches that are waited for at once, beyond what a slow GPU needs.
        other_seconds: of any other step: Python, cupy and CUDA coming up, memory, inputs.
        output_bytes: that a task may print.
    """

    launch_seconds: float = 20.0
    other_seconds: float = 120.0
    output_bytes: int = 1 << 20


class Worker:
    """The worker of one GPU. It is started by :meth:`start`, else by the first call; :meth:`close` ends it.

    Args:
        device: CUDA device index.
        limits: of its tasks.
        tasks: module with the class ``Tasks`` and the function ``classify``.

    Attributes:
        deadline: of ``time.monotonic``, seconds; a task that runs then is ended, and is to blame for nothing.
        server: the process that forks those that run tasks.
        memory_bytes: of the device that processes may take that begin from now on; None for all that is free.
    """

    def __init__(self, device: int, *, limits: Limits | None = None, tasks: str = TASKS) -> None:
        self.device, self.limits = device, limits or Limits()
        self.deadline = inf
        self.server: subprocess.Popen[bytes] | None = None
        self.memory_bytes: int | None = None
        self._tasks = tasks
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._opened = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # of the server

    def start(self) -> None:
        """Begin to start; returns at once. Any thread may call it."""
        with self._lock:
            if self._child is None:
                if self.server is None:
                    self._serve()
                self._child = _Child(self._control)
                bound = {} if self.memory_bytes is None else {"memory_bytes": self.memory_bytes}
                self._child.send("open", {"device": self.device, **bound})

    def call(self, task: str, **arguments: Any) -> Any:
        """Run a task and wait for its answer.

        Args:
            task: a method of ``Tasks``.
            arguments: its arguments, as JSON has them.

        Raises:
            FaultError: it did not end well.
            ArtifactError: there is no such process to be had, or it cannot use the GPU.
        """
        self.start()
        child = self._child
        assert child is not None
        try:
            if not self._opened:
                child.receive(self.limits, self.deadline)
                self._opened = True
            child.send(task, arguments)
            return child.receive(self.limits, self.deadline)
        except FaultError as fault:
            opened, explained = self._opened, child.explained(fault, self.stop())
            if not opened and not isinstance(fault.outcome, Postponed):
                self._log.seek(0)
                words = self._log.read()[-LAST_WORDS:].decode(errors="replace").strip()
                reason = f"{explained} {words}\n{REMEDY}"
                raise ArtifactError(
                    f"no process runs candidates on cuda:{self.device}: {reason}"
                ) from fault
            self.start()  # the next task finds a process ready
            raise explained from fault
        except BaseException:  # Ctrl-C: its answer would be taken for another's
            self.stop()
            raise

    def renew(self) -> None:
        """Go on in a process that has run nothing yet."""
        if self._opened:
            self.stop()
        self.start()

    def stop(self) -> int | None:
        """End the present process, which a call replaces; answers its exit status, None where that is not known."""
        with self._lock:
            if self._child is None:
                return None
            status = self._child.end(ask=self._opened)
            self._child, self._opened = None, False
            if status is None:  # nor is the server fit for another
                self._end()
            return status

    def close(self) -> None:
        """End all processes; nothing is called any more."""
        self.stop()
        self._end()
        self._log.close()

    def _serve(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(STOP_SECONDS)
        command = [sys.executable, "-W", "ignore", "-m", worker_server.__name__]
        with theirs:
            self.server = subprocess.Popen(
                [*command, str(theirs.fileno()), self._tasks],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to the caller alone
            )

    def _end(self) -> None:
        """End the server, which ends its child; the end of this process does the same."""
        server, self.server = self.server, None
        if server is not None:
            self._control.close()
            try:
                server.wait(SERVER_SECONDS)
            except subprocess.TimeoutExpired:  # it imports
                server.kill()
                server.wait()


def outcome_or_data(data: dict[str, Any]) -> Any:
    """Rebuild outcomes while JSON is read: its ``object_hook``."""
    return outcome_from_json(data) if "kind" in data else data


class _Child:
    """One child of the server; where the server is gone, :meth:`receive` says that nobody is there."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._channel, theirs = socket.socketpair()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._output = open(reading, "rb", buffering=0)  # noqa: PTH123, SIM115  # closed with the child
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(control, [FORK], [theirs.fileno(), writing])
        os.close(writing)
        self._poll = select.poll()
        for source in (self._channel, self._output):
            self._poll.register(source, select.POLLIN)
        self._lines = self._tail = b""
        self._printed = 0

    def send(self, task: str, arguments: dict[str, Any]) -> None:
        """Ask for a task."""
        self._printed, self._tail = 0, b""
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps([task, arguments]).encode() + b"\n")

    def receive(self, limits: Limits, deadline: float) -> Any:
        """The result of the task.

        Raises:
            FaultError: there is none.
        """
        at, seconds = None, limits.other_seconds
        try:
            while True:
                line = self._line(seconds, limits.output_bytes, deadline)
                kind, value, *more = json.loads(line, object_hook=outcome_or_data)
                if kind == "at":
                    at, needed = value, more[0]
                    launch = limits.launch_seconds + (needed or 0.0)
                    seconds = limits.other_seconds if needed is None else launch
                elif kind == "fault":
                    raise FaultError(value, more[0])
                else:
                    return value
        except FaultError as error:
            error.at = error.at or at
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            overwritten = Crashed(reason="it wrote over the answer of its process")
            raise FaultError(overwritten, at) from error

    def _line(self, seconds: float, output_bytes: int, deadline: float) -> bytes:
        """The next line of its answer."""
        end = time.monotonic() + seconds
        late: Outcome = TimedOut(reason=f"it did not end within {seconds:g} s")
        if deadline < end:
            end, late = deadline, Postponed(reason="the budget ended while it ran")
        while b"\n" not in self._lines:
            if (left := end - time.monotonic()) <= 0:
                raise FaultError(late)
            ready = [descriptor for descriptor, _ in self._poll.poll(left * 1e3)]
            if ready:
                self._drain()
            if self._printed > output_bytes:
                raise FaultError(Crashed(reason=f"it printed more than {output_bytes} bytes"))
            if self._channel.fileno() in ready:
                received = b""
                with contextlib.suppress(OSError):
                    received = self._channel.recv(1 << 16)
                if not received:
                    raise FaultError(DIED)
                self._lines += received
        line, self._lines = self._lines.split(b"\n", 1)
        return line

    def _drain(self) -> None:
        printed = self._output.read(1 << 20)
        if printed:
            self._printed += len(printed)
            self._tail = (self._tail + printed)[-LAST_WORDS:]
        elif printed is not None:  # its end is closed
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._output)

    def explained(self, fault: FaultError, status: int | None) -> FaultError:
        """A fault with the reason that the exit status gives, where the child died of itself, and its last words."""
        outcome = fault.outcome
        if outcome is DIED:
            how = f"its process ended with status {status}"
            if status is None:
                how = "its process is gone, and the one that could say why"
            elif status < 0:
                how = f"its process was ended by signal {-status} ({signal.Signals(-status).name})"
            outcome = (OutOfMemory if status == -signal.SIGKILL else Crashed)(reason=how)
        if words := self._tail.decode(errors="replace").strip():
            outcome = type(outcome)(reason=f"{outcome.reason}; it printed: {words}")
        return FaultError(outcome, fault.at)

    def end(self, *, ask: bool) -> int | None:
        """Have the server kill the child; its exit status, None where the server is not asked or does not say."""
        try:
            if ask:
                self._control.send(STOP)
            return int(self._control.recv(64)) if ask else None
        except (OSError, ValueError):
            return None
        finally:
            self._channel.close()
            self._output.close()
