"""The server of a worker, run as ``python -m attention_autotuner.tuning.worker_server FD TASKS``.

It imports the module of the tasks, with cupy or torch, and forks a child that runs tasks whenever the caller asks for
one. Only children touch CUDA, one at a time. Server and child end when the caller does, however that comes about.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from typing import Any

from ..core.outcome import Outcome
from .rounds import FaultError

FORK, STOP = b"fork", b"stop"
WATCH_SECONDS = 1.0  # between looks at whether the caller lives
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def serve(control: socket.socket, tasks: str) -> None:
    """Fork and end children as the caller asks, until it is gone."""
    caller = os.getppid()
    module = importlib.import_module(tasks)
    child = 0
    while True:
        if not select.select([control], [], [], WATCH_SECONDS)[0]:
            if os.getppid() == caller:  # a fork of the caller may hold its end of the socket
                continue
            break
        message, descriptors, _, _ = socket.recv_fds(control, 16, 2)
        if message == FORK:
            child = os.fork()
            if child == 0:
                control.close()
                _be_child(descriptors[0], descriptors[1], module)
            for descriptor in descriptors:
                os.close(descriptor)
        elif message == STOP:
            status, child = _ended(child), 0
            control.send(str(status).encode())
        else:
            break
    if child:
        _ended(child)
    os._exit(0)  # the modules' own ends take seconds


def _ended(child: int) -> int:
    """Kill a child with all that it started; its exit status, the signal's negative number where one ended it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # not there yet where the child has just begun
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _be_child(channel: int, output: int, module: Any) -> None:
    """Answer requests until there are no more; never returns."""
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        with socket.socket(fileno=channel) as connection:
            _answer(connection, module)
        status = 0
    except BaseException:  # noqa: BLE001  # nothing may run on in what is a copy of the server
        traceback.print_exc()
    finally:
        os._exit(status)


def _outcome(result: Any) -> dict[str, Any]:
    if not isinstance(result, Outcome):
        raise TypeError(f"a task answers with JSON and outcomes, got {type(result).__name__}")
    return result.to_json()


def _answer(connection: socket.socket, module: Any) -> None:
    def say(*message: Any) -> None:
        connection.sendall(json.dumps(message, default=_outcome).encode() + b"\n")

    tasks = module.Tasks(lambda at, seconds: say("at", at, seconds))
    for line in connection.makefile("rb"):
        task, arguments = json.loads(line)
        try:
            say("result", getattr(tasks, task)(**arguments))
        except BaseException as error:  # noqa: BLE001  # an exit as well: it is the caller's to know
            fault = error if isinstance(error, FaultError) else FaultError(module.classify(error))
            say("fault", fault.outcome, fault.at)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
