"""Learning from measured searches: a residual of the cost model by scikit-learn, kept where it helps.

Every problem is predicted under a residual that has not seen it, nor its like in deterministic mode. Trees are small,
fixed by a seed, and written as plain numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import log
from typing import Any

from ..core.problem import Problem
from ..errors import MissingPackageError, RecordError
from ..kernels.residual import Residual, Tree, features, scope_of
from .model_card import Card, Search, cards

REPEATED = 5e-4  # of a time: a mean regret moves by more when a race is run again
FOLDS = 12  # of the problems, at most: each is left out with others of its fold
ENOUGH = 6  # problems that have measured a kernel in one operation and direction
TREES: dict[str, Any] = {
    "n_estimators": 120,
    "max_depth": 3,
    "learning_rate": 0.1,
    "subsample": 0.7,
    "max_features": 0.3,
    "min_samples_leaf": 5,
    "random_state": 0,
}
DIGITS = 5  # of thresholds and leaves


def fit(learned_from: Sequence[Search], origin: dict[str, Any] | None = None) -> Residual:
    """Fit a residual to searches of one architecture.

    Args:
        learned_from: at least one.
        origin: what the residual says of itself beside counts.

    Raises:
        RecordError: there is nothing to learn from, or there are several architectures.
        MissingPackageError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import GradientBoostingRegressor
        from sklearn.feature_extraction import DictVectorizer
    except ImportError as error:
        raise MissingPackageError(
            "learning needs scikit-learn: pip install 'attention-autotuner[tune]'"
        ) from error
    archs = {search.policy.name for search in learned_from}
    problems: dict[str, set[Problem]] = {}
    for search in learned_from:
        for candidate in search.estimates:
            problems.setdefault(scope_of(search.problem, candidate), set()).add(search.group)
    scopes = tuple(sorted(scope for scope, seen in problems.items() if len(seen) >= ENOUGH))
    rows, targets, shares = [], [], []
    for search in learned_from:
        best_us = min(search.times.values())
        for candidate, predicted in search.estimates.items():
            if scope_of(search.problem, candidate) in scopes:
                rows.append(features(search.problem, candidate, predicted))
                targets.append(log(search.times[candidate] / predicted.us))
                shares.append(best_us / search.times[candidate])  # what matters is the top
    if len(archs) != 1 or not rows:
        raise RecordError(
            f"learning takes one architecture and {ENOUGH} problems of a kernel, got {len(rows)} times of "
            f"{', '.join(sorted(archs)) or 'no architecture'}"
        )
    vectorizer = DictVectorizer(sparse=False)
    table = vectorizer.fit_transform(rows)
    model = GradientBoostingRegressor(**TREES).fit(table, targets, sample_weight=shares)
    rate = TREES["learning_rate"]
    return Residual(
        arch=archs.pop(),
        scopes=scopes,
        names=tuple(vectorizer.feature_names_),
        base=round(float(model.init_.constant_[0, 0]), DIGITS),
        trees=tuple(_tree(stage[0].tree_, 0, rate) for stage in model.estimators_),
        origin={"problems": len(learned_from), "candidates": len(rows), **(origin or {})},
    )


def _tree(grown: Any, node: int, rate: float) -> Tree:
    """A grown tree from a node on; its leaves times the learning rate."""
    low, high = int(grown.children_left[node]), int(grown.children_right[node])
    if low < 0:
        return round(rate * float(grown.value[node, 0, 0]), DIGITS)
    threshold = round(float(grown.threshold[node]), DIGITS)
    return (
        int(grown.feature[node]),
        threshold,
        _tree(grown, low, rate),
        _tree(grown, high, rate),
    )


def held_out(measured: Sequence[Search]) -> list[Residual | None]:
    """For each search a residual that was learned from others of its architecture; None where these were not enough.

    Raises:
        MissingPackageError: scikit-learn is not installed.
    """
    groups = list(dict.fromkeys(search.group for search in measured))
    random.Random(0).shuffle(groups)
    folds = {group: number % FOLDS for number, group in enumerate(groups)}
    keys = [(search.policy.name, folds[search.group]) for search in measured]
    residuals = {
        (arch, fold): _fit_of(
            [s for s in measured if s.policy.name == arch and folds[s.group] != fold]
        )
        for arch, fold in set(keys)
    }
    return [residuals[key] for key in keys]


def _fit_of(measured: Sequence[Search]) -> Residual | None:
    try:
        return fit(measured)
    except RecordError:
        return None


def compared(
    measured: Sequence[Search], others: Sequence[Search] = ()
) -> tuple[list[Card], list[Card]]:
    """Cards of the analytic model, and of residuals on problems that they were not learned from.

    Args:
        measured: the searches that the cards are of.
        others: more to learn from; those of a problem that a residual is held against are left out of it.

    Raises:
        MissingPackageError: scikit-learn is not installed.
    """
    residuals = held_out([*measured, *others])[: len(measured)]
    return cards(measured), cards(measured, residuals)


def helps(analytic: Card, learned: Card) -> bool:
    """True where what was learned is no worse on problems left out: in first picks, in prediction, than the default."""
    return (
        all(learned.regret[k] <= analytic.regret[k] + REPEATED for k in (1, 5, 10))
        and learned.rms <= analytic.rms
        and learned.first <= 1.0
    )
