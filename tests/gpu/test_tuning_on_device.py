"""Timing, verification and the whole search on a real GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_autotuner.arch import detect
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.shared.tensors import Inputs, Outputs
from attention_autotuner.tuning import isolated, tune
from attention_autotuner.tuning.entries import Entry, KernelEntry
from attention_autotuner.tuning.environment import collect
from attention_autotuner.tuning.measure import InProcessMeasurer
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.result import TuneResult
from attention_autotuner.tuning.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.tune]

PROBLEM = Problem(
    batch=2, heads_q=8, heads_kv=4, seqlen_q=1000, seqlen_k=1000, dim_qk=64, dim_v=64, causal=True
)


@dataclass
class CallableEntry:
    """A peer: any function of q, k, v.

    Attributes:
        name: how it is reported.
        function: called with the tensors of one input set; its result is dropped.
    """

    name: str
    function: Callable[..., Any]
    _inputs: Sequence[Inputs] = field(default_factory=tuple, repr=False)

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Keep the inputs and run once, so that lazy set-up is over."""
        self._inputs = inputs
        self.run(0)

    def run(self, index: int) -> None:
        """Call the function."""
        tensors = self._inputs[index]
        self.function(tensors.q, tensors.k, tensors.v)


def matmul_entry(name: str, size: int) -> CallableEntry:
    a = torch.randn(size, size, device="cuda", dtype=torch.float16)
    return CallableEntry(name=name, function=lambda q, k, v: torch.mm(a, a))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    records = RecordStore(tmp_path_factory.mktemp("records"))
    return tune(PROBLEM, detect(), top_k=1, budget_seconds=200.0, records=records)


def test_the_search_builds_checks_times_and_records(tuned: TuneResult) -> None:
    assert tuned.status == "measured"
    assert tuned.record_path is not None
    assert tuned.record_path.is_file()
    assert tuned.record is not None
    assert tuned.record.environment.gpu_name == torch.cuda.get_device_name()
    for row in tuned.rows:
        assert row.outcome.ok, f"{row.candidate.name}: {row.outcome}"
        assert row.timing is not None
        assert row.timing.samples >= 2
        # No kernel of this problem takes less than a microsecond or more than a second.
        assert 1.0 < row.timing.median_us < 1e6


def test_a_kernel_and_a_peer_race_in_one_run(tuned: TuneResult) -> None:
    def peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )

    row = next(row for row in tuned.rows if row.artifact is not None)
    assert row.artifact is not None
    entries: list[Entry] = [
        KernelEntry(name=row.candidate.name, path=row.artifact, problem=PROBLEM),
        CallableEntry(name="sdpa", function=peer),
    ]
    timings = InProcessMeasurer().measure(PROBLEM, entries, budget_seconds=3.0, keep=["sdpa"])
    assert {timing.name for timing in timings} == {row.candidate.name, "sdpa"}
    assert all(timing.outcome.ok and timing.samples >= 4 for timing in timings)
    assert min(timing.ratio_to_best for timing in timings) == 1.0


def test_a_second_process_times_the_same_kernels(tuned: TuneResult) -> None:
    built: dict[str, Any] = {
        row.candidate.name: [
            SimpleNamespace(path=row.artifact, launch_knobs=row.candidate.launch_knobs)
        ]
        for row in tuned.rows
        if row.artifact is not None
    }
    timings, _ = isolated.measure(Worker(0), PROBLEM, built, budget_seconds=2.0, keep=built)
    assert {timing.name for timing in timings} == set(built)
    assert all(timing.outcome.ok for timing in timings)


def test_times_grow_with_the_work_and_failures_are_outcomes() -> None:
    def failing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    entries = [
        matmul_entry("small", 1024),
        matmul_entry("large", 4096),
        CallableEntry(name="broken", function=failing),
    ]
    timings = InProcessMeasurer().measure(
        PROBLEM, entries, budget_seconds=2.0, keep=["small", "large"]
    )
    assert [timing.name for timing in timings] == ["small", "large", "broken"]
    assert timings[1].ratio_to_best > 8.0
    assert timings[2].outcome.kind == "crashed"
    assert "no such kernel" in timings[2].outcome.reason


def test_one_entry_against_itself_is_a_tie() -> None:
    # The same buffers too: a GEMM on buffers at other addresses is not quite the same work.
    first = matmul_entry("first", 2048)
    entries = [first, replace(first, name="second")]
    in_order = 0
    for seed in range(3):
        timings = InProcessMeasurer(seed=seed).measure(PROBLEM, entries, budget_seconds=1.0)
        assert timings[1].ratio_to_best == pytest.approx(1.0, abs=0.02)
        in_order += [timing.name for timing in timings] == ["first", "second"]
    assert in_order >= 2  # at 95 % confidence one of twenty ties looks like none


@pytest.mark.parametrize("rounds", [10, 250])
def test_a_settled_race_continues_for_the_requested_rounds(rounds: int) -> None:
    measurer = InProcessMeasurer(rounds=rounds)
    (timing,) = measurer.measure(PROBLEM, [matmul_entry("alone", 1024)], budget_seconds=5.0)
    assert timing.samples == rounds


def test_the_environment_names_the_gpu_and_its_state() -> None:
    environment = collect()
    properties = torch.cuda.get_device_properties(0)
    assert environment.gpu_name == properties.name
    assert environment.num_sms == properties.multi_processor_count
    assert environment.compute_capability == f"{properties.major}.{properties.minor}"
    assert environment.driver
    assert environment.sm_clock_mhz


def test_a_file_that_is_no_library_is_a_failed_launch(tmp_path: Path) -> None:
    library = tmp_path / "kernel.so"
    library.write_bytes(b"not a library")
    entry = KernelEntry(name="bad", path=library, problem=PROBLEM)
    timings = InProcessMeasurer().measure(PROBLEM, [entry], budget_seconds=1.0)
    assert timings[0].outcome.kind == "launch_failed"
