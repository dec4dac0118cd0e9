"""Builds whose caller is killed while a compiler hangs: nothing of them goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attention_autotuner.codegen.toolchain import find_toolchain

REPOSITORY = Path(__file__).parents[2]
CALLER = """
import sys
from dataclasses import replace
from pathlib import Path
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from tests.build.test_build import TARGET, _trivial
folder = Path(sys.argv[1])
hanging = replace(find_toolchain(), nvcc=folder / "nvcc")
build([_trivial("one")], TARGET, toolchain=hanging, store=Store(folder / "cache"))
"""


def processes_of(folder: Path) -> list[str]:
    """The command lines that name a folder, but for the caller's own."""
    lines = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended meanwhile
                continue
            if str(folder) in command and "import sys" not in command:
                lines.append(command)
    return lines


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_compiler_that_hangs_ends_with_the_caller(
    tmp_path_factory: pytest.TempPathFactory, how: signal.Signals
) -> None:
    folder = tmp_path_factory.getbasetemp() / "left_behind"  # one cache: CMake looks at nvcc once
    folder.mkdir(exist_ok=True)
    nvcc, started = folder / "nvcc", folder / how.name
    nvcc.write_text(
        f'#!/bin/sh\ncase "$*" in *sources/k0.cu*) touch {started}; sleep 600;; esac\n'
        f'exec {find_toolchain().nvcc} "$@"\n'
    )
    nvcc.chmod(0o755)
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(folder)], cwd=REPOSITORY)
    deadline = time.monotonic() + 60
    while not started.exists():
        assert caller.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(processes_of(folder)) >= 3  # Ninja, the launcher and the compiler
    caller.send_signal(how)
    assert caller.wait(10) == -how
    deadline = time.monotonic() + 10
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
