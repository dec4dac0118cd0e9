from __future__ import annotations

from dataclasses import replace
from math import inf
from statistics import geometric_mean

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.tuning.exhaustive import (
    FIRST,
    SAMPLE,
    correlation,
    regret,
    sample,
    stratified,
    stratum_of,
)
from attention_autotuner.tuning.shortlist import shortlist

POLICY = H100()
PROBLEMS = [
    Problem(seqlen_q=n, seqlen_k=n, causal=causal) for n, causal in ((1024, False), (8192, True))
]
RANKED = [rank(problem, POLICY.legal(problem), POLICY.spec) for problem in PROBLEMS]
DEFAULTS = [POLICY.default(problem) for problem in PROBLEMS]


def test_the_sample_is_fixed_spread_and_holds_the_models_first() -> None:
    chosen = sample(RANKED[0], DEFAULTS[0])
    assert len(chosen) == len(set(chosen)) == SAMPLE
    assert chosen == sample(RANKED[0], DEFAULTS[0])
    assert chosen != sample(RANKED[0], DEFAULTS[0], seed=1)
    assert DEFAULTS[0] in chosen
    assert {one for one, _ in RANKED[0][:FIRST]} <= set(chosen)
    assert {one for one, _ in shortlist(RANKED[0], DEFAULTS[0], FIRST)} <= set(chosen)
    for knob in ("block_m", "block_n", "num_threads", "num_stages"):
        offered = {getattr(one.knobs, knob) for one, _ in RANKED[0]}
        assert {getattr(one.knobs, knob) for one in chosen} == offered


def test_problems_of_one_class_share_most_of_their_builds() -> None:
    first, second = (
        set(sample(ranked, default)) for ranked, default in zip(RANKED, DEFAULTS, strict=True)
    )
    assert len(first & second) >= SAMPLE - 3 * FIRST


def test_a_small_space_is_measured_whole() -> None:
    few = RANKED[0][:30]
    assert set(sample(few, few[0][0])) == {one for one, _ in few}
    with pytest.raises(ValueError, match="size must be at least"):
        sample(RANKED[0], DEFAULTS[0], size=5)


def test_stratified_order_is_a_permutation() -> None:
    candidates = [one for one, _ in RANKED[0]]
    order = list(stratified(candidates, seed=0))
    assert sorted(one.name for one in order) == sorted(one.name for one in candidates)


def test_regret_of_a_perfect_model_is_nothing() -> None:
    ratios = {one.name: found.us / RANKED[0][0][1].us for one, found in RANKED[0]}
    found = regret(RANKED[0], DEFAULTS[0], ratios)
    assert found.best in {one.name for one, e in RANKED[0] if e.us == RANKED[0][0][1].us}
    assert set(found.ranked.values()) == {1.0}
    assert found.correlation == pytest.approx(1.0)


def test_regret_counts_what_the_first_picks_miss() -> None:
    ranked = [pair for pair in RANKED[0] if pair[0] != DEFAULTS[0]]
    names = [one.name for one, _ in ranked]
    ratios = {names[0]: 1.2, names[2]: 1.1, names[7]: 1.0, DEFAULTS[0].name: 1.3}
    found = regret(ranked, DEFAULTS[0], ratios)
    assert found.ranked[1] == pytest.approx(1.2)
    assert found.ranked[3] == found.ranked[5] == pytest.approx(1.1)
    assert found.ranked[8] == 1.0
    assert found.default == pytest.approx(1.3)
    assert found.best == names[7]
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
    ranked = rank(problem, POLICY.legal(problem), POLICY.spec)
    chosen = sample(ranked, POLICY.default(problem), size=48)
    assert len(chosen) == len(set(chosen)) == 48
    offered = {one.knobs.plan for one, _ in ranked}
    assert {one.knobs.plan for one in chosen} == offered
    assert len({stratum_of(one) for one in chosen}) > 20
    one = next(one for one in chosen if one.knobs.keys is not None)
    assert one.knobs.keys is not None
    order = (
        replace(one.knobs, cta_order="longest_first"),
        replace(one.knobs, cta_order="raster"),
    )
    assert len({stratum_of(replace(one, knobs=knobs)) for knobs in order}) == 1
    wider = replace(one.knobs, keys=replace(one.knobs.keys, num_stages=9))
    assert stratum_of(replace(one, knobs=wider)) != stratum_of(one)
