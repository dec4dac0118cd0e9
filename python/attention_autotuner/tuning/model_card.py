"""Model cards: the cost model's predictions held against measured searches, and what that says of its first picks."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, log
from typing import Any

from ..arch import resolve
from ..arch.policy import Policy
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..errors import UnsupportedArchitectureError
from ..kernels.cost_model import Estimate, estimate
from ..kernels.residual import Residual
from .ranking import order
from .record_schema import TuningRecord
from .shortlist import Ranked

PICKS = (1, 3, 5, 8, 10)
FEW = 5  # measured candidates of a problem: of fewer, first picks say nothing
BEHIND = 0.01  # of the default: a first choice that loses more should not have been made


# --- measured searches ------------------------------------------------------------------------------


def times_of(record: TuningRecord) -> dict[Candidate, float]:
    """The times of a record's usable candidates, microseconds, as if all had run at the clocks of the best."""
    timed = [(e.candidate, e.measurement) for e in record.entries if e.outcome.ok and e.measurement]
    best_us: dict[str, float] = {}
    for _, timing in timed:
        us = timing.median_us / timing.ratio_to_best
        best_us[timing.environment] = min(us, best_us.get(timing.environment, inf))
    return {c: best_us[timing.environment] * timing.ratio_to_best for c, timing in timed}


@dataclass(frozen=True, kw_only=True)
class Search:
    """A record as the model sees it.

    Attributes:
        problem: as measured.
        policy: with the spec of the GPU.
        times: candidate -> microseconds.
        estimates: candidate -> the analytic estimate; of every measured one that the model thinks can run.
        gpu_name: where it was measured.
    """

    problem: Problem
    policy: Policy
    times: dict[Candidate, float]
    estimates: dict[Candidate, Estimate]
    gpu_name: str

    @classmethod
    def of(cls, record: TuningRecord, policy: Policy | None = None) -> Search:
        """The search of a record, under its GPU's spec or that of another policy.

        Raises:
            UnsupportedArchitectureError: there is no policy of the record's name.
        """
        policy = policy or policy_of(record)
        problem, times = record.measured_problem, times_of(record)
        estimates = {candidate: estimate(problem, candidate, policy.spec) for candidate in times}
        return cls(
            problem=problem,
            policy=policy,
            times=times,
            estimates={c: e for c, e in estimates.items() if isfinite(e.us)},
            gpu_name=record.environment.gpu_name or "unknown",
        )

    @property
    def group(self) -> Problem:
        """The problem that it is left out with."""
        return replace(self.problem, deterministic=False)

    def regret(self, residual: Residual | None = None) -> Regret:
        """The loss of the first picks among the candidates that were measured."""
        ranked = order(self.problem, self.policy, self.estimates.items(), residual)
        ratios = {candidate.name: us for candidate, us in self.times.items()}
        return regret(ranked, self.policy.untuned(self.problem), ratios)

    def errors(self, residual: Residual | None = None) -> list[float]:
        """Log of predicted over measured, of each candidate; with a residual, of what it expects."""
        factors = {
            c: 1.0 if residual is None else residual.correction(self.problem, c, e)
            for c, e in self.estimates.items()
        }
        return [log(e.us * factors[c] / self.times[c]) for c, e in self.estimates.items()]


def policy_of(record: TuningRecord) -> Policy:
    """The policy of a record, with the spec of the GPU that it was measured on where there is one.

    Raises:
        UnsupportedArchitectureError: there is no such policy.
    """
    try:
        policy = resolve(record.environment.gpu_name or record.arch)
    except UnsupportedArchitectureError:
        policy = resolve(record.arch)
    return policy if policy.name == record.arch else resolve(record.arch)


def searches(records: Iterable[TuningRecord]) -> list[Search]:
    """The searches that say something: those that have timed two candidates at least."""
    return [s for s in map(Search.of, records) if len(s.estimates) > 1]


# --- their first picks ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Regret:
    """The loss of the model's first picks on one problem.

    Attributes:
        best: name of the fastest candidate measured.
        ranked: picks -> best time among that many first of the ranking over the best of all; 1.0 loses nothing.
        default: the policy's default over the best.
        correlation: Spearman's, between the order and the measured times.
    """

    best: str
    ranked: dict[int, float]
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
    measured = [candidate.name for candidate, _ in ranked if candidate.name in ratios]
    return Regret(
        best=min(ratios, key=lambda name: (ratios[name], name)),
        ranked={k: _best_of(ranked[:k], ratios) / fastest for k in PICKS},
        default=ratios.get(default.name, inf) / fastest,
        correlation=correlation(range(len(measured)), [ratios[name] for name in measured]),
    )


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


# --- cards ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Card:
    """The figures of a model on some searches.

    Attributes:
        name: of what they share: architecture, operation and direction; or ``all``.
        problems: searches of at least :data:`FEW` candidates, which the figures of picks are over.
        candidates: measured, of all searches.
        regret: builds -> best time among that many first picks over the best of all, geometric mean.
        default: the same of the policy's default, where it was measured.
        first: the first choice over the default, geometric mean.
        behind: problems whose first choice is more than :data:`BEHIND` slower than the default.
        worst: the largest of these ratios.
        correlation: mean of the rank correlations.
        bias, rms: mean and root mean square of log predicted over measured.
    """

    name: str
    problems: int
    candidates: int
    regret: Mapping[int, float]
    default: float
    first: float
    behind: int
    worst: float
    correlation: float
    bias: float
    rms: float

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)


def cards(
    measured: Sequence[Search], residuals: Sequence[Residual | None] | None = None
) -> list[Card]:
    """The card of all searches, and one for each architecture, operation and direction.

    Args:
        measured: the searches.
        residuals: of each search, the one that used it; by default the analytic model does.
    """
    used = [None] * len(measured) if residuals is None else residuals
    groups: dict[str, list[tuple[Search, Residual | None]]] = {}
    for search, residual in zip(measured, used, strict=True):
        problem = search.problem
        scope = f"{search.policy.name} {problem.op} {problem.direction}"
        for name in ("all", scope):
            groups.setdefault(name, []).append((search, residual))
    return [_card(name, members) for name, members in groups.items()]


def _card(name: str, members: Sequence[tuple[Search, Residual | None]]) -> Card:
    errors = [error for search, residual in members for error in search.errors(residual)]
    regrets = [s.regret(residual) for s, residual in members if len(s.estimates) >= FEW]
    # Of a default that fell out, or was not tried, nothing can be ahead or behind.
    known = [regret for regret in regrets if regret.default < inf]
    first = [regret.ranked[1] / regret.default for regret in known]
    return Card(
        name=name,
        problems=len(regrets),
        candidates=len(errors),
        regret={k: _mean([regret.ranked[k] for regret in regrets]) for k in PICKS},
        default=_mean([regret.default for regret in known]),
        first=_mean(first),
        behind=sum(ratio > 1 + BEHIND for ratio in first),
        worst=max(first, default=1.0),
        correlation=statistics.fmean([r.correlation for r in regrets]) if regrets else 0.0,
        bias=statistics.fmean(errors),
        rms=statistics.fmean(error**2 for error in errors) ** 0.5,
    )


def _mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios) if ratios else 1.0
