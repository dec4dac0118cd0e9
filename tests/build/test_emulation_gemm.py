"""Matrix products by warpgroups on an emulated machine: results, and the mistakes that it has to catch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed
from attention_autotuner.core.problem import Operands, Problem
from attention_autotuner.kernels.gemm_sm90.knobs import GemmSm90Knobs
from attention_autotuner.operations.gemm.problem import of_sizes
from attention_autotuner.serving.loader import LoadedKernel
from tests.emulation.build import build
from tests.emulation.check import check

pytestmark = pytest.mark.build

MAINLOOP = "gemm_sm90/mainloop.cuh"
MUTANTS = {
    "begins_before_what_is_ahead": (
        MAINLOOP,
        "wait_on_dependent_grids();\n  if constexpr (T::kCluster > 1) {\n    cluster_sync();\n"
        "  } else {\n    __syncthreads();\n  }",
        "if constexpr (T::kCluster > 1) { cluster_sync(); } else { __syncthreads(); }",
    ),
    "released_to_itself_alone": (
        MAINLOOP,
        "arrive_at(empty, ::emulation::thread_index().x % kWarpgroupThreads);",
        "arrive_at(empty, cluster_rank());",
    ),
    "released_early": (
        MAINLOOP,
        "warpgroup_wait<1>();\n      release(use + step - 1);",
        "release(use + step - 1);\n      warpgroup_wait<1>();",
    ),
    "share_of_the_first_rank": (
        MAINLOOP,
        "load_b<T::kBlockK, kShare>(b, full, depth, column);",
        "load_b<T::kBlockK, kShare>(b_tile(stage), full, depth, column);",
    ),
    "store_not_fenced": (MAINLOOP, "fence_view_async_shared();", ""),
    "store_not_awaited": (MAINLOOP, "if (leads) tma_store_wait_read();", ""),
    "ends_before_the_other": (MAINLOOP, "if constexpr (T::kCluster > 1) cluster_sync();", ""),
}
CAUGHT = [
    ("begins_before_what_is_ahead", "lazy", "before the kernel ahead of it has ended"),
    ("released_to_itself_alone", "random", "races with the write of a copy"),
    ("released_early", "eager", "races with the read of an MMA"),
    ("share_of_the_first_rank", "eager", "races with"),
    ("store_not_fenced", "eager", "without a fence"),
    ("store_not_awaited", "eager", "race"),
    ("ends_before_the_other", "random", "has ended"),
]
LONG = of_sizes(520, 136, 200)  # rows for several tiles of a CTA, steps for two rounds of its ring


def candidate(problem: Problem, **knobs: Any) -> Candidate:
    tile = {"block_m": 64, "block_n": 128, "stages": 3, "schedule": "ping_pong"}
    operands = {
        "transposed_a": problem.operands[0] == "t",
        "transposed_b": problem.operands[1] == "t",
    }
    return Candidate.of(problem, GemmSm90Knobs(**{**tile, **operands, **knobs}))


@pytest.fixture(scope="module")
def clusters(builds: Path) -> LoadedKernel:
    return build(candidate(LONG, cluster=2), builds / "mutants", MUTANTS)


def test_products_of_clusters_are_right(clusters: LoadedKernel) -> None:
    outcome = check(clusters, [LONG, of_sizes(65, 8, 64), of_sizes(1, 264, 72)])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    ("operands", "knobs"),
    [
        ("tn", {"cluster": 2, "block_m": 128, "block_n": 128, "schedule": "cooperative"}),
        ("tt", {"cluster": 2, "block_n": 256, "output": "direct"}),
        ("nt", {"splits": 2}),
        ("nn", {"block_m": 256, "schedule": "cooperative", "output": "direct"}),
    ],
)
def test_other_products_are_right(builds: Path, operands: Operands, knobs: dict[str, Any]) -> None:
    problem = replace(LONG, dtype="bf16", operands=operands)
    kernel = build(candidate(problem, **knobs), builds / operands)
    outcome = check(kernel, [problem], [("lazy", 0), ("random", 1)])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(("mutant", "policy", "message"), CAUGHT)
def test_mistakes_are_caught(
    clusters: LoadedKernel, mutant: str, policy: str, message: str
) -> None:
    outcome = check(clusters, [LONG], [(policy, seed) for seed in range(4)], mutant=mutant)
    assert isinstance(outcome, LaunchFailed)
    assert message in outcome.reason
