from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_autotuner.codegen.environment import template_root
from attention_autotuner.core.outcome import Crashed, Infeasible, LaunchFailed, TimedOut
from attention_autotuner.tuning import peaks as peaks_module
from attention_autotuner.tuning.peaks import (
    NAMES,
    Peak,
    measure_peaks,
    names_for,
    target_of,
)
from attention_autotuner.tuning.peaks_worker import PeakResult

HEADER = template_root() / "include" / "attention_autotuner" / "peaks/peaks.h"
SOURCE = template_root() / "peaks" / "peaks.cu"
C_TYPES = {"uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "double": ctypes.c_double}


@pytest.fixture(scope="module")
def library(fake_kernel: Callable[..., Path]) -> Path:
    return fake_kernel('-DDIES_AT="nothing"', source="fake_peaks.c")


def test_the_struct_matches_the_header() -> None:
    text = HEADER.read_text()
    body = text[text.index("typedef struct") : text.index("} attention_autotuner_peak_result")]
    declared = re.findall(r"^\s+(\w+) (\w+);", body, re.MULTILINE)
    assert [(name, C_TYPES[kind]) for kind, name in declared] == list(PeakResult._fields_)


def test_the_header_the_library_and_python_name_the_same_peaks() -> None:
    units = r"FLOP/s|results/s|bytes/s|s"
    said = dict(re.findall(rf"^ \*   (\w+) +({units}) ", HEADER.read_text(), re.MULTILINE))
    held = dict(re.findall(rf'\{{"(\w+)", "({units})", measure_', SOURCE.read_text()))
    assert said == held
    assert set(said) == set(NAMES)


def test_wgmma_is_measured_and_compiled_for_on_one_capability_alone() -> None:
    assert names_for((9, 0)) == NAMES
    assert set(NAMES) - set(names_for((12, 0))) == {"wgmma_fp16", "wgmma_bf16"}
    assert target_of((9, 0)).arch == "90a"
    assert [target_of(c).arch for c in ((8, 0), (8, 6), (12, 0))] == ["80", "86", "120"]


def test_figures_are_reported_with_their_units_as_they_are_measured(library: Path) -> None:
    seen: list[str] = []
    peaks = measure_peaks(
        library, ["launch", "exp"], seconds=0.25, progress=lambda name, _: seen.append(name)
    )
    assert seen == ["launch", "exp"]
    assert peaks["launch"] == Peak(
        value=6e12, unit="s", spread=1e9, samples=11, sm_clock_hz=1.8e9, seconds=0.25
    )
    assert isinstance(peaks["exp"], Peak)
    assert peaks["exp"].unit == "FLOP/s"


def test_a_peak_that_cannot_be_measured_has_a_reason_and_the_rest_are_measured(
    library: Path,
) -> None:
    peaks = measure_peaks(library, ["wgmma_fp16", "l2", "smem"], seconds=0.1)
    assert peaks["wgmma_fp16"] == Infeasible(reason="no code for this device (status 4)")
    assert peaks["l2"] == LaunchFailed(reason="out of memory (status 1002)")
    assert isinstance(peaks["smem"], Peak)


def test_a_measurement_that_kills_its_process_costs_no_other(
    fake_kernel: Callable[..., Path],
) -> None:
    deadly = fake_kernel('-DDIES_AT="exp"', source="fake_peaks.c")
    peaks = measure_peaks(deadly, ["launch", "exp", "fp32"], seconds=0.1)
    assert list(peaks) == ["launch", "exp", "fp32"]
    assert isinstance(peaks["exp"], Crashed)
    assert "signal 6 (SIGABRT)" in peaks["exp"].reason
    assert isinstance(peaks["launch"], Peak)
    assert isinstance(peaks["fp32"], Peak)


def test_a_measurement_that_never_ends_is_stopped(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ('-DDIES_AT="nothing"', '-DHANGS_AT="exp"')
    monkeypatch.setattr(peaks_module, "EACH_SECONDS", 0.3)
    hanging = fake_kernel(*options, source="fake_peaks.c")
    peaks = measure_peaks(hanging, ["exp", "fp32"], seconds=0.1)
    assert isinstance(peaks["exp"], TimedOut)
    assert isinstance(peaks["fp32"], Peak)


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    peaks = measure_peaks(tmp_path / "none.so", ["exp"])
    assert isinstance(peaks["exp"], Crashed)
    assert "none.so" in peaks["exp"].reason
