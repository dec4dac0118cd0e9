from __future__ import annotations

from math import inf
from statistics import geometric_mean

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.tuning.model_card import correlation, regret

POLICY = H100()
PROBLEM = Problem(seqlen_q=1024, seqlen_k=1024)
RANKED = rank(PROBLEM, POLICY.legal(PROBLEM), POLICY.spec)
DEFAULT = POLICY.default(PROBLEM)


def test_a_perfect_model_has_no_regret() -> None:
    ratios = {candidate.name: estimate.us / RANKED[0][1].us for candidate, estimate in RANKED}
    estimate = regret(RANKED, DEFAULT, ratios)
    assert estimate.best in {candidate.name for candidate, e in RANKED if e.us == RANKED[0][1].us}
    assert set(estimate.ranked.values()) == {1.0}
    assert estimate.correlation == pytest.approx(1.0, abs=1e-4)  # but for equal estimates


def test_regret_is_the_loss_of_the_first_picks() -> None:
    ranked = [pair for pair in RANKED if pair[0] != DEFAULT]
    names = [candidate.name for candidate, _ in ranked]
    ratios = {names[0]: 1.2, names[2]: 1.1, names[7]: 1.0, DEFAULT.name: 1.3}
    result = regret(ranked, DEFAULT, ratios)
    assert result.ranked[1] == pytest.approx(1.2)
    assert result.ranked[3] == result.ranked[5] == pytest.approx(1.1)
    assert result.ranked[8] == 1.0
    assert result.default == pytest.approx(1.3)
    assert result.best == names[7]
    with pytest.raises(ValueError, match="nothing was measured"):
        regret(RANKED, DEFAULT, {})


def test_correlation_and_mean() -> None:
    assert correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)
    assert correlation([1, 1, 1], [1, 2, 3]) == 0.0
    assert correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([1.0, inf]) == inf
