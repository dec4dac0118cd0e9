"""Exhaustive measurement, and what the model's first picks lose against it.

*Exhaustive* is every legal candidate, or a sample of :data:`SAMPLE` fixed by a seed, stratified over block_m, block_n,
warps and stages. The sample of a head-dim class does not depend on the problem, so problems of one class share their
builds; each problem adds the model's own first picks.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.tuning.shortlist import Ranked, shortlist

SAMPLE = 96
FIRST = 10  # of the model's own picks that are inside every sample
PICKS = (1, 3, 5, 8, 10)


def stratum_of(candidate: Candidate) -> tuple[object, ...]:
    """The traits that a stratum shares: tiles, warps and stages, of several passes those of every pass."""
    return kernel_of(candidate).describe(candidate).stratum


def stratified(candidates: Sequence[Candidate], seed: int) -> Iterator[Candidate]:
    """All candidates in an order whose every prefix is spread over the strata, the same for the same seed."""
    strata: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: c.name):
        strata.setdefault(stratum_of(candidate), []).append(candidate)
    source = random.Random(seed)
    groups = list(strata.values())
    for group in groups:
        source.shuffle(group)
    source.shuffle(groups)
    for place in range(max(map(len, groups), default=0)):
        for group in groups:
            if place < len(group):
                yield group[place]


def sample(
    ranked: Sequence[Ranked],
    default: Candidate,
    *,
    size: int = SAMPLE,
    first: int = FIRST,
    seed: int = 0,
) -> list[Candidate]:
    """The candidates that are measured for one problem.

    Args:
        ranked: all legal candidates, best first by the model.
        default: the policy's own; always inside.
        size: how many at most; all candidates when there are no more than that.
        first: how many of the ranking's and of the shortlist's first are inside.
        seed: of the stratified rest.

    Returns:
        Distinct candidates: the default, the model's picks, then the stratified ones.

    Raises:
        ValueError: ``size`` does not hold the default and the model's picks.
    """
    first_picks = [candidate for candidate, _ in ranked[:first]]
    first_picks += [candidate for candidate, _ in shortlist(ranked, default, first)]
    chosen = list(dict.fromkeys([default, *first_picks]))
    if len(chosen) > size:
        raise ValueError(f"size must be at least {len(chosen)}, got {size}")
    for candidate in stratified([candidate for candidate, _ in ranked], seed):
        if len(chosen) == size:
            break
        if candidate not in chosen:
            chosen.append(candidate)
    return chosen


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
