"""The fit of the cost model's constants to measurements, in log space: a factor of two counts the same either way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from statistics import fmean

from .coefficients import BOUNDS, Coefficients

ABSOLUTE_WEIGHT = 0.2  # of a problem's mean log error beside the spread around it: ranking matters more than level


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured candidate for :func:`calibrate`.

    Attributes:
        group: what is ranked together, e.g. one problem on one GPU.
        measured_us: the measured time.
        predict: the model's time in microseconds under given coefficients.
    """

    group: str
    measured_us: float
    predict: Callable[[Coefficients], float]


def loss(samples: Sequence[Sample], coefficients: Coefficients) -> float:
    """Mean squared log error: the spread inside each group, plus a lesser share of each group's mean.

    Slow candidates count less (weight best / measured), since only the order at the top matters.
    """
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    losses = []
    for group in groups.values():
        best = min(sample.measured_us for sample in group)
        errors = [log(sample.predict(coefficients) / sample.measured_us) for sample in group]
        shares = [best / sample.measured_us for sample in group]
        total = sum(shares)
        mean = sum(e * w for e, w in zip(errors, shares, strict=True)) / total
        spread = sum(w * (e - mean) ** 2 for e, w in zip(errors, shares, strict=True)) / total
        losses.append(spread + ABSOLUTE_WEIGHT * mean**2)
    return fmean(losses)


def calibrate(
    samples: Sequence[Sample],
    start: Coefficients,
    *,
    bounds: dict[str, tuple[float, float]] | None = None,
    sweeps: int = 12,
) -> Coefficients:
    """Fit the coefficients to measurements by a bounded coordinate search.

    Each sweep tries a step up and a step down for every coefficient and keeps what lowers :func:`loss`; a sweep that
    keeps nothing halves the steps. A coefficient stays as it is where neither of its bounds changes a prediction.
    Deterministic.

    Args:
        samples: measured candidates; at least two.
        start: where to begin.
        bounds: which coefficients may move and how far; :data:`BOUNDS` by default.
        sweeps: how many rounds at most.

    Raises:
        ValueError: fewer than two samples, or a bound names no coefficient.
    """
    if len(samples) < 2:
        raise ValueError(f"calibration needs at least 2 samples, got {len(samples)}")
    limits = BOUNDS if bounds is None else bounds
    known = {field.name for field in fields(Coefficients)}
    if not limits.keys() <= known:
        raise ValueError(f"no coefficients named {sorted(limits.keys() - known)}")
    predicted = [sample.predict(start) for sample in samples]

    def matters(name: str, bound: float) -> bool:
        trial = replace(start, **{name: bound})
        return any(s.predict(trial) != us for s, us in zip(samples, predicted, strict=True))

    limits = {n: ends for n, ends in limits.items() if any(matters(n, end) for end in ends)}
    current, lowest = start, loss(samples, start)
    step = 0.25
    for _ in range(sweeps):
        moved = False
        for name, (low, high) in limits.items():
            for direction in (step, -step):
                value = getattr(current, name) + direction * (high - low)
                trial = replace(current, **{name: min(high, max(low, value))})
                if trial == current:
                    continue
                trial_loss = loss(samples, trial)
                if trial_loss < lowest:
                    current, lowest, moved = trial, trial_loss, True
                    break
        if not moved:
            step /= 2
    return current
