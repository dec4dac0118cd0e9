"""Runs one compiler or linker command for Ninja, and keeps its output, time, peak memory and fate in files.

Used as a script: ``python launcher.py <timeout seconds, 0 for none> <prefix> <command...>`` writes ``<prefix>.log``
while the command runs and ``<prefix>.json`` (``returncode, seconds, peak_bytes, timed_out``) once it has ended. As
``python launcher.py --bound <pid of the caller> <command...>`` it becomes the command, which then gets SIGTERM when the
caller's thread ends, however that comes about. It imports the standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the command with all processes it started, and wait until they are gone.

    The caller removes the folder they write into as soon as this launcher has ended.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-child.pid, 0)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def run(timeout: float, prefix: str, command: list[str]) -> int:
    """Run a command, writing its log and its fate.

    Returns:
        Its exit status; 128 + the signal's number where a signal killed it, 127 where it could not start.
    """
    start = time.monotonic()
    timed_out = False
    # What the command leaves behind becomes a child of this process, so that it can be waited for.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with Path(f"{prefix}.log").open("wb") as log:
        try:
            # Its own process group, so that a time-out reaches the compiler's children too.
            child = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            log.write(f"cannot run {command[0]}: {error}\n".encode())
            returncode = 127
        else:
            try:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, _exit)
                returncode = child.wait(timeout or None)
            except subprocess.TimeoutExpired:
                timed_out = True
                returncode = -signal.SIGKILL
            finally:
                if timed_out or child.returncode is None:
                    _kill(child)
    result = {
        "returncode": returncode,
        "seconds": time.monotonic() - start,
        # Of the largest among all processes that the command waited for, in KiB on Linux.
        "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "timed_out": timed_out,
    }
    partial = Path(f"{prefix}.json.partial")
    partial.write_text(json.dumps(result), encoding="ascii")
    partial.rename(f"{prefix}.json")
    return returncode if returncode >= 0 else 128 - returncode


def become(caller: int, command: list[str]) -> None:
    """Run a command in this process's place, bound to the caller's life; returns only where the caller is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == caller:
        os.execvp(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == "--bound":
        become(int(sys.argv[2]), sys.argv[3:])
        sys.exit(128 + signal.SIGTERM)
    sys.exit(run(float(sys.argv[1]), sys.argv[2], sys.argv[3:]))
