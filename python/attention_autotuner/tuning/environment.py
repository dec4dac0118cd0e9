"""The environment of a figure: the GPU and its state, the driver, the libraries, the time of day.

Read through the CUDA driver and ``nvidia-smi``, never through an import of torch (the CUDA it was built with is noted
when it is loaded already). On a machine without a GPU the GPU's fields are None and the rest is filled in.
"""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from ..arch.probe import cuda_driver, imported, probe
from ..core.identity import digest16
from ..errors import UnsupportedArchitectureError
from ..version import __version__

HARD_FIELDS = ("gpu_name", "num_sms")  # another value makes a record a miss
SOFT_FIELDS = ("driver", "cuda_driver", "cuda_runtime", "torch", "nvcc", "cutlass")  # unverified

_SMI_FIELDS = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "pstate": "power_state",
    "power.draw": "power_draw_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "driver_version": "driver",
}
_SMI_TEXTS = ("power_state", "driver")
_SMI_TIMEOUT_SECONDS = 10
_DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where and when a figure was taken; None where this machine cannot say.

    Attributes:
        gpu_name: the driver's device name.
        num_sms: its multiprocessors.
        compute_capability: e.g. ``9.0``.
        sm_clock_mhz, memory_clock_mhz, max_sm_clock_mhz: clocks when it was read.
        power_state: e.g. ``P0``.
        power_draw_w, power_limit_w: watts.
        temperature_c: of the GPU, degrees Celsius.
        driver: driver version, e.g. ``580.95.05``.
        cuda_driver: the newest CUDA the driver knows, e.g. ``13.0``.
        cuda_runtime: the CUDA that torch was built with, where torch is loaded.
        torch: its version, where it is loaded or installed.
        nvcc, cutlass: versions that built the kernels.
        python, package: versions.
        time_utc: ISO 8601.
    """

    gpu_name: str | None = None
    num_sms: int | None = None
    compute_capability: str | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    power_state: str | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    cuda_runtime: str | None = None
    torch: str | None = None
    nvcc: str | None = None
    cutlass: str | None = None
    python: str | None = None
    package: str | None = None
    time_utc: str | None = None

    @property
    def digest(self) -> str:
        """Sixteen hex characters that name this environment inside a record."""
        return digest16(self)

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability as numbers, where a GPU was there."""
        if self.compute_capability is None:
            return None
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Environment:
        """Rebuild from :meth:`to_json`; fields that a newer version added are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


def collect(
    device: int = 0, *, state: bool = True, nvcc: str | None = None, cutlass: str | None = None
) -> Environment:
    """Read this machine's environment.

    Args:
        device: CUDA device index, as ``CUDA_VISIBLE_DEVICES`` numbers them.
        state: read clocks, power and temperature, too; that starts nvidia-smi, which may take a second.
        nvcc: version of the compiler in use, if known.
        cutlass: version of the CUTLASS headers in use, if known.
    """
    values = _read_driver(device)
    gpu_uuid = values.pop("uuid", None)
    version = None if state else _driver_version()
    if version is not None:
        values["driver"] = version
    elif gpu_uuid is not None:
        values |= _read_smi(gpu_uuid)
    torch = imported("torch")
    return Environment(
        **values,
        torch=installed_version("torch"),
        cuda_runtime=None if torch is None else torch.version.cuda,
        nvcc=nvcc,
        cutlass=cutlass,
        python=platform.python_version(),
        package=__version__,
        time_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _driver_version() -> str | None:
    """The driver's version as its kernel module says it; None where it cannot be read."""
    for path in _DRIVER_FILES:
        with contextlib.suppress(OSError):
            match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", path.read_text(encoding="utf-8"))
            if match is not None:
                return match[0]
    return None


def installed_version(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read_driver(device: int) -> dict[str, Any]:
    """Name, SM count, capability and UUID through the driver; it needs no context."""
    try:
        driver = cuda_driver()
        properties = probe(device, driver=driver)
        version, gpu_uuid = driver.version(), driver.uuid(device)
    except UnsupportedArchitectureError:
        return {}
    return {
        "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
        "gpu_name": properties.name,
        "num_sms": properties.num_sms,
        "compute_capability": "{}.{}".format(*properties.compute_capability),
        "uuid": f"GPU-{gpu_uuid}",
    }


def _read_smi(gpu_uuid: str) -> dict[str, Any]:
    """Clocks, power and driver version; empty when nvidia-smi is missing or does not answer."""
    query = [f"--id={gpu_uuid}", f"--query-gpu={','.join(_SMI_FIELDS)}"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_smi(done.stdout)


def parse_smi(line: str) -> dict[str, Any]:
    """The environment's fields from one CSV line of ``nvidia-smi --query-gpu``; empty when it has another shape."""
    cells = [cell.strip() for cell in line.strip().split(",")]
    if len(cells) != len(_SMI_FIELDS):
        return {}
    return {
        name: (cell or None) if name in _SMI_TEXTS else _number(cell)
        for name, cell in zip(_SMI_FIELDS.values(), cells, strict=True)
    }


def _number(text: str) -> float | None:
    """A float, or None for ``[N/A]`` and its kin."""
    try:
        return float(text)
    except ValueError:
        return None
