"""Backward kernels and whole steps on a real GPU: checked, timed, recorded, and served to autograd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func, settings, tune, tune_step
from attention_autotuner.arch import detect
from attention_autotuner.cli.serving import serve
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.params import params_of, workspace_bytes
from attention_autotuner.serving import dispatch, loader, picks
from attention_autotuner.tuning import isolated
from attention_autotuner.tuning.entries import Entry, KernelEntry, StepEntry
from attention_autotuner.tuning.measure import InProcessMeasurer
from attention_autotuner.tuning.result import TuneResult
from attention_autotuner.tuning.shipped import ShippedRecords
from attention_autotuner.tuning.step import StepResult
from attention_autotuner.tuning.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.tune]

FORWARD = Problem(
    batch=2, heads_q=8, heads_kv=4, seqlen_q=1000, seqlen_k=1000, dim_qk=64, dim_v=64, causal=True
)
BACKWARD = replace(FORWARD, direction="backward")
STRICT = replace(BACKWARD, deterministic=True)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A tuned step, and a deterministic backward beside it."""

    cache: Path
    step: StepResult
    backward: TuneResult
    strict: TuneResult


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    cache = tmp_path_factory.mktemp("cache")
    with settings.override(cache_dir=cache, mode="cached", effort="quick"):
        step = tune_step(
            FORWARD, top_k=1, budget_seconds=60.0, backward_budget_seconds=120.0, confirm=False
        )
        strict = tune(STRICT, top_k=1, budget_seconds=120.0, confirm=False)
    assert step.backward is not None
    return Tuned(cache=cache, step=step, backward=step.backward, strict=strict)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tuned: Tuned) -> Iterator[None]:
    """Serve only the picks that were tuned here."""
    monkeypatch.setattr(picks, "ShippedRecords", lambda: ShippedRecords(tmp_path))
    with settings.override(cache_dir=tuned.cache, mode="cached"):
        dispatch.invalidate()
        yield


def built(result: TuneResult) -> dict[str, Path]:
    return {row.candidate.name: row.artifact for row in result.rows if row.artifact is not None}


def test_backward_kernels_are_checked_timed_and_recorded_for_the_step(tuned: Tuned) -> None:
    for result, purpose in (
        (tuned.step.forward, "step"),
        (tuned.backward, "step"),
        (tuned.strict, "backward"),
    ):
        assert result.status == "measured"
        assert result.record is not None
        assert result.record.purpose == purpose
        assert len(result.rows) == 2
        for row in result.rows:
            assert row.outcome.ok, f"{row.candidate.name}: {row.outcome}"
            assert row.timing is not None
            assert row.timing.samples >= 2
            assert 1.0 < row.timing.median_us < 1e6
    assert all(row.candidate.deterministic for row in tuned.strict.rows)


def test_a_step_takes_about_as_long_as_its_halves(tuned: Tuned) -> None:
    step = tuned.step
    assert step.source == "measured"
    assert step.picks_us is not None
    assert step.defaults_us is not None
    halves = 0.0
    for result in step.results:
        row = next(row for row in result.rows if row.candidate == result.pick)
        assert row.timing is not None
        halves += row.timing.median_us
    # Each half alone rotates its own tensors; in a step some of the forward's tensors are still in L2.
    assert 0.6 * halves < step.picks_us < 1.5 * halves
    assert step.gain is not None
    assert step.gain == pytest.approx(step.defaults_us / step.picks_us - 1.0, abs=0.1)


def test_a_step_is_slower_than_its_backward_in_one_race(tuned: Tuned) -> None:
    forward, backward = built(tuned.step.forward), built(tuned.backward)
    name = tuned.backward.pick.name
    entries: list[Entry] = [
        KernelEntry(name="backward", path=backward[name], problem=BACKWARD),
        StepEntry(
            name="step",
            forward=forward[tuned.step.forward.pick.name],
            backward=backward[name],
            problem=BACKWARD,
        ),
    ]
    timings = InProcessMeasurer().measure(
        BACKWARD, entries, budget_seconds=3.0, keep=["backward", "step"]
    )
    assert [timing.name for timing in timings] == ["backward", "step"]
    assert all(timing.outcome.ok for timing in timings)
    assert timings[1].ratio_to_best > 1.05


def test_a_second_process_times_backward_kernels(tuned: Tuned) -> None:
    kernels: dict[str, Any] = {
        name: [SimpleNamespace(path=path, launch_knobs={})]
        for name, path in built(tuned.backward).items()
    }
    timings, _ = isolated.measure(Worker(0), BACKWARD, kernels, budget_seconds=2.0, keep=kernels)
    assert {timing.name for timing in timings} == set(kernels)
    assert all(timing.outcome.ok for timing in timings)


def test_the_workspace_has_the_size_that_the_kernel_requests(tuned: Tuned) -> None:
    rows = BACKWARD.batch * BACKWARD.heads_q * BACKWARD.seqlen_q
    for result in (tuned.backward, tuned.strict):
        for row in result.rows:
            assert row.artifact is not None
            taken = workspace_bytes(result.problem, row.artifact)
            kernel = loader.load(row.artifact)
            assert taken == kernel.workspace_bytes(params_of(result.problem))
            # Delta of every row in fp32, and dq in fp32 where it is summed by atomics.
            assert taken >= 4 * rows
            if not row.candidate.deterministic:
                assert taken >= 4 * rows * (1 + BACKWARD.dim_qk)


@pytest.mark.usefixtures("fresh")
def test_dispatch_serves_each_pick_to_its_own_kind_of_call(tuned: Tuned) -> None:
    policy = detect()
    for problem, result in (
        (FORWARD, tuned.step.forward),
        (BACKWARD, tuned.backward),
        (STRICT, tuned.strict),
    ):
        pick = dispatch.lookup(problem, policy)
        assert (pick.layer, pick.candidate, pick.exact) == ("record", result.pick, True)
        longer = dispatch.lookup(replace(problem, seqlen_q=2000, seqlen_k=2000), policy)
        assert (longer.layer, longer.candidate, longer.exact) == ("record", result.pick, False)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("problem", [BACKWARD, STRICT], ids=["free", "deterministic"])
def test_autograd_runs_the_pick_and_its_gradients_are_right(tuned: Tuned, problem: Problem) -> None:
    for served in serve(problem):
        assert served.ok, f"{served.name}: {served.reason}"
    kernel = dispatch.kernel_for(problem, detect(), device=0, must_be_warm=True)
    result = tuned.strict if problem.deterministic else tuned.backward
    assert kernel.info.name == result.pick.name


@pytest.mark.usefixtures("fresh")
def test_the_deterministic_pick_repeats_its_bits() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, heads, 1000, 64, dtype=torch.float16, device="cuda", generator=generator)
        for heads in (8, 4, 4, 8)
    )

    def gradients() -> tuple[torch.Tensor, ...]:
        a, b, c = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        o = flash_attn_func(a, b, c, causal=True, deterministic=True)
        return torch.autograd.grad(o, (a, b, c), dout)

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@pytest.mark.usefixtures("fresh")
def test_nothing_is_measured_twice(tuned: Tuned) -> None:
    again = tune_step(FORWARD, top_k=1, confirm=False)
    assert [result.status for result in again.results] == ["recorded", "recorded"]
    assert [result.pick for result in again.results] == [
        tuned.step.forward.pick,
        tuned.backward.pick,
    ]
    assert again.source == "measured"  # whole steps are timed again
