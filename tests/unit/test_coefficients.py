"""The fitted constants of the cost model: all have bounds, all are of influence, and on whose kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from math import isfinite
from pathlib import Path

import pytest

from attention_autotuner import templates
from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90.cost import SECTION_BYTES
from attention_autotuner.kernels.chunks_sm80.knobs import ChunkPass, ChunksKnobs
from attention_autotuner.kernels.cost_model import Estimate, refine
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.kernels.shared.calibration import Sample, calibrate, loss
from attention_autotuner.kernels.shared.coefficients import (
    BOUNDS,
    FITTED,
    Coefficients,
)
from attention_autotuner.operations.gemm.problem import of_sizes
from tests.candidates import forward
from tests.compiler_reports import compiler_report
from tests.recorded_searches import BY_HAND

POLICY = H100()
NAMES = tuple(field.name for field in fields(Coefficients))
CHUNKS_SM90 = {"chunks_sm90", "chunks_backward_sm90"}
CHUNKS = {"chunks_sm80", "scores_forward_sm80", *CHUNKS_SM90}
# Prefix -> the kernels whose estimates its constants change; retention's parallel form has a pass over chunks.
KERNELS_OF = {
    "score_": {"scores_forward_sm80", "scores_backward_sm80"},
    "attention_sm90_": {"attention_forward_sm90"},
    "gradient_sm90_": {"attention_backward_sm90"},
    "wgmma_": {"scores_backward_sm90"},
    "chunk_sm90_": CHUNKS_SM90,
    "chunk_": CHUNKS,
    "recurrent_": {"recurrent_sm80"},
}
RETENTION = Problem(op="retention", causal=True, batch=1)
WIDE = Problem(direction="backward", dim_qk=256, dim_v=256)
PROBLEMS = (
    Problem(causal=True, seqlen_q=16384, seqlen_k=16384),
    Problem(dim_qk=256, dim_v=256),
    Problem(seqlen_q=1, seqlen_k=65536, batch=1),
    Problem(op="retnet", mask="explicit"),
    Problem(op="retnet", mask="decay", causal=True),
    Problem(direction="backward"),
    Problem(direction="backward", causal=True, deterministic=True),
    Problem(op="retnet", mask="explicit", direction="backward"),
    RETENTION,
    replace(RETENTION, dtype="bf16"),
    replace(RETENTION, dim_qk=256, dim_v=256),
    replace(RETENTION, alignment_bytes=2, dim_qk=256, dim_v=256),
    replace(RETENTION, direction="backward"),
    replace(RETENTION, seqlen_q=1, seqlen_k=1, batch=64, form="recurrent"),
    replace(RETENTION, form="recurrent"),
    replace(RETENTION, form="parallel", seqlen_q=1, seqlen_k=1),
    of_sizes(512, 4096, 4096),
)


# Of kernels that spill outside their loops.
REPORT = compiler_report(spill_store_bytes=400, spill_load_bytes=400, loop_spills=False)


def grid() -> Iterator[tuple[Problem, Candidate]]:
    """A few candidates of every kernel that computes one of the problems."""
    for problem in PROBLEMS:
        legal = POLICY.legal(problem)
        for kernel in KERNELS:
            own_kernel = [candidate for candidate in legal if candidate.kernel == kernel]
            for candidate in own_kernel[:: max(1, len(own_kernel) // 12)]:
                yield problem, candidate
    yield Problem(causal=True), forward(persistent=True)
    yield Problem(), forward(qk_ahead=True)
    late = next(c for c in POLICY.legal(WIDE) if "dk_g2c64a2x1" in c.name)
    yield WIDE, late
    for stages in (1, 2, 3):
        chunk_pass = ChunkPass(columns=64, column_warps=4, num_stages=stages)
        knobs = ChunksKnobs(chunk=64, output=chunk_pass)
        yield RETENTION, Candidate.of(RETENTION, knobs)


GRID = tuple(grid())


def estimates(coefficients: Coefficients) -> list[Estimate]:
    return [
        refine(problem, candidate, POLICY.spec, REPORT, coefficients) for problem, candidate in GRID
    ]


def predicted_us(problem: Problem, candidate: Candidate, coefficients: Coefficients) -> float:
    return refine(problem, candidate, POLICY.spec, REPORT, coefficients).us


def changed_kernels(before: list[Estimate], coefficients: Coefficients) -> set[str]:
    """The kernels whose times, or what they are made of, are others under these coefficients."""
    after = estimates(coefficients)
    return {
        candidate.kernel
        for (_, candidate), old, new in zip(GRID, before, after, strict=True)
        if old != new
    }


@pytest.fixture(scope="module")
def fitted_estimates() -> list[Estimate]:
    fitted = estimates(FITTED)
    assert sum(isfinite(estimate.us) for estimate in fitted) > len(fitted) / 2
    return fitted


def test_every_constant_has_bounds_that_hold_it() -> None:
    assert BOUNDS.keys() == set(NAMES)
    for name, (low, high) in BOUNDS.items():
        assert 0.0 <= low < high, name
        for coefficients in (FITTED, BY_HAND):
            assert low <= getattr(coefficients, name) <= high, name


def test_the_grid_has_every_kernel() -> None:
    assert {candidate.kernel for _, candidate in GRID} == set(KERNELS)


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_changes_estimates_and_those_of_its_kernels_alone(
    name: str, fitted_estimates: list[Estimate]
) -> None:
    changed: set[str] = set()
    for bound in BOUNDS[name]:
        changed |= changed_kernels(fitted_estimates, replace(FITTED, **{name: bound}))
    prefix = next((prefix for prefix in KERNELS_OF if name.startswith(prefix)), None)
    assert changed
    if prefix is not None:
        assert changed <= KERNELS_OF[prefix]


def test_the_constants_of_a_prefix_reach_each_of_its_kernels(
    fitted_estimates: list[Estimate],
) -> None:
    for prefix, kernels in KERNELS_OF.items():
        lows = {name: BOUNDS[name][0] for name in NAMES if name.startswith(prefix)}
        assert kernels <= changed_kernels(fitted_estimates, replace(FITTED, **lows)), prefix


@pytest.mark.parametrize(
    ("kernel", "name", "value"),
    [
        ("scores_backward_sm90", "wgmma_step_clk", 400.0),
        ("attention_forward_sm90", "attention_sm90_step_clk", 250.0),
        ("attention_backward_sm90", "gradient_sm90_step_clk", 700.0),
        ("scores_backward_sm90", "wgmma_tile_clk", 6000.0),
        ("chunks_sm80", "chunk_clk", 1200.0),
        ("chunks_sm90", "chunk_sm90_depth_clk", 16.0),
        ("chunks_backward_sm90", "chunk_sm90_depth_clk", 16.0),
        ("recurrent_sm80", "recurrent_token_clk", 1000.0),
    ],
)
def test_calibration_reaches_the_constants_of_every_kernel(
    kernel: str, name: str, value: float
) -> None:
    expected = estimates(replace(FITTED, **{name: value}))
    samples = [
        Sample(
            group=problem.describe(),
            measured_us=true.us,
            predict=partial(predicted_us, problem, candidate),
        )
        for (problem, candidate), true in zip(GRID, expected, strict=True)
        if candidate.kernel == kernel and isfinite(true.us)
    ]
    calibrated = calibrate(samples, FITTED, bounds={name: BOUNDS[name]})
    assert loss(samples, calibrated) < 0.01 * loss(samples, FITTED)
    assert getattr(calibrated, name) == pytest.approx(value, rel=0.1)


def test_sections_of_the_backward_are_those_of_its_entry() -> None:
    folder = Path(templates.__file__).parent / "include/attention_autotuner/attention_backward_sm90"
    entry = folder.joinpath("sections.cuh").read_text(encoding="utf-8")
    (said,) = re.findall(r"kSectionBytes = (\S+);", entry)
    assert float(said) == SECTION_BYTES
