"""The checks of a GPU before a search measures on it: that it takes the worker's process, and is at rest.

The driver and its management library (NVML) are asked, neither of which creates a CUDA context. What they do not say,
e.g. on a part of a GPU (MIG) or in a container without NVML, stands in nobody's way.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from ..arch.probe import cuda_driver
from ..errors import BusyError, UnsupportedArchitectureError

NVML_LIBRARY = "libnvidia-ml.so.1"
PROHIBITED, EXCLUSIVE = 2, 3  # values of CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
# Of the time, with a kernel running: more than a desktop, less than a training step.
BUSY_PERCENT = 25
# For work that is queued to end, and for a figure that covers up to the last second.
REST_SECONDS = 3.0
POLL_SECONDS = 0.1


def require_room(device: int) -> None:
    """Check that a second process can use a GPU beside this one, which computes references there.

    Raises:
        BusyError: its compute mode forbids that.
    """
    try:
        mode = cuda_driver().attribute(device, COMPUTE_MODE)
    except UnsupportedArchitectureError:
        return
    if mode == PROHIBITED:
        raise BusyError(f"cuda:{device} takes no process: its compute mode is prohibited")
    if mode == EXCLUSIVE:
        raise BusyError(
            f"cuda:{device} takes one process alone (its compute mode is exclusive): search with in_process=True "
            "(ATTENTION_AUTOTUNER_IN_PROCESS=1)"
        )


def require_rest(device: int, percent: Callable[[int], int | None] | None = None) -> None:
    """Wait until a GPU is at rest.

    Args:
        device: CUDA device index.
        percent: gives the share of the last second in which a kernel ran; by default :func:`utilization`.

    Raises:
        BusyError: it is still at work after :data:`REST_SECONDS`.
    """
    end = time.monotonic() + REST_SECONDS
    while (busy := (percent or utilization)(device)) is not None and busy > BUSY_PERCENT:
        if time.monotonic() > end:
            raise BusyError(
                f"cuda:{device} is at work {busy} % of the time, and what is measured beside that is of no use; search "
                "while it rests, or force it with ATTENTION_AUTOTUNER_ALLOW_BUSY=1"
            )
        time.sleep(POLL_SECONDS)


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def utilization(device: int) -> int | None:
    """The percentage of the last second in which a kernel ran on a GPU; None where that is not known."""
    try:
        nvml: Any = ctypes.CDLL(NVML_LIBRARY)
        name = f"GPU-{cuda_driver().uuid(device)}".encode()
    except (OSError, UnsupportedArchitectureError):
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        handle, rates = ctypes.c_void_p(), _Utilization()
        failed = nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates))
        return None if failed else int(rates.gpu)
    finally:
        nvml.nvmlShutdown()
