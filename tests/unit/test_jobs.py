from __future__ import annotations

import os
from pathlib import Path

import pytest

from attention_autotuner.codegen import jobs
from attention_autotuner.codegen.jobs import JOB_BYTES, available_bytes, available_cores, job_count


@pytest.mark.parametrize(
    ("pending", "cores", "memory", "expected"),
    [
        (10, 4, 100 * JOB_BYTES, 4),
        (3, 16, 100 * JOB_BYTES, 3),
        (10, 16, 5 * JOB_BYTES, 5),
        (10, 16, JOB_BYTES // 2, 1),
        (10, 8, None, 8),
        (0, 8, None, 1),
    ],
)
def test_the_scarcest_resource_decides(
    monkeypatch: pytest.MonkeyPatch, pending: int, cores: int, memory: int | None, expected: int
) -> None:
    monkeypatch.setattr(jobs, "available_cores", lambda: cores)
    monkeypatch.setattr(jobs, "available_bytes", lambda: memory)
    assert job_count(pending) == expected


def test_a_request_overrides_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "available_cores", lambda: 1)
    monkeypatch.setattr(jobs, "available_bytes", lambda: 0)
    assert job_count(10, 6) == 6
    assert job_count(4, 6) == 4
    assert job_count(4, 0) == 1


def test_available_memory_is_limited_by_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       9000 kB\nMemFree:  1 kB\nMemAvailable:    5000 kB\n")
    assert available_bytes(meminfo=meminfo, cgroup=tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_bytes(meminfo=meminfo, cgroup=tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("4000\n")
    assert available_bytes(meminfo=meminfo, cgroup=tmp_path) == 3000
    (tmp_path / "memory.current").write_text("5000\n")
    assert available_bytes(meminfo=meminfo, cgroup=tmp_path) == 0
    assert available_bytes(meminfo=tmp_path / "none", cgroup=tmp_path / "none") is None


def test_available_cores_are_limited_by_affinity_and_container(tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    assert available_cores(cgroup=tmp_path) == allowed
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(cgroup=tmp_path) == allowed
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert available_cores(cgroup=tmp_path) == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_cores(cgroup=tmp_path) == 1
    (tmp_path / "cpu.max").write_text(f"{100000 * (allowed + 5)} 100000\n")
    assert available_cores(cgroup=tmp_path) == allowed


def test_this_machine_has_memory_and_cores() -> None:
    memory = available_bytes()
    assert memory is not None
    assert memory > 2**20
    assert available_cores() >= 1
