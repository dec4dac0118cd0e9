from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.core.report import CompilerReport

OUTPUT = Path(__file__).with_name("compiler_output")


@pytest.fixture(scope="module")
def sm80() -> CompilerReport:
    """The report of nvcc 13.0 on four kernels: plain, with shared memory, with a call, with spills."""
    return parse_ptxas((OUTPUT / "ptxas_sm80.txt").read_text(encoding="utf-8"))


def test_the_report_of_every_kernel(sm80: CompilerReport) -> None:
    usages = {
        kernel.name: (
            kernel.registers,
            kernel.spill_store_bytes,
            kernel.spill_load_bytes,
            kernel.stack_bytes,
            kernel.static_smem_bytes,
        )
        for kernel in sm80.kernels
    }
    assert usages == {
        "_Z8spillingPf": (32, 1616, 1652, 736, 0),
        "_Z5callsPf": (32, 0, 0, 160, 0),  # properties of the callee follow in the output
        "_Z10shared_memPf": (10, 0, 0, 0, 1024),
        "_Z5plainPf": (8, 0, 0, 0, 0),
    }


def test_a_unit_is_as_bad_as_its_worst_kernel(sm80: CompilerReport) -> None:
    assert sm80.registers == 32
    assert (sm80.spill_store_bytes, sm80.spill_load_bytes, sm80.stack_bytes) == (1616, 1652, 736)
    assert sm80.static_smem_bytes == 1024
    assert sm80.loop_spills is None
    assert sm80.warnings == ()


def test_spills_of_a_called_function_count_for_its_kernel() -> None:
    report = parse_ptxas(
        "ptxas info    : Compiling entry function 'kernel' for 'sm_80'\n"
        "ptxas info    : Function properties for kernel\n"
        "    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size\n"
        "ptxas info    : Function properties for helper\n"
        "    32 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads\n"
    )
    (kernel,) = report.kernels
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (24, 32, 48)


def test_performance_warnings_of_wgmma_are_kept() -> None:
    report = parse_ptxas((OUTPUT / "ptxas_sm90a_wgmma.txt").read_text(encoding="utf-8"))
    codes = [warning.split(":")[0] for warning in report.warnings]
    assert "C7508" in codes  # setmaxnreg ignored
    assert "C7511" in codes  # wgmma serialised
    assert len(set(report.warnings)) == len(report.warnings)
    assert any("setmaxnreg" in warning for warning in report.warnings)
    assert report.serialized.startswith("C7511: Potential Performance Loss")
    assert replace(report, warnings=report.warnings[:2]).serialized == ""
    assert report.registers == 30


def test_output_without_kernels_is_an_empty_report() -> None:
    report = parse_ptxas("ptxas info    : 0 bytes gmem\nnvcc warning : something else\n")
    assert report == CompilerReport(
        registers=0,
        spill_store_bytes=0,
        spill_load_bytes=0,
        stack_bytes=0,
        static_smem_bytes=0,
        loop_spills=None,
        kernels=(),
        warnings=(),
    )


def test_json_round_trip(sm80: CompilerReport) -> None:
    assert CompilerReport.from_json(json.loads(json.dumps(asdict(sm80)))) == sm80
