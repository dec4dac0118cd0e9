from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.codegen import launcher
from attention_autotuner.codegen.tools import run_tool
from attention_autotuner.errors import ToolchainError


def _start(prefix: Path, *command: str, timeout: float = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", launcher.__file__, str(timeout), prefix, *command]
    )


def _read(prefix: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(Path(f"{prefix}.json").read_text())
    return result


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_output_time_memory_and_status_are_kept(tmp_path: Path) -> None:
    prefix = tmp_path / "a step"
    code = "import sys; x = bytearray(64 << 20); print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert _start(prefix, sys.executable, "-S", "-c", code).wait() == 3
    assert sorted(Path(f"{prefix}.log").read_text().split()) == ["err", "out"]
    result = _read(prefix)
    assert result["returncode"] == 3
    assert result["timed_out"] is False
    assert 64 << 20 < result["peak_bytes"] < 256 << 20
    assert 0 < result["seconds"] < 60


def test_a_killed_command_is_reported_with_its_signal(tmp_path: Path) -> None:
    prefix = tmp_path / "step"
    assert _start(prefix, "sh", "-c", "kill -9 $$").wait() == 128 + signal.SIGKILL
    assert _read(prefix)["returncode"] == -signal.SIGKILL


def test_a_missing_command(tmp_path: Path) -> None:
    prefix = tmp_path / "step"
    assert _start(prefix, str(tmp_path / "gone")).wait() == 127
    assert "gone" in Path(f"{prefix}.log").read_text()
    assert _read(prefix)["returncode"] == 127


@pytest.mark.parametrize("how", ["timeout", "terminate"])
def test_the_command_ends_with_all_its_children_before_the_launcher(
    tmp_path: Path, how: str
) -> None:
    prefix, started = tmp_path / "step", tmp_path / "started"
    # With much memory a killed process takes milliseconds to end, which shows who waits for it.
    code = (
        "import os, time\n"
        "memory = b'1' * (256 << 20)\n"
        "if os.fork() == 0:\n"
        "    memory = b'2' * (256 << 20)\n"
        f"    print(os.getppid(), os.getpid(), file=open('{started}.tmp', 'w'), flush=True)\n"
        f"    os.rename('{started}.tmp', '{started}')\n"
        "time.sleep(600)\n"
    )
    process = _start(
        prefix, sys.executable, "-S", "-c", code, timeout=4.0 if how == "timeout" else 0.0
    )
    deadline = time.monotonic() + 10
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if how == "terminate":
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
        assert not Path(f"{prefix}.json").exists()
    else:
        assert process.wait(10) == 128 + signal.SIGKILL
        assert _read(prefix)["timed_out"] is True
    assert not [pid for pid in map(int, started.read_text().split()) if _runs(pid)]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_bound_command_ends_with_its_caller(tmp_path: Path, how: signal.Signals) -> None:
    started = tmp_path / "started"
    program = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-I', '-S', {launcher.__file__!r}, '--bound', str(os.getpid())]\n"
        f"shell = 'echo $$ > {started}.tmp; mv {started}.tmp {started}; exec sleep 600'\n"
        "subprocess.Popen([*command, 'sh', '-c', shell], start_new_session=True).wait()\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 10
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    bound = int(started.read_text())
    assert _runs(bound)
    os.kill(caller.pid, how)
    assert caller.wait(10) == -how
    _wait_until_gone(bound)


def test_a_command_whose_caller_is_gone_does_not_begin(tmp_path: Path) -> None:
    made = tmp_path / "made"
    command = [sys.executable, "-I", "-S", launcher.__file__, "--bound", "1", "touch", str(made)]
    assert subprocess.run(command, check=False).returncode == 128 + signal.SIGTERM
    assert not made.exists()


def test_a_tool_that_hangs_ends_with_all_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    shell = f"sleep 600 & echo $! > {child}; wait"
    with pytest.raises(ToolchainError, match=r"did not end within 0\.5 s"):
        run_tool(["sh", "-c", shell], seconds=0.5)
    _wait_until_gone(int(child.read_text()))
