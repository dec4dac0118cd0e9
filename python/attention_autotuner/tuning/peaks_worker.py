"""A process of its own that measures peaks: a kernel that breaks the CUDA context breaks nothing else.

Run as ``python -m attention_autotuner.tuning.peaks_worker LIBRARY SECONDS NAME...``; it prints one line of JSON for
each name as soon as that is known, and ends after one at which CUDA failed. The library's interface is
``templates/include/attention_autotuner/peaks/peaks.h``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

PREFIX = "attention_autotuner_"
FIGURES = ("value", "spread", "samples", "sm_clock_hz", "seconds")  # of a result
CUDA_ERROR = 1000  # abi.h
GO_ON_IN_ANOTHER = 3  # exit status: CUDA failed, and what is left deserves a context that did not


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
    measure = getattr(library, PREFIX + "measure_peak")
    measure.restype = ctypes.c_int32
    measure.argtypes = (ctypes.c_char_p, ctypes.c_double, ctypes.POINTER(PeakResult))
    unit = getattr(library, PREFIX + "peak_unit")
    unit.restype, unit.argtypes = ctypes.c_char_p, (ctypes.c_char_p,)
    text = getattr(library, PREFIX + "peak_status_string")
    text.restype, text.argtypes = ctypes.c_char_p, (ctypes.c_int32,)
    return library


def measure(library: ctypes.CDLL, which: str, seconds: float) -> dict[str, Any]:
    """One peak as a JSON-ready object: its figures, or the status and what that means."""
    result = PeakResult(struct_size=ctypes.sizeof(PeakResult))
    name = which.encode()
    status = getattr(library, PREFIX + "measure_peak")(name, seconds, ctypes.byref(result))
    if status != 0:
        text = getattr(library, PREFIX + "peak_status_string")(status)
        return {"which": which, "status": status, "reason": text.decode(errors="replace")}
    unit = getattr(library, PREFIX + "peak_unit")(name)
    return {
        "which": which,
        "status": 0,
        "unit": unit.decode(),
        **{name: getattr(result, name) for name in FIGURES},
    }


def main(arguments: list[str]) -> int:
    """Measure what is asked; see the module's text."""
    path, seconds, *names = arguments
    library = open_library(path)
    for which in names:
        answer = measure(library, which, float(seconds))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if answer["status"] >= CUDA_ERROR:
            return GO_ON_IN_ANOTHER
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
