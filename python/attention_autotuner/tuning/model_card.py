"""How well the cost model predicts: held against measured searches, and what that says of its first picks."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ..arch.policy import Policy
from ..core.candidate import Candidate
from ..kernels.cost_model import rank
from .record_schema import TuningRecord
from .shortlist import Ranked, shortlist

PICKS = (1, 3, 5, 8, 10)


@dataclass(frozen=True, kw_only=True)
class Regret:
    """The loss of the model's first picks on one problem.

    Attributes:
        best: name of the fastest candidate measured.
        ranked: picks -> best time among that many first of the ranking over the best of all; 1.0 loses nothing.
        shortlisted: the same for the list that a search would build, without the default.
        default: the policy's default over the best.
        correlation: Spearman's, between predicted and measured times.
    """

    best: str
    ranked: dict[int, float]
    shortlisted: dict[int, float]
    default: float
    correlation: float


def regret(ranked: Sequence[Ranked], default: Candidate, ratios: Mapping[str, float]) -> Regret:
    """Hold the model's order against measured times.

    Args:
        ranked: all legal candidates, best first by the model.
        default: the policy's own.
        ratios: candidate name -> measured time over the best one's; candidates that failed are missing.

    Raises:
        ValueError: nothing was measured.
    """
    if not ratios:
        raise ValueError("nothing was measured")
    fastest = min(ratios.values())
    listed = [pair for pair in shortlist(ranked, default, max(PICKS)) if pair[0] != default]
    measured = [
        (candidate.name, estimate.us) for candidate, estimate in ranked if candidate.name in ratios
    ]
    return Regret(
        best=min(ratios, key=lambda name: (ratios[name], name)),
        ranked={k: _best_of(ranked[:k], ratios) / fastest for k in PICKS},
        shortlisted={k: _best_of(listed[:k], ratios) / fastest for k in PICKS},
        default=ratios.get(default.name, inf) / fastest,
        correlation=correlation([us for _, us in measured], [ratios[name] for name, _ in measured]),
    )


def times_of(record: TuningRecord) -> dict[Candidate, float]:
    """The times of a record's usable candidates, microseconds, as if all had run at the clocks of the best."""
    timed = [(e.candidate, e.measurement) for e in record.entries if e.outcome.ok and e.measurement]
    best_us: dict[str, float] = {}
    for _, timing in timed:
        us = timing.median_us / timing.ratio_to_best
        best_us[timing.environment] = min(us, best_us.get(timing.environment, inf))
    return {c: best_us[timing.environment] * timing.ratio_to_best for c, timing in timed}


def regret_of(record: TuningRecord, policy: Policy) -> Regret:
    """The loss of the first picks among the candidates that a search has measured."""
    problem = record.measured_problem
    ratios = {candidate.name: us for candidate, us in times_of(record).items()}
    offered = [candidate for candidate in policy.legal(problem) if candidate.name in ratios]
    return regret(rank(problem, offered, policy.spec), policy.default(problem), ratios)


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, equal values at their mean rank; 0 when a side is constant."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return 0.0
    return statistics.correlation(_ranks(first), _ranks(second))


def _best_of(pairs: Sequence[Ranked], ratios: Mapping[str, float]) -> float:
    return min((ratios.get(candidate.name, inf) for candidate, _ in pairs), default=inf)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, v) + bisect_right(ordered, v) - 1) / 2 for v in values]
