"""Kernels that are compiled for key bounds: both families, every main loop, and the ABI that they need."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from tests.emulation.build import build as emulated
from tests.emulation.check import check

pytestmark = pytest.mark.build

PROBLEM = Problem(dim_qk=64, dim_v=64, key_bounds=True)
ROWS = ForwardKnobs(block_m=64, block_n=64, warps_m=4, num_stages=1, k_slice=64)
WGMMA = AttentionForwardSm90Knobs(warpgroups=2, block_n=64, mainloop="overlap")


KNOBS: dict[str, ForwardKnobs | AttentionForwardSm90Knobs] = {
    "event": ROWS,
    "tile": replace(ROWS, num_stages=2),
    "ahead": replace(ROWS, num_stages=2, qk_ahead=True),
    "slices": replace(ROWS, num_stages=2, k_slice=32),
    "overlap": WGMMA,
    "flat": replace(WGMMA, mainloop="overlap_flat"),
    "serial": replace(WGMMA, mainloop="serial", ping_pong=True),
    "scores_first": replace(WGMMA, mainloop="scores_first", ping_pong=True),
    "strict": replace(WGMMA, mainloop="strict", output="direct"),
}


@pytest.fixture(scope="module")
def built(kernel_store: Store) -> dict[str, Artifact | Outcome]:
    kernels = [render(Candidate.of(PROBLEM, knobs)) for knobs in KNOBS.values()]
    # Family sm90's are compiled for 90a all the same.
    target = BuildTarget(arch="80")
    results = build(kernels, target, toolchain=find_toolchain(), store=kernel_store)
    return dict(zip(KNOBS, results, strict=True))


@pytest.mark.parametrize("name", KNOBS)
def test_it_compiles_and_asks_for_the_abi_with_bounds(
    built: dict[str, Artifact | Outcome], name: str
) -> None:
    made = built[name]
    assert isinstance(made, Artifact), made
    assert not made.report.loop_spills
    assert ctypes.CDLL(str(made.path)).attention_autotuner_abi_version() == 1003


def test_kernels_of_wgmma_are_right_on_the_emulated_machine(tmp_path: Path) -> None:
    mutants = {
        "not_cleared": (
            "attention_forward_sm90/producer.cuh",
            "clear_rows_from<T::kBlockN, T::kColumnsLoaded>(v_tile(v.stage), rows);",
            "",
        ),
        "not_fenced": (
            "sm90/tma.cuh",
            "fence_view_async_shared();\n  __syncwarp();",
            "__syncwarp();",
        ),
    }
    kernel = emulated(Candidate.of(PROBLEM, WGMMA), tmp_path / "kernel", mutants)
    small = replace(PROBLEM, batch=9, heads_q=2, heads_kv=1, seqlen_q=65, seqlen_k=150)
    whole_then_bounded = [small, replace(small, causal=True)]  # the way changes with the place
    outcome = check(kernel, whole_then_bounded, [("lazy", 0), ("random", 1)])
    assert outcome.ok, outcome
    bounded_alone = [small, small]
    outcome = check(kernel, bounded_alone, [("lazy", 0)], mutant="not_cleared")
    assert outcome.kind == "wrong"
    assert "each batch entry with keys of its own" in outcome.reason
    outcome = check(kernel, bounded_alone, [("lazy", 0)], mutant="not_fenced")
    assert "without a fence" in outcome.reason
