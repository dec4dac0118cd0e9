"""Dispatch: its layers in order, its memory, its fallbacks and warnings, with fakes for GPU, compiler and records."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import A100, H100, RTX4090, Policy
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import (
    ArtifactError,
    BuildError,
    DeviceMemoryError,
    NoCandidateError,
    NotWarmError,
    RecordError,
    StoreError,
    ToolchainError,
    UnsupportedArchitectureError,
)
from attention_autotuner.serving import dispatch, picks, runtime, searching, untuned
from tests.fake_world import GPU, PROBLEM, World, other_candidate


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with settings.override(mode="cached", cache_dir=tmp_path), runtime.fresh():
        yield World(monkeypatch, tmp_path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_the_users_record_comes_before_the_shipped_one_then_the_default(world: World) -> None:
    policy = A100()
    mine, shipped = policy.legal(PROBLEM)[5:7]
    world.records.answer = world.hit(mine, "record", unverified=("driver",))
    world.shipped.answer = world.hit(shipped, "shipped", exact=False)
    pick = dispatch.lookup(PROBLEM, policy)
    assert pick == picks.Pick(candidate=mine, layer="record", unverified=("driver",))
    world.records.answer = None
    dispatch.invalidate()
    pick = dispatch.lookup(PROBLEM, policy)
    assert (pick.candidate, pick.layer, pick.exact) == (shipped, "shipped", False)
    assert pick.reason.startswith("record: nothing for attention forward")
    world.shipped.answer = None
    dispatch.invalidate()
    pick = dispatch.lookup(PROBLEM, policy)
    assert (pick.candidate, pick.layer) == (policy.default(PROBLEM.rounded()), "default")
    assert [passed.layer for passed in pick.passed] == ["record", "shipped"]
    assert "record: nothing for attention forward" in pick.reason
    assert "shipped: nothing for attention forward" in pick.reason


def test_a_lookup_asks_for_rounded_lengths_and_the_present_environment(world: World) -> None:
    dispatch.lookup(PROBLEM, A100(), device=3)
    (query,) = world.records.asked
    assert query.problem == PROBLEM.rounded()
    assert query.arch == "A100"
    assert query.environment.gpu_name == "fake"
    assert not query.strict
    assert query.kernels is not None
    default = A100().default(PROBLEM)
    other = other_candidate(A100())
    assert query.kernels.source(default) != query.kernels.source(other)
    assert query.kernels.exact(default) != query.kernels.exact(other)
    assert query.kernels.code(default) is None


def test_what_was_decided_is_remembered_and_near_lengths_share_it(world: World) -> None:
    policy = A100()
    pick = dispatch.lookup(PROBLEM, policy)
    assert dispatch.lookup(PROBLEM, policy) is pick
    assert dispatch.lookup(replace(PROBLEM, seqlen_q=PROBLEM.seqlen_q - 1), policy) is pick
    assert len(world.records.asked) == 1
    dispatch.lookup(replace(PROBLEM, seqlen_q=500), policy)
    dispatch.lookup(PROBLEM, RTX4090())
    dispatch.lookup(PROBLEM, policy, device=1)
    assert len(world.records.asked) == 4
    backward = dispatch.lookup(BACKWARD, policy)
    near = replace(BACKWARD, seqlen_q=BACKWARD.seqlen_q - 1)
    assert dispatch.lookup(near, policy) is backward
    # Another decision of one bucket asks no records again, and says what they said.
    other = dispatch.lookup(replace(PROBLEM, seqlen_q=900), policy)
    assert other is not pick
    assert other.passed[0] == pick.passed[0]
    assert len(world.records.asked) == 5
    dispatch.invalidate()
    dispatch.lookup(replace(PROBLEM, seqlen_q=900), policy)
    assert len(world.records.asked) == 6


def test_mode_off_reads_no_records(world: World) -> None:
    world.records.answer = world.hit(other_candidate(A100()), "record")
    with settings.override(mode="off"):
        pick = dispatch.lookup(PROBLEM, A100())
    assert (pick.layer, pick.reason) == ("default", "mode is off")
    assert not world.records.asked
    assert dispatch.lookup(PROBLEM, A100()).layer == "record"


@pytest.mark.parametrize("error", [StoreError("no right to read"), RecordError("damaged")])
def test_a_layer_that_cannot_be_read_is_logged_and_passed_over(
    world: World, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    world.records.answer = error
    world.shipped.answer = world.hit(other_candidate(A100()), "shipped")
    assert dispatch.lookup(PROBLEM, A100()).layer == "shipped"
    assert warnings(caplog) == [f"no record is served: {error}"]


BACKWARD = replace(PROBLEM, direction="backward")


def test_a_backward_problem_is_decided_by_itself_and_by_its_determinism(world: World) -> None:
    policy = A100()
    for problem in (PROBLEM, BACKWARD, replace(BACKWARD, deterministic=True)):
        for _ in range(2):
            candidate = dispatch.lookup(problem, policy).candidate
            assert candidate.direction == problem.direction
            assert candidate.deterministic or not problem.deterministic
        assert world.records.asked[-1].problem == problem.rounded()
    assert len(world.records.asked) == 3


def test_a_record_whose_pick_is_not_deterministic_serves_none_who_ask_for_that(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    policy = A100()
    free = next(c for c in policy.legal(BACKWARD) if not c.deterministic)
    world.records.answer = world.hit(free, "record")
    assert dispatch.lookup(BACKWARD, policy).candidate == free
    pick = dispatch.lookup(replace(BACKWARD, deterministic=True), policy)
    assert (pick.layer, pick.candidate.deterministic) == ("default", True)
    assert "record's pick is not deterministic" in pick.reason
    assert warnings(caplog) == [f"no record is served: its pick {free.name} is not deterministic"]


def test_a_library_that_holds_another_kernel_is_refused(world: World) -> None:
    default = A100().default(PROBLEM.rounded())
    other = A100().default(BACKWARD.bucketed())
    world.swapped[default.name] = other
    with pytest.raises(ArtifactError, match=f"holds {other.name}, wanted {default.name}"):
        dispatch.kernel_for(PROBLEM, A100(), device=0)


def test_a_kernel_is_obtained_and_prepared_once(world: World) -> None:
    policy = A100()
    kernel: Any = dispatch.kernel_for(PROBLEM, policy, device=0)
    assert kernel.candidate == policy.default(PROBLEM.rounded())
    assert kernel.prepared == [0]
    for length in (1000, 1001, 2000):
        problem = replace(PROBLEM, seqlen_q=length)
        assert dispatch.kernel_for(problem, policy, device=0) is kernel
    assert world.obtained == [(kernel.candidate.name, "80")]
    elsewhere: Any = dispatch.kernel_for(PROBLEM, policy, device=1)
    assert elsewhere.prepared == [1]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "80"), ((8, 6), "86"), ((8, 9), "89"), ((9, 0), "90"), ((9, 9), "90")],
)
def test_kernels_are_built_for_the_device_that_is_present(
    world: World, capability: tuple[int, int], arch: str
) -> None:
    world.gpu = replace(GPU, compute_capability=capability)
    dispatch.kernel_for(PROBLEM, A100(), device=0)
    assert world.obtained[0][1] == arch


def test_invalidate_decides_again_and_keeps_kernels(world: World) -> None:
    policy, before = A100(), dispatch.generation()
    kernel = dispatch.kernel_for(PROBLEM, policy, device=0)
    dispatch.invalidate()
    assert dispatch.generation() == before + 1
    assert dispatch.kernel_for(PROBLEM, policy, device=0, must_be_warm=True) is kernel
    assert len(world.obtained) == 1
    world.records.answer = world.hit(other_candidate(policy), "record")
    dispatch.invalidate()
    tuned: Any = dispatch.kernel_for(PROBLEM, policy, device=0)
    assert tuned.candidate == other_candidate(policy)


def test_a_cold_kernel_under_capture_is_refused_and_nothing_is_built(world: World) -> None:
    policy = A100()
    with pytest.raises(NotWarmError, match="outside graph capture"):
        dispatch.kernel_for(PROBLEM, policy, device=0, must_be_warm=True)
    assert not world.obtained
    kernel = dispatch.kernel_for(PROBLEM, policy, device=0)
    other_length = replace(PROBLEM, seqlen_q=512, seqlen_k=512)
    assert dispatch.kernel_for(other_length, policy, device=0, must_be_warm=True) is kernel


def test_under_capture_a_ready_kernel_of_the_class_serves(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    policy = A100()
    first = dispatch.kernel_for(PROBLEM, policy, device=0)
    world.records.answer = world.hit(other_candidate(policy), "record")
    dispatch.invalidate()
    few = replace(PROBLEM, batch=1)
    assert dispatch.kernel_for(few, policy, device=0, must_be_warm=True) is first
    (warned,) = [text for text in warnings(caplog) if "in a graph" in text]
    assert "call it once before the capture" in warned
    with settings.override(mode="frozen"), pytest.raises(NotWarmError):
        dispatch.kernel_for(few, policy, device=0, must_be_warm=True)
    second: Any = dispatch.kernel_for(few, policy, device=0)
    assert second.candidate == other_candidate(policy)
    assert dispatch.kernel_for(few, policy, device=0, must_be_warm=True) is second
    world.records.answer = None
    for other in ({"dim_qk": 64, "dim_v": 64}, {"dtype": "bf16"}, {"direction": "backward"}):
        with pytest.raises(NotWarmError):
            dispatch.kernel_for(replace(few, **other), policy, device=0, must_be_warm=True)


@pytest.mark.parametrize("stage", ["build_failures", "prepare_failures"])
def test_a_tuned_pick_that_fails_gives_way_to_the_default(
    world: World, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    policy, tuned = A100(), other_candidate(A100())
    world.records.answer = world.hit(tuned, "record")
    error = BuildError("syntax") if stage == "build_failures" else ArtifactError("no such symbol")
    getattr(world, stage)[tuned.name] = error
    for length in (1000, 300):
        kernel: Any = dispatch.kernel_for(replace(PROBLEM, seqlen_q=length), policy, device=0)
        assert kernel.candidate == policy.default(PROBLEM.rounded())
    assert [name for name, _ in world.obtained].count(tuned.name) == 1
    assert warnings(caplog) == [f"the tuned pick cannot be used, the default serves: {error}"]


def test_when_the_default_fails_too_the_error_has_both_reasons(world: World) -> None:
    policy, tuned = A100(), other_candidate(A100())
    default = policy.default(PROBLEM.rounded())
    world.records.answer = world.hit(tuned, "record")
    world.build_failures = {tuned.name: BuildError("reason one"), default.name: BuildError("two")}
    with pytest.raises(NoCandidateError, match=r"the tuned pick: reason one; the default: two"):
        dispatch.kernel_for(PROBLEM, policy, device=0)
    world.records.answer = None
    dispatch.invalidate()
    with pytest.raises(BuildError, match="two"):
        dispatch.kernel_for(PROBLEM, policy, device=0)


@pytest.mark.parametrize(
    "error", [ToolchainError("no nvcc"), StoreError("disk full"), DeviceMemoryError("full")]
)
def test_what_the_default_would_not_cure_is_raised(world: World, error: Exception) -> None:
    tuned = other_candidate(A100())
    world.records.answer = world.hit(tuned, "record")
    world.build_failures[tuned.name] = error
    with pytest.raises(type(error), match=str(error)):
        dispatch.kernel_for(PROBLEM, A100(), device=0)
    del world.build_failures[tuned.name]
    kernel: Any = dispatch.kernel_for(PROBLEM, A100(), device=0)
    assert kernel.candidate == tuned


def test_a_policy_of_another_gpu_runs_with_one_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    policy = H100()
    for length in (1000, 300):
        dispatch.kernel_for(replace(PROBLEM, seqlen_q=length), policy, device=0)
    assert warnings(caplog) == [
        "kernels chosen for H100 run on NVIDIA A100-SXM4-80GB: right, but not the fastest it can do"
    ]


def test_a_gpu_that_lacks_the_shared_memory_is_named_beside_the_policy(world: World) -> None:
    world.gpu = replace(
        GPU, name="NVIDIA GeForce RTX 4090", compute_capability=(8, 9), smem_per_block_bytes=20000
    )
    with pytest.raises(
        UnsupportedArchitectureError, match=r"of A100 needs \d+ bytes .*RTX 4090 gives a CTA 20000"
    ):
        dispatch.kernel_for(PROBLEM, A100(), device=0)
    assert not world.obtained


def test_a_gpu_that_is_too_old_is_named_beside_the_policy(world: World) -> None:
    world.gpu = replace(GPU, name="Tesla V100", compute_capability=(7, 0))
    for _ in range(2):
        with pytest.raises(
            UnsupportedArchitectureError, match=r"A100 \(sm80\) do not run on .*V100, .* 7\.0"
        ):
            dispatch.kernel_for(PROBLEM, A100(), device=0)


def test_many_untuned_problems_get_one_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    policy = A100()
    for seqlen_q in (PROBLEM.seqlen_q, 900, 800):  # of one bucket, each with a default of its own
        for batch in range(1, untuned.STORM):
            dispatch.lookup(replace(PROBLEM, batch=batch, seqlen_q=seqlen_q), policy)
        assert not warnings(caplog)
    for batch in range(untuned.STORM, untuned.STORM + 20):
        for seqlen_q in (PROBLEM.seqlen_q, 900):
            dispatch.lookup(replace(PROBLEM, batch=batch, seqlen_q=seqlen_q), policy)
    assert len(warnings(caplog)) == 1
    assert "attention-autotuner tune" in warnings(caplog)[0]


def test_mode_tune_searches_once_and_serves_what_it_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, tuned = A100(), other_candidate(A100())
    searched = []

    def search(problem: Problem, policy: Policy) -> None:
        searched.append((problem, settings.current().mode))
        world.records.answer = world.hit(tuned, "record")

    monkeypatch.setattr("attention_autotuner.tuning.search.tune", search)
    with settings.override(mode="tune"):
        with pytest.raises(NotWarmError, match="tuned first"):
            dispatch.kernel_for(PROBLEM, policy, device=0, must_be_warm=True)
        for length in (1000, 1001):
            kernel: Any = dispatch.kernel_for(replace(PROBLEM, seqlen_q=length), policy, device=0)
            assert kernel.candidate == tuned
    assert searched == [(PROBLEM, "tune")]


def test_a_search_that_fails_leaves_the_default(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    searched = []

    def search(problem: Problem, policy: Policy) -> None:
        searched.append(problem)
        raise NoCandidateError("nothing ran")

    monkeypatch.setattr("attention_autotuner.tuning.search.tune", search)
    policy = A100()
    with settings.override(mode="tune"):
        for length in (1000, 1001):
            kernel: Any = dispatch.kernel_for(replace(PROBLEM, seqlen_q=length), policy, device=0)
            assert kernel.candidate == policy.default(PROBLEM.rounded())
    assert len(searched) == 1
    assert any("nothing ran" in line for line in warnings(caplog))


def test_tune_makes_the_next_call_look_again() -> None:
    calls = []

    def search(*arguments: Any, **options: Any) -> str:
        calls.append((arguments, options))
        if options.get("fail"):
            raise NoCandidateError("nothing")
        return "result"

    tune = searching.invalidating(search)
    before = dispatch.generation()
    assert tune(PROBLEM, effort="none") == "result"
    assert calls == [((PROBLEM,), {"effort": "none"})]
    assert dispatch.generation() == before + 1
    with pytest.raises(NoCandidateError):
        tune(PROBLEM, fail=True)
    assert dispatch.generation() == before + 2


def test_dispatch_imports_no_torch() -> None:
    import subprocess

    code = "import sys, attention_autotuner.serving.dispatch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_warm_lookup_is_quick(world: World) -> None:
    policy, problem = A100(), PROBLEM
    dispatch.lookup(problem, policy)
    best = min(_seconds(lambda: dispatch.lookup(problem, policy)) for _ in range(5))
    assert best < 15e-6, f"{best * 1e6:.1f} us"  # the bar is 3; test machines are slow and shared


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(2000):
        action()
    return (time.perf_counter() - start) / 2000


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_library_is_really_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_kernel: Callable[..., Path]
) -> None:
    name = A100().default(PROBLEM.rounded()).name
    stored = SimpleNamespace(digest="d" * 64, path=fake_kernel(f'-DNAME="{name}"'))
    monkeypatch.setattr(dispatch, "probe", lambda device: GPU)
    monkeypatch.setattr(dispatch, "detect", lambda device: A100())
    monkeypatch.setattr(dispatch, "obtain", lambda *_, **__: stored)
    with settings.override(cache_dir=tmp_path, mode="cached"):
        kernel = dispatch.kernel_for(PROBLEM, A100(), device=0)
    assert kernel.info.name == name
    assert 0 in kernel._prepared
