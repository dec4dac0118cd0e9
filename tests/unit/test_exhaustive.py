from __future__ import annotations

from dataclasses import replace
from math import inf
from statistics import geometric_mean

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.tuning.shortlist import shortlist
from benchmarks.exhaustive import (
    FIRST,
    SAMPLE,
    correlation,
    regret,
    sample,
    stratified,
    stratum_of,
)

POLICY = H100()
SM80 = POLICY.on((8, 0))
PROBLEMS = [
    Problem(seqlen_q=n, seqlen_k=n, causal=causal) for n, causal in ((1024, False), (8192, True))
]
RANKED = [rank(problem, POLICY.legal(problem), POLICY.spec) for problem in PROBLEMS]
DEFAULTS = [POLICY.default(problem) for problem in PROBLEMS]


def test_the_sample_is_reproducible_and_spread_and_holds_the_models_first() -> None:
    chosen = sample(RANKED[0], DEFAULTS[0])
    assert len(chosen) == len(set(chosen)) == SAMPLE
    assert chosen == sample(RANKED[0], DEFAULTS[0])
    assert chosen != sample(RANKED[0], DEFAULTS[0], seed=1)
    assert DEFAULTS[0] in chosen
    assert {candidate for candidate, _ in RANKED[0][:FIRST]} <= set(chosen)
    assert {candidate for candidate, _ in shortlist(RANKED[0], DEFAULTS[0], FIRST)} <= set(chosen)
    for knob in ("block_m", "block_n", "num_threads", "num_stages", "mainloop", "schedule"):
        offered = {getattr(candidate.knobs, knob, None) for candidate, _ in RANKED[0]}
        assert {getattr(candidate.knobs, knob, None) for candidate in chosen} == offered


def test_problems_of_one_class_share_most_of_their_builds() -> None:
    first, second = (
        set(sample(ranked, default)) for ranked, default in zip(RANKED, DEFAULTS, strict=True)
    )
    assert len(first & second) >= SAMPLE - 3 * FIRST


def test_a_small_space_is_measured_whole() -> None:
    few = RANKED[0][:30]
    assert set(sample(few, few[0][0])) == {candidate for candidate, _ in few}
    with pytest.raises(ValueError, match="size must be at least"):
        sample(RANKED[0], DEFAULTS[0], size=5)


def test_stratified_order_is_a_permutation() -> None:
    candidates = [candidate for candidate, _ in RANKED[0]]
    order = list(stratified(candidates, seed=0))
    assert sorted(candidate.name for candidate in order) == sorted(
        candidate.name for candidate in candidates
    )


def test_a_perfect_model_has_no_regret() -> None:
    ratios = {candidate.name: estimate.us / RANKED[0][0][1].us for candidate, estimate in RANKED[0]}
    estimate = regret(RANKED[0], DEFAULTS[0], ratios)
    assert estimate.best in {
        candidate.name for candidate, e in RANKED[0] if e.us == RANKED[0][0][1].us
    }
    assert set(estimate.ranked.values()) == {1.0}
    assert estimate.correlation == pytest.approx(1.0)


def test_regret_is_the_loss_of_the_first_picks() -> None:
    ranked = [pair for pair in RANKED[0] if pair[0] != DEFAULTS[0]]
    names = [candidate.name for candidate, _ in ranked]
    ratios = {names[0]: 1.2, names[2]: 1.1, names[7]: 1.0, DEFAULTS[0].name: 1.3}
    result = regret(ranked, DEFAULTS[0], ratios)
    assert result.ranked[1] == pytest.approx(1.2)
    assert result.ranked[3] == result.ranked[5] == pytest.approx(1.1)
    assert result.ranked[8] == 1.0
    assert result.default == pytest.approx(1.3)
    assert result.best == names[7]
    with pytest.raises(ValueError, match="nothing was measured"):
        regret(RANKED[0], DEFAULTS[0], {})


def test_correlation_and_mean() -> None:
    assert correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)
    assert correlation([1, 1, 1], [1, 2, 3]) == 0.0
    assert correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([1.0, inf]) == inf


def test_a_sample_of_backward_candidates_is_spread_over_plans_and_tiles() -> None:
    problem = replace(PROBLEMS[0], direction="backward")
    ranked = rank(problem, SM80.legal(problem), SM80.spec)
    chosen = sample(ranked, SM80.default(problem), size=48)
    assert len(chosen) == len(set(chosen)) == 48
    offered = {candidate.knobs.plan for candidate, _ in ranked}
    assert {candidate.knobs.plan for candidate in chosen} == offered
    assert len({stratum_of(candidate) for candidate in chosen}) > 20
    candidate = next(candidate for candidate in chosen if candidate.knobs.keys is not None)
    assert candidate.knobs.keys is not None
    order = (
        replace(candidate.knobs, cta_order="longest_first"),
        replace(candidate.knobs, cta_order="raster"),
    )
    assert len({stratum_of(replace(candidate, knobs=knobs)) for knobs in order}) == 1
    wider = replace(candidate.knobs, keys=replace(candidate.knobs.keys, num_stages=9))
    assert stratum_of(replace(candidate, knobs=wider)) != stratum_of(candidate)
