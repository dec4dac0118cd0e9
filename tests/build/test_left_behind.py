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


def hanging_compiler(folder: Path, started: str) -> Path:
    """A compiler that makes a file in a folder and then hangs over the first kernel of a batch."""
    nvcc = folder / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\ncase "$*" in *sources/k0.cu*) touch {folder / started}; sleep 600;; esac\n'
        f'exec {find_toolchain().nvcc} "$@"\n'
    )
    nvcc.chmod(0o755)
    return nvcc


def wait_for(started: Path, caller: subprocess.Popen[bytes]) -> None:
    """Wait until a hanging compiler has begun."""
    deadline = time.monotonic() + 60
    while not started.exists():
        assert caller.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


COMMAND = "import sys; from attention_autotuner.cli.entry import main; sys.exit(main(sys.argv[2:]))"
TUNE = ["tune", "--device-type", "A100", "--dim-qk", "64", "--top-k", "1", "--budget", "300"]


def test_a_command_that_is_asked_to_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTENTION_AUTOTUNER_NVCC", str(hanging_compiler(tmp_path, "started")))
    monkeypatch.setenv("ATTENTION_AUTOTUNER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ATTENTION_AUTOTUNER_JOBS", "1")
    caller = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path), *TUNE],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(tmp_path / "started", caller)
    caller.send_signal(signal.SIGTERM)
    assert caller.wait(20) == 130  # with the best so far
    assert processes_of(tmp_path) == []
    assert not list((tmp_path / "cache" / "building").iterdir())
    assert not list((tmp_path / "cache" / "staging").iterdir())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_compiler_that_hangs_ends_with_the_caller(
    tmp_path_factory: pytest.TempPathFactory, how: signal.Signals
) -> None:
    folder = tmp_path_factory.getbasetemp() / "left_behind"  # one cache: CMake looks at nvcc once
    folder.mkdir(exist_ok=True)
    hanging_compiler(folder, how.name)
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(folder)], cwd=REPOSITORY)
    wait_for(folder / how.name, caller)
    assert len(processes_of(folder)) >= 3  # Ninja, the launcher and the compiler
    caller.send_signal(how)
    assert caller.wait(10) == -how
    deadline = time.monotonic() + 10
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
