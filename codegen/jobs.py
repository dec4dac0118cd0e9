"""The number of compilers that may run at once on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

JOB_BYTES = 1 << 30
"""Memory to plan for one compilation. Measured: 0.4 GB peak for an sm80 forward kernel at head dim 128 with nvcc 13.0
and CUTLASS 4.2.0 headers; the rest is for larger tiles and for the page cache."""

_CGROUP = Path("/sys/fs/cgroup")


def _read_number(path: Path) -> int | None:
    """A number in a kernel file; None where the file is absent or says ``max``."""
    try:
        return int(path.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None


def available_bytes(*, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """Memory that new processes may use: what the kernel calls available, within the container's limit."""
    limits = []
    # Absent where the kernel is not Linux: then the cores alone decide.
    text = meminfo.read_text(encoding="ascii") if meminfo.exists() else ""
    if match := re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE):
        limits.append(int(match[1]) * 1024)
    limit, used = _read_number(cgroup / "memory.max"), _read_number(cgroup / "memory.current")
    if limit is not None and used is not None:
        limits.append(max(0, limit - used))
    return min(limits, default=None)


def available_cores(*, cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use, within the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def job_count(pending: int, requested: int | None = None) -> int:
    """The number of compilations to run at once.

    Args:
        pending: compilations to do.
        requested: overrides cores and memory (the ``JOBS`` setting).

    Returns:
        At least 1.
    """
    if requested is not None:
        return max(1, min(requested, pending))
    limits = [pending, available_cores()]
    memory = available_bytes()
    if memory is not None:
        limits.append(memory // JOB_BYTES)
    return max(1, min(limits))
