"""Running the tools of a build: without flags from outside, and with all that they print kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import ToolchainError

# Variables that would change a build behind the back of its digest.
_UNWANTED = re.compile(
    r"CMAKE_.*|(C|CXX|CUDA|LD|MAKE)FLAGS|CUDA(ARCHS|CXX|HOSTCXX)|NINJA_STATUS"
    r"|NVCC_(APPEND_FLAGS|CCBIN|PREPEND_FLAGS)"
)


Stop = Callable[[], bool]
"""Asked again and again; true once work is to end as it is."""

STOP_POLL_SECONDS = 0.1


class StoppedError(Exception):
    """A tool was ended because its caller's time was up."""


def clean_environment(temporary: Path | None = None) -> dict[str, str]:
    """The process environment for build tools: no flags from outside, messages in English.

    Args:
        temporary: folder for their temporary files, if not the system's.
    """
    kept = {name: value for name, value in os.environ.items() if not _UNWANTED.fullmatch(name)}
    if temporary is not None:
        kept["TMPDIR"] = str(temporary)
    return {**kept, "LC_ALL": "C"}


def run_tool(
    command: Sequence[str | Path],
    *,
    seconds: float | None = None,
    temporary: Path | None = None,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    stop: Stop = lambda: False,
) -> subprocess.CompletedProcess[str]:
    """Run a tool to its end, in :func:`clean_environment`.

    Args:
        command: the tool and its arguments.
        seconds: how long it may take; None is without end.
        temporary: see :func:`clean_environment`.
        folder: where it runs; default the present one.
        variables: of its environment, beside or in place of those.
        stop: end it when this becomes true.

    Returns:
        Its status, and in ``stdout`` what it printed on both streams.

    Raises:
        ToolchainError: it cannot be started, or did not end in time.
        StoppedError: ``stop`` became true.
    """
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**clean_environment(temporary), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that all it started ends with it
        )
    except OSError as error:
        raise ToolchainError(f"cannot run {command[0]}: {error.strerror or error}") from error
    end = None if seconds is None else time.monotonic() + seconds
    with process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=STOP_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired as error:
                    if end is not None and time.monotonic() > end:
                        raise ToolchainError(
                            f"cannot run {command[0]}: it did not end within {seconds:g} s"
                        ) from error
                if stop():
                    raise StoppedError
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # it is not waited for yet, so this is its group
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output)
