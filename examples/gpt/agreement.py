"""Comparison of loss curves within noise, and the noise itself.

Exact attention functions round differently, and training amplifies the least difference; so curves from one seed and
the same batches drift apart without anything being wrong. How far is measured, not guessed: runs of PyTorch's own
attention that round differently differ among themselves by as much as may be excused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

WINDOW = 25
"""Steps that are compared together. Early windows have little noise and so see small errors."""
MEAN_FACTOR = 2.0
"""How many times the noise the difference may be, as a geometric mean over the windows."""
WORST_FACTOR = 4.0
"""How many times the noise it may be in any one window."""
LEAST_NOISE = 5e-4
"""Nats a token; a smaller difference is never an error: batches differ by far more."""


@dataclass(frozen=True)
class Window:
    """A stretch of training.

    Attributes:
        first, last: its steps, counted from 1, both inclusive.
        difference: root mean square of candidate less baseline, nats a token.
        noise: the largest such figure of any two references, up to here: curves that drifted apart need not come back.
    """

    first: int
    last: int
    difference: float
    noise: float

    @property
    def ratio(self) -> float:
        """The difference in units of the noise; infinite where either is not finite."""
        if not math.isfinite(self.difference + self.noise):
            return math.inf
        return max(self.difference, LEAST_NOISE) / max(self.noise, LEAST_NOISE)


@dataclass(frozen=True)
class Agreement:
    """Result of a comparison.

    Attributes:
        reason: why the curves do not agree; empty when they do.
        windows: in order.
        mean_ratio, worst_ratio: over the windows, difference over noise.
    """

    reason: str
    windows: tuple[Window, ...]
    mean_ratio: float
    worst_ratio: float

    @property
    def ok(self) -> bool:
        """True when the curves agree within noise."""
        return not self.reason


def compare(candidate: Sequence[float], references: Sequence[Sequence[float]]) -> Agreement:
    """Compare a loss curve with references that are right by definition, the first of them the baseline.

    Raises:
        ValueError: there are fewer than two references, or the curves differ in length or are empty.
    """
    if len(references) < 2:
        raise ValueError(f"noise takes at least 2 references, got {len(references)}")
    lengths = {len(curve) for curve in (candidate, *references)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"curves must have one length of at least 1, got {sorted(lengths)}")
    windows: list[Window] = []
    noise = 0.0
    for start in range(0, len(candidate), WINDOW):
        steps = slice(start, start + WINDOW)
        pieces = [curve[steps] for curve in references]
        noise = max(noise, *(_distance(a, b) for a, b in combinations(pieces, 2)))
        difference = _distance(candidate[steps], pieces[0])
        windows.append(Window(start + 1, start + len(pieces[0]), difference, noise))
    mean = mean_ratio(windows)
    worst = max(windows, key=lambda window: window.ratio)
    reasons = []
    if mean > MEAN_FACTOR:
        reasons.append(f"the curves differ by {mean:.2f} times the noise, allowed {MEAN_FACTOR:g}")
    if worst.ratio > WORST_FACTOR:
        difference_of = f"steps {worst.first} to {worst.last} differ by {worst.ratio:.2f}"
        reasons.append(f"{difference_of} times the noise, allowed {WORST_FACTOR:g}")
    for name, curves in (("the candidate", [candidate]), ("a reference", references)):
        if not all(math.isfinite(loss) for curve in curves for loss in curve):
            reasons = [f"a loss of {name} is not finite"]
    return Agreement("; ".join(reasons), tuple(windows), mean, worst.ratio)


def mean_ratio(windows: Sequence[Window]) -> float:
    """The geometric mean of the windows' ratios."""
    return math.exp(math.fsum(math.log(window.ratio) for window in windows) / len(windows))


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square of the difference."""
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))
