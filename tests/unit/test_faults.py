"""Candidates that crash, hang, lie or leak, over kernels that run on the host: each costs itself and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.codegen.render import RenderedKernel
from attention_autotuner.core.outcome import BuildFailed, Ok, Outcome, TimedOut
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import NoCandidateError
from attention_autotuner.settings import Settings
from attention_autotuner.tuning import isolated, pipeline, tune
from attention_autotuner.tuning.pipeline import Built, LocalPipeline
from attention_autotuner.tuning.racing import Timing
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.worker import Limits, Worker
from tests.fake_pipeline import GPU, FakeBuilt, report

FakeKernel = Callable[..., Path]

TASKS = "tests.fake_tasks"
LIMITS = Limits(launch_seconds=2.0, output_bytes=1 << 16)
PROBLEM = Problem(
    batch=1, heads_q=2, heads_kv=1, seqlen_q=33, seqlen_k=45, dim_qk=16, dim_v=24, causal=True
)
BACKWARD = replace(PROBLEM, direction="backward", deterministic=True)
SMALL_TILES = ("-DBLOCK_M=16", "-DBLOCK_N=16")  # and with them small problems to verify on
POLICY = H100()

# What the issue lists, but for the compiler's faults and for those of a backward kernel: options, outcome, reason.
FAULTS = {
    "segfault at load": ("-DCRASHES_AT_LOAD", "crashed", "SIGSEGV"),
    "segfault at launch": ("-DCRASHES_AT=1", "crashed", "SIGSEGV"),
    "segfault at the 8th launch": ("-DCRASHES_AT=8", "crashed", "SIGSEGV"),
    "segfault in a race": ("-DCRASHES_AGAIN=6", "crashed", "SIGSEGV"),
    "hang in verify": ("-DHANGS_AT=2", "timed_out", "2 s"),
    "hang in a race": ("-DHANGS_AGAIN=7", "timed_out", "2 s"),
    "exit": ("-DEXITS_AT=1", "crashed", "status 0"),
    "wrong tail": ("-DWRONG_TAIL", "wrong", "(0, 1, 32, 23)"),
    "race": ("-DVARIES", "nondeterministic", "two runs"),
    "leak": ("-DLEAKS", "leaked", "beside the outputs"),
    "more memory than there is": ("-DWORKSPACE_BYTES=(1L<<60)", "out_of_memory", "allocate"),
    "megabytes of output": ("-DPRINTS=100000", "crashed", "it printed more than"),
    "a sample of no time": ("-DTIME_US=0.0", "launch_failed", "0.0 us"),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker(0, limits=LIMITS, tasks=TASKS)
    started.start()
    yield started
    started.close()


def library(fake_kernel: FakeKernel, *options: str) -> Any:
    return SimpleNamespace(path=fake_kernel(*SMALL_TILES, *options), launch_knobs={})


def timings_of(
    worker: Worker, fake_kernel: FakeKernel, kernels: dict[str, str], **options: Any
) -> dict[str, Timing]:
    libraries = {name: [library(fake_kernel, *k.split())] for name, k in kernels.items()}
    timings, interrupted = isolated.measure(
        worker, PROBLEM, libraries, budget_seconds=20.0, **options
    )
    assert not interrupted
    return {timing.name: timing for timing in timings}


# --- one check -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [name for name in FAULTS if "race" not in name][:-1])
def test_a_check_ends_with_one_typed_reason(
    worker: Worker, fake_kernel: FakeKernel, fault: str
) -> None:
    options, kind, words = FAULTS[fault]
    faulty = library(fake_kernel, options)
    outcome = isolated.verify(worker, PROBLEM, faulty, deterministic=True)
    assert outcome.kind == kind
    assert words in outcome.reason


def test_a_wrong_dk_is_wrong_and_a_right_kernel_passes(
    worker: Worker, fake_kernel: FakeKernel
) -> None:
    wrong = library(fake_kernel, "-DBACKWARD", "-DWRONG_TAIL")
    outcome = isolated.verify(worker, BACKWARD, wrong, deterministic=True)
    assert outcome.kind == "wrong"
    assert outcome.reason.startswith("dk:")
    right = library(fake_kernel, "-DBACKWARD")
    assert isolated.verify(worker, BACKWARD, right, deterministic=True).ok


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_worker_checks_and_races_without_torch(
    worker: Worker, fake_kernel: FakeKernel, direction: str
) -> None:
    problem = replace(BACKWARD if direction == "backward" else PROBLEM, alignment_bytes=2)
    options = ["-DBACKWARD"] if direction == "backward" else []
    right = library(fake_kernel, *options)
    outcome = isolated.verify(worker, problem, right, deterministic=True)
    assert isinstance(outcome, Ok)
    assert outcome.proof is not None
    assert (outcome.proof.gpu_name, outcome.proof.same_bits) == ("host", True)
    timings, _ = isolated.measure(worker, problem, {"right": [right]}, budget_seconds=20.0)
    assert [(timing.outcome.kind, timing.median_us) for timing in timings] == [("ok", 100.0)]
    imported = set(worker.call("imported"))
    assert "numpy" in imported
    assert not imported & {"torch", "cupy", "triton", "sympy"}


def test_a_device_of_cupy_checks_and_races_within_its_memory(fake_kernel: FakeKernel) -> None:
    with closing(Worker(0, limits=LIMITS, tasks="tests.fake_cupy")) as worker:
        worker.memory_bytes = 1 << 20
        right, leaking = library(fake_kernel), library(fake_kernel, "-DLEAKS")
        assert isolated.verify(worker, PROBLEM, leaking, deterministic=True).kind == "leaked"
        assert isolated.verify(worker, PROBLEM, right, deterministic=True).ok
        timings, _ = isolated.measure(worker, PROBLEM, {"right": [right]}, budget_seconds=20.0)
        assert [(timing.outcome.kind, timing.median_us) for timing in timings] == [("ok", 100.0)]
        worker.call("spin")
        assert worker.call("facts") == [False, 1 << 20]


# --- one race ------------------------------------------------------------------------------------


def test_a_crash_between_rounds_costs_its_kernel_and_keeps_the_rounds(
    worker: Worker, fake_kernel: FakeKernel
) -> None:
    rounds: list[int] = []
    raced = timings_of(
        worker,
        fake_kernel,
        {"default": "-DTIME_US=100.0", "good": "-DTIME_US=90.0", "bad": "-DCRASHES_AT=8"},
        keep=["default", "good", "bad"],
        on_round=lambda count, running: rounds.append(count),
    )
    assert [raced[name].outcome.kind for name in raced] == ["ok", "ok", "crashed"]
    assert raced["bad"].samples == 3  # four launches came before the rounds
    assert "SIGSEGV" in raced["bad"].outcome.reason
    assert raced["default"].samples == raced["good"].samples == len(rounds) == 10
    assert rounds == list(range(1, 11))  # none was repeated


def test_two_kernels_that_hang_are_both_named(worker: Worker, fake_kernel: FakeKernel) -> None:
    kernels = {"default": "-DTIME_US=100.0", "early": "-DHANGS_AT=3", "late": "-DHANGS_AT=6"}
    raced = timings_of(worker, fake_kernel, kernels, keep=list(kernels))
    kinds = {name: (t.outcome.kind, t.samples) for name, t in raced.items()}
    assert kinds == {"default": ("ok", 10), "early": ("timed_out", 0), "late": ("timed_out", 1)}


def test_a_deadline_ends_a_race_with_the_rounds_so_far(
    worker: Worker, fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "limits", Limits(launch_seconds=60.0))
    kernels = {"default": "-DTIME_US=100.0", "hangs": "-DHANGS_AT=7"}
    rounds: list[int] = []

    def on_round(count: int, running: list[str]) -> None:
        rounds.append(count)
        monkeypatch.setattr(worker, "deadline", time.monotonic() + 0.5)

    raced = timings_of(worker, fake_kernel, kernels, keep=list(kernels), on_round=on_round)
    assert {(t.outcome.kind, t.samples) for t in raced.values()} == {("ok", len(rounds))}
    assert rounds == [1, 2]
    monkeypatch.undo()


def test_when_all_kernels_fault_all_say_so(worker: Worker, fake_kernel: FakeKernel) -> None:
    raced = timings_of(worker, fake_kernel, {"one": "-DCRASHES_AT=5", "two": "-DCRASHES_AT=2"})
    assert [timing.outcome.kind for timing in raced.values()] == ["crashed"] * 2


def test_a_fault_of_nobody_is_not_pinned_on_a_kernel(
    worker: Worker, fake_kernel: FakeKernel
) -> None:
    killed: list[int] = []

    def kill_once(rounds: int, running: list[str]) -> None:
        if rounds == 2 and not killed:
            killed.append(rounds)
            assert worker.server is not None
            os.kill(worker.server.pid, 9)

    raced = timings_of(
        worker,
        fake_kernel,
        {"default": "-DTIME_US=100.0", "good": "-DTIME_US=90.0"},
        keep=["default", "good"],
        on_round=kill_once,
    )
    assert killed == [2]
    assert [(timing.outcome.kind, timing.samples) for timing in raced.values()] == [("ok", 10)] * 2


# --- a whole search ------------------------------------------------------------------------------


class Machine(LocalPipeline):
    """This machine with a GPU's name, whose kernels are built by rule and run on the host."""

    def __init__(
        self, tmp_path: Path, worker: Worker, build: Callable[[str], Path | Outcome]
    ) -> None:
        super().__init__(POLICY, Settings(cache_dir=tmp_path))
        self._worker = self._runner = worker
        self._build = build
        self.built: list[str] = []

    def can_measure(self) -> bool:
        return True

    def build(
        self,
        kernels: Sequence[RenderedKernel],
        progress: Callable[[int, int, str, float], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> Sequence[Built | Outcome]:
        self.built += [kernel.name for kernel in kernels]
        results = [self._build(kernel.name) for kernel in kernels]
        return [
            result if isinstance(result, Outcome) else FakeBuilt(path=result, report=report())
            for result in results
        ]


def test_a_search_over_every_fault_ends_with_the_right_pick(
    worker: Worker, fake_kernel: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "collect", lambda device: GPU)
    default = POLICY.untuned(PROBLEM).compiled.name
    faults = [("good", "", "")] + [(name, kind, words) for name, (_, kind, words) in FAULTS.items()]
    compilers: dict[str, Outcome] = {
        "a compiler that hangs": TimedOut(reason="it compiled for longer than 300 s"),
        "a compiler that crashes": BuildFailed(reason="the compiler crashed (SIGSEGV)"),
    }
    faults += [(name, outcome.kind, outcome.reason) for name, outcome in compilers.items()]
    assigned: dict[str, tuple[str, str, str]] = {}

    def build(name: str) -> Path | Outcome:
        if name == default:
            return fake_kernel(*SMALL_TILES, "-DTIME_US=100.0")
        assigned[name] = fault, _, _ = faults[len(assigned)]
        if fault == "good":
            return fake_kernel(*SMALL_TILES, "-DTIME_US=80.0")
        if fault in compilers:
            return compilers[fault]
        options = FAULTS[fault][0]
        fast = () if "TIME_US" in options else ("-DTIME_US=50.0",)
        return fake_kernel(*SMALL_TILES, options, *fast)

    machine, records = Machine(tmp_path, worker, build), RecordStore(tmp_path / "records")
    result = tune(PROBLEM, POLICY, pipeline=machine, records=records, top_k=len(faults))
    assert len(assigned) == len(faults)
    (good,) = [name for name, (fault, _, _) in assigned.items() if fault == "good"]
    assert result.pick.compiled.name == good
    assert result.confirmed
    assert result.gain == pytest.approx(0.25)
    for row in result.rows:
        name = row.candidate.compiled.name
        if name not in (default, good):
            _, kind, words = assigned[name]
            assert (row.outcome.kind, words in row.outcome.reason) == (kind, True)
    assert result.record is not None
    assert {entry.outcome.kind for entry in result.record.entries} > {"crashed", "timed_out", "ok"}

    # What faulted is in the record with its reason, so that the next search passes it over.
    machine.built.clear()
    again = tune(PROBLEM, POLICY, pipeline=machine, records=records, top_k=len(faults))
    assert again.status == "recorded"
    assert again.pick.name == good
    assert machine.built == []
    assert {row.candidate.name: row.outcome for row in again.rows} == {
        row.candidate.name: row.outcome for row in result.rows
    }


def test_a_search_in_which_every_candidate_crashes_says_so(
    worker: Worker, fake_kernel: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "collect", lambda device: GPU)
    machine = Machine(tmp_path, worker, lambda name: fake_kernel("-DCRASHES_AT=1"))
    records = RecordStore(tmp_path / "records")
    with pytest.raises(NoCandidateError, match="SIGSEGV"):
        tune(PROBLEM, POLICY, pipeline=machine, records=records, top_k=2)
