"""The defaults of attention's forward of family ``sm90``, against races of an H200."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.plans import Plan, plans_of
from benchmarks.forward_plans import (
    Race,
    default_of,
    fit,
    geometric_mean,
    main,
    read_races,
    regrets,
)

RACES = Path("benchmarks/results/nvidia-h200/forward_plans.json.xz")
POLICY = resolve("H200")
EACH = 3  # of so many races one is looked at


@pytest.fixture(scope="module")
def races(repository: Path) -> tuple[Race, ...]:
    return read_races(repository / RACES)


def ratios(races: tuple[Race, ...], choose: Callable[[Problem], str]) -> list[float]:
    return [ratio for _, ratio in regrets(races[::EACH], choose)]


def test_defaults_are_near_the_fastest_kernel_of_every_race(races: tuple[Race, ...]) -> None:
    of_defaults = ratios(races, default_of(POLICY))
    assert len(of_defaults) > 300
    assert geometric_mean(of_defaults) < 1.011
    assert max(of_defaults) < 1.16
    # By the lengths of buckets they would not be.
    by_buckets = ratios(races, lambda problem: POLICY.default(problem.bucketed()).knobs.label)
    assert geometric_mean(by_buckets) > 1.025


def test_the_log_says_what_the_races_say(races: tuple[Race, ...], repository: Path) -> None:
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"\| (1\.\d+) over all, 1\.\d+ over \d+ shapes at powers of two", log)
    assert float(said) == pytest.approx(geometric_mean(ratios(races, default_of(POLICY))), abs=3e-3)
    assert f"Races of {len(races)} shapes" in log


def test_costs_of_tiles_are_found_again_from_times_that_have_them() -> None:
    (dims, plan) = (128, plans_of(Problem(dim_qk=128, dim_v=128))[0])
    problems = [
        Problem(batch=1, seqlen_q=n, seqlen_k=n, dim_qk=dims, dim_v=dims)
        for n in (256, 512, 1024, 2048)
    ]
    # As the formula has it: 16 heads of n / 64 tiles, of n / 64 steps, by 132 SMs.
    raced = []
    for problem in problems:
        steps = problem.seqlen_q // 64
        rounds = -(-16 * steps // 132)
        us = 3.2 + rounds * (1.5 + 0.25 * steps)
        raced.append(Race(problem=problem, us={"g1n64_overlap_optimistic_free_static": us}))
    begun = Plan(warpgroups=1, mainloop="overlap", block_n=64, costs=((1.0, 1.0), (1.0, 1.0)))
    assert fit(raced, begun, causal=False, sms=132) == pytest.approx((1.5, 0.25), rel=0.01)
    assert plan.mainloop == "overlap"


def test_the_command_prints_what_defaults_cost(
    races: tuple[Race, ...],
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.forward_plans.read_races", lambda path: races[:24])
    assert main([str(repository / RACES), "--no-fit"]) == 0
    assert re.search(
        r"\(64, 64\) causal: 1\.0\d\d, at most 1\.\d\d, of \d+ shapes", capsys.readouterr().out
    )
