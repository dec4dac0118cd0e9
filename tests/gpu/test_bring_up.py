"""Bring-up of the present GPU: its measured peaks against its spec, and a sweep of two problems from an empty cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import measured_specs, probe, resolution, resolve
from attention_autotuner.cli import main
from attention_autotuner.tuning.bring_up import (
    BroughtUp,
    Machine,
    bring_up,
)
from attention_autotuner.tuning.peaks import Peak, names_for
from attention_autotuner.tuning.spec_measuring import expected_peaks
from attention_autotuner.tuning.sweep import measured_us
from attention_autotuner.tuning.sweeps import default_sweep

pytestmark = [pytest.mark.gpu, pytest.mark.tune]

# One forward and one backward problem of the head dim that builds fastest.
PROBLEMS = [p for p in default_sweep() if p.op == "retention" and p.dim_qk == 64]
# Allowed ratios of a measured peak to the published one: datasheets do not know sustained clocks.
RANGES = {
    "launch": (0.1, 2.0),
    "hbm_copy": (0.6, 1.02),
    "l2": (0.3, 2.5),
    "exp": (0.7, 1.2),
    "smem": (0.7, 1.2),
    "fp32": (0.6, 1.2),
}
TENSOR = (0.55, 1.25)


@dataclass(frozen=True)
class Run:
    result: BroughtUp
    output: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("bring_up")
    with settings.override(cache_dir=folder / "cache") as current:
        resolution.forget_measured()
        result = bring_up(
            Machine(settings=current),
            PROBLEMS,
            current,
            budget_seconds=240.0,
            peak_seconds=0.5,
            output=folder / "out",
        )
        yield Run(result=result, output=folder / "out")
    resolution.forget_measured()


def test_every_peak_is_plausible_beside_the_spec(run: Run) -> None:
    peaks = run.result.peaks
    assert tuple(peaks) == names_for(probe().compute_capability)
    promised = expected_peaks(run.result.described)
    for name, peak in peaks.items():
        assert isinstance(peak, Peak), f"{name}: {peak}"
        low, high = RANGES.get(name, TENSOR)
        assert low < peak.value / promised[name] < high, f"{name}: {peak.value:.3e} {peak.unit}"
        assert peak.spread < 0.1 * peak.value, name
        if name not in ("launch", "hbm_copy"):
            assert 0.5e9 < peak.sm_clock_hz < 3.5e9, name


def test_both_dtypes_run_at_one_rate(run: Run) -> None:
    for kind in ("mma", "wgmma"):
        pair = [run.result.peaks.get(f"{kind}_{dtype}") for dtype in ("fp16", "bf16")]
        if all(isinstance(peak, Peak) for peak in pair):
            first, second = (peak.value for peak in pair if isinstance(peak, Peak))
            assert first == pytest.approx(second, rel=0.1)


def test_rates_per_clock_are_within_the_hardware_limits(run: Run) -> None:
    spec = run.result.measured.spec
    assert 0.85 * 16 < spec.exp_per_clk_per_sm < 1.02 * 16
    assert 0.85 * 128 < spec.smem_bytes_per_clk_per_sm < 1.02 * 128
    assert spec.mma_flops_per_clk_per_sm < 4200
    assert resolve(None).spec == spec


def test_the_sweep_is_measured_and_never_loses_to_the_default(run: Run) -> None:
    sweep = run.result.sweep
    assert sweep is not None
    for settled in sweep.settled:
        assert settled.status == "measured", f"{settled.problem.describe()}: {settled.reason}"
        assert settled.record is not None
        assert settled.record.confirmed
        us = measured_us(settled.record, settled.record.pick)
        default_us = measured_us(settled.record, settled.record.default)
        assert us is not None
        assert default_us is not None
        assert settled.record.pick == settled.record.default or us < default_us
    assert run.result.seconds["total"] < 240


def test_written_files_are_read_again(run: Run) -> None:
    files = run.result.files
    written = {path.name for path in run.output.iterdir()}
    assert written == {path.name for path in files.values()}
    assert measured_specs.read(files["spec"]) == run.result.measured
    _header, *picks = files["picks"].read_text().splitlines()
    assert len(picks) == len(files["evidence"].read_text().splitlines()) == len(PROBLEMS)


def test_a_second_run_measures_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "retention", "d64", "--output", str(run.output), "--json"]
    assert main(["bring-up", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ceilings_reused"]
    assert [problem["status"] for problem in said["problems"]] == ["recorded"] * len(PROBLEMS)
    assert said["kernels"] == 0
