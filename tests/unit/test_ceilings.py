from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_autotuner.codegen.environment import template_root
from attention_autotuner.core.outcome import Crashed, Infeasible, LaunchFailed, TimedOut
from attention_autotuner.tuning import ceilings
from attention_autotuner.tuning.ceilings import (
    NAMES,
    Ceiling,
    measure_ceilings,
    names_for,
    target_of,
)
from attention_autotuner.tuning.ceilings_worker import CeilingResult

HEADER = template_root() / "include" / "attention_autotuner" / "peaks/peaks.h"
SOURCE = template_root() / "peaks" / "peaks.cu"
C_TYPES = {"uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "double": ctypes.c_double}


@pytest.fixture(scope="module")
def library(fake_kernel: Callable[..., Path]) -> Path:
    return fake_kernel('-DDIES_AT="nothing"', source="fake_ceilings.c")


def test_the_struct_is_that_of_the_header() -> None:
    text = HEADER.read_text()
    body = text[text.index("typedef struct") : text.index("} attention_autotuner_peak_result")]
    declared = re.findall(r"^\s+(\w+) (\w+);", body, re.MULTILINE)
    assert [(name, C_TYPES[kind]) for kind, name in declared] == list(CeilingResult._fields_)


def test_the_header_the_library_and_python_name_the_same_ceilings() -> None:
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


def test_figures_come_back_with_their_units_as_they_are_found(library: Path) -> None:
    seen: list[str] = []
    measured = measure_ceilings(
        library, ["launch", "exp"], seconds=0.25, progress=lambda name, _: seen.append(name)
    )
    assert seen == ["launch", "exp"]
    assert measured["launch"] == Ceiling(
        value=6e12, unit="s", spread=1e9, samples=11, sm_clock_hz=1.8e9, seconds=0.25
    )
    assert isinstance(measured["exp"], Ceiling)
    assert measured["exp"].unit == "FLOP/s"


def test_a_ceiling_that_cannot_be_had_says_why_and_the_rest_are_measured(library: Path) -> None:
    measured = measure_ceilings(library, ["wgmma_fp16", "l2", "smem"], seconds=0.1)
    assert measured["wgmma_fp16"] == Infeasible(reason="no code for this device (status 4)")
    assert measured["l2"] == LaunchFailed(reason="out of memory (status 1002)")
    assert isinstance(measured["smem"], Ceiling)


def test_one_that_kills_its_process_costs_no_other(fake_kernel: Callable[..., Path]) -> None:
    deadly = fake_kernel('-DDIES_AT="exp"', source="fake_ceilings.c")
    measured = measure_ceilings(deadly, ["launch", "exp", "fp32"], seconds=0.1)
    assert list(measured) == ["launch", "exp", "fp32"]
    assert isinstance(measured["exp"], Crashed)
    assert "status -6" in measured["exp"].reason
    assert isinstance(measured["launch"], Ceiling)
    assert isinstance(measured["fp32"], Ceiling)


def test_one_that_never_ends_is_given_up(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "START_SECONDS", -1.0)
    monkeypatch.setattr(ceilings, "EACH_SECONDS", 0.95)
    measured = measure_ceilings(library, ["exp"], seconds=0.06)
    assert isinstance(measured["exp"], TimedOut)


def test_a_library_that_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    measured = measure_ceilings(tmp_path / "none.so", ["exp"])
    assert isinstance(measured["exp"], Crashed)
    assert "none.so" in measured["exp"].reason
