"""The tasks of a worker that measures peaks: a kernel that breaks the CUDA context breaks nothing else.

The library's interface is ``templates/include/attention_autotuner/peaks/peaks.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ..core.abi import SYMBOL_PREFIX
from ..core.outcome import Crashed, Outcome

FIGURES = ("value", "spread", "samples", "sm_clock_hz", "seconds")  # of a result


class PeakResult(ctypes.Structure):
    """``attention_autotuner_peak_result`` of the header; a test compares the two."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("samples", ctypes.c_int32),
        ("value", ctypes.c_double),
        ("spread", ctypes.c_double),
        ("sm_clock_hz", ctypes.c_double),
        ("seconds", ctypes.c_double),
    )


def open_library(path: str) -> ctypes.CDLL:
    """The library with its prototypes set."""
    library = ctypes.CDLL(path)
    measure = getattr(library, SYMBOL_PREFIX + "measure_peak")
    measure.restype = ctypes.c_int32
    measure.argtypes = (ctypes.c_char_p, ctypes.c_double, ctypes.POINTER(PeakResult))
    unit = getattr(library, SYMBOL_PREFIX + "peak_unit")
    unit.restype, unit.argtypes = ctypes.c_char_p, (ctypes.c_char_p,)
    text = getattr(library, SYMBOL_PREFIX + "peak_status_string")
    text.restype, text.argtypes = ctypes.c_char_p, (ctypes.c_int32,)
    return library


class Tasks:
    """The tasks of a :class:`.worker.Worker`."""

    def __init__(self, tell: Callable[[str | None, float | None], None]) -> None:
        self._tell = tell

    def open(self, device: int) -> None:
        """Begin; the library takes the first visible device."""

    def measure(self, library: str, which: str, seconds: float) -> dict[str, Any]:
        """One peak as a JSON-ready object: its unit and figures, or the status and what that means."""
        self._tell(which, 0.0)
        opened = open_library(library)
        result = PeakResult(struct_size=ctypes.sizeof(PeakResult))
        name = which.encode()
        status = getattr(opened, SYMBOL_PREFIX + "measure_peak")(
            name, seconds, ctypes.byref(result)
        )
        if status != 0:
            text = getattr(opened, SYMBOL_PREFIX + "peak_status_string")(status)
            return {"status": status, "reason": text.decode(errors="replace")}
        figures = {name: getattr(result, name) for name in FIGURES}
        return {"unit": getattr(opened, SYMBOL_PREFIX + "peak_unit")(name).decode(), **figures}


def classify(error: Exception) -> Outcome:
    """The outcome of a library that cannot be used."""
    return Crashed(reason=f"{type(error).__name__}: {error}")
