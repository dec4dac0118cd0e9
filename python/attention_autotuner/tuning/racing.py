"""Which of several timed entries is fastest, decided on paired rounds: arithmetic only, no clock, no GPU.

In each round every entry still in the race is timed once, so that two times of one round share clocks and temperature;
entries are compared by the logarithms of such pairs. The order is random in every other round, and in the next one its
reverse, as an entry's clocks hang on what ran just before it: of any two each comes first as often as the other.

Clearly slower entries leave after a few rounds, and the rest of the budget goes to the close ones. What cannot be told
apart is a tie, broken by the order in which the entries were given: the default comes first, so nothing replaces it for
less than the noise.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import median

from ..core.outcome import Ok, Outcome

MAD_TO_SIGMA = 1.4826  # for a normal distribution
EARLY_ROUNDS = 2
EARLY_LOG_RATIO = log(1.3)  # this much slower in every pair: gone without statistics
MIN_ROUNDS = 4  # before statistics may drop anything
SETTLED_ROUNDS = 10  # before statistics may end a race
PRECISION = 0.002  # standard error of the ratios of a race that is settled
DROP_CONFIDENCE = 4.0  # standard errors; many looks are taken, so more than for the last one
TIE_CONFIDENCE = 3.0
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean, normal distribution
NOISE_FLOOR = 0.002  # sigma of a log ratio that is assumed even when a few samples agree better
# Nearer than this is a tie whatever the statistics say: one kernel on buffers at other addresses differs from itself by
# 0.3 % on an H200, round after round.
TIE_LOG_RATIO = log(1.005)


# Of a timing, that are recorded.
FIGURES = ("median_us", "spread_us", "samples", "ratio_to_best", "ratio_low", "ratio_high")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The result of a race for one entry.

    Attributes:
        name: the entry's.
        outcome: Ok, or why it could not be timed.
        median_us: median of its own times, microseconds; infinite without samples.
        spread_us: half the distance between the quartiles, microseconds.
        samples: how many rounds it was timed in.
        ratio_to_best: its time over the best one's, from paired rounds; 1.0 for the best.
        error: standard error of the logarithm of ``ratio_to_best``.
    """

    name: str
    outcome: Outcome
    median_us: float
    spread_us: float
    samples: int
    ratio_to_best: float
    error: float

    @property
    def _width(self) -> float:
        """Half the interval's width, of the logarithm; 0 of the best, which is compared with nothing."""
        return max(TIE_CONFIDENCE * self.error, TIE_LOG_RATIO) if self.error else 0.0

    @property
    def ratio_low(self) -> float:
        """The lower end of the interval that ``ratio_to_best`` is known to lie in."""
        return self.ratio_to_best * exp(-self._width)

    @property
    def ratio_high(self) -> float:
        """The upper end."""
        return self.ratio_to_best * exp(self._width)

    @property
    def tied(self) -> bool:
        """True where it cannot be told from the best one, as the interval includes 1."""
        return self.outcome.ok and self.ratio_to_best < inf and self.ratio_low <= 1.0


@dataclass
class History:
    """The memory of a race, which may go on from an earlier one's.

    Attributes:
        rounds: the times of every round, microseconds by name, in the order in which they were taken.
        failed: why an entry could not be timed, by name.
    """

    rounds: list[dict[str, float]] = field(default_factory=list)
    failed: dict[str, Outcome] = field(default_factory=dict)

    def add(self, times_us: dict[str, float]) -> None:
        """Remember a round."""
        self.rounds.append(times_us)

    def fail(self, name: str, outcome: Outcome) -> None:
        """Remember a failure."""
        self.failed[name] = outcome


class Race:
    """Rounds of paired timings and who is still in.

    Args:
        names: entries in tie-breaking order, the default first.
        keep: names that are never dropped (peers, the default), so that their ratios stay well known.
        seed: of the random order inside rounds.
        history: what is known already, and remembers what is added.

    Raises:
        ValueError: no names, or a name twice, or a kept name that does not run.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        keep: Collection[str] = (),
        seed: int = 0,
        history: History | None = None,
    ) -> None:
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a race needs distinct names, got {list(names)}")
        if not set(keep) <= set(names):
            raise ValueError(f"cannot keep {sorted(set(keep) - set(names))}: not in the race")
        self._names = list(names)
        self._keep = set(keep)
        self._random = random.Random(seed)
        self._order: list[str] = []  # of the last round, where the next is to be its reverse
        self._last_order: list[str] = []  # what that was before the last round
        self._history = History() if history is None else history
        self._rounds: list[dict[str, float]] = []
        self._beaten_by: dict[str, str] = {}  # those that left, and the fastest of that time
        self._failed = self._history.failed
        self._running = [name for name in names if name not in self._failed]
        for times in self._history.rounds:
            # The order of the names is the order in which they were timed.
            self._order = [] if self._order else list(times)
            self._count(times)

    @property
    def running(self) -> list[str]:
        """Names still timed, in tie-breaking order."""
        return list(self._running)

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return len(self._rounds)

    @property
    def balanced(self) -> bool:
        """True when every order so far has had its reverse: before that nothing is compared."""
        return not self._order

    def order(self) -> list[str]:
        """The names to time in the next round: in a fresh random order, or in the reverse of the last round's."""
        self._last_order = self._order
        if self._order:
            names = [name for name in reversed(self._order) if name in self._running]
            self._order = []
        else:
            names = list(self._running)
            self._random.shuffle(names)
            self._order = list(names)
        return names

    def void(self) -> None:
        """Go on as if the round that :meth:`order` was last asked for had not begun; nothing of it is known."""
        self._order = self._last_order

    def fail(self, name: str, outcome: Outcome) -> None:
        """Take an entry out because it could not be timed."""
        self._history.fail(name, outcome)
        self._running = [other for other in self._running if other != name]

    def add(self, times_us: dict[str, float]) -> list[str]:
        """Record one round, and where orders are balanced drop what is clearly slower.

        Args:
            times_us: microseconds of each entry timed in this round.

        Returns:
            The names dropped.

        Raises:
            ValueError: a time is not positive and finite.
        """
        for name, time in times_us.items():
            if not 0.0 < time < inf:
                raise ValueError(f"a time must be positive and finite, got {time} for {name}")
        self._history.add(dict(times_us))
        return self._count(times_us)

    def _count(self, times_us: dict[str, float]) -> list[str]:
        """Take a round into account; the names that it drops."""
        self._rounds.append(dict(times_us))
        best = self._best(self._running)
        if best is None or not self.balanced:
            return []
        others = [name for name in self._running if name != best and name not in self._keep]
        dropped = [name for name in others if self._clearly_slower(name, best)]
        self._beaten_by |= dict.fromkeys(dropped, best)
        self._running = [name for name in self._running if name not in dropped]
        return dropped

    def settled(self, *, min_rounds: int = SETTLED_ROUNDS) -> bool:
        """True when more rounds would change nothing: every ratio left is known to :data:`PRECISION`."""
        if not self._running:
            return True
        if len(self._rounds) < min_rounds or not self.balanced:
            return False
        best = self._best(self._running)
        others = [name for name in self._running if name != best]
        return best is not None and all(self._compare(n, best)[1] <= PRECISION for n in others)

    def results(self) -> list[Timing]:
        """All entries, fastest first; ties in the given order, entries without samples last."""
        timed = [name for name in self._names if self._times(name) and name not in self._failed]
        # One that left may look the fastest in its few rounds; it is not, unless what beat it has failed since.
        unbeaten = [name for name in timed if self._beaten_by.get(name) not in timed]
        best = self._best(unbeaten)

        def key(timing: Timing) -> tuple[bool, bool, float]:
            tied = timing.tied and timing.name in unbeaten
            return (not timing.outcome.ok, not tied, 1.0 if tied else timing.ratio_to_best)

        return sorted((self._timing(name, best) for name in self._names), key=key)

    def compare(self, name: str, other: str) -> tuple[float, float]:
        """The ratio of the times of two names, from the rounds they share.

        Returns:
            The ratio of their times (above 1: ``name`` is the slower), and the standard error of its logarithm; both
            infinite where they share no round.
        """
        middle, error = self._compare(name, other)
        return (exp(middle) if middle < inf else inf), error

    def _times(self, name: str) -> list[float]:
        return [times[name] for times in self._rounds if name in times]

    def _best(self, names: Sequence[str]) -> str | None:
        """The fastest by paired comparison: medians pick a pivot, pairs against it decide."""
        timed = [name for name in names if self._times(name)]
        if not timed:
            return None
        longest = max(len(self._times(name)) for name in timed)
        full = [name for name in timed if len(self._times(name)) == longest]
        pivot = min(full, key=lambda name: median(self._times(name)))
        return min(timed, key=lambda name: self._compare(name, pivot)[0])

    def _compare(self, name: str, other: str) -> tuple[float, float]:
        """Median log ratio of a name over another in the rounds they share, and its standard error."""
        if name == other:
            return 0.0, 0.0
        ratios = self._log_ratios(name, other)
        if not ratios:
            return inf, inf
        middle = median(ratios)
        deviation = MAD_TO_SIGMA * median(abs(ratio - middle) for ratio in ratios)
        # A deviation of few samples is often far too small: the second factor widens it as Student's t would.
        error = MEDIAN_ERROR * max(deviation, NOISE_FLOOR) / sqrt(len(ratios))
        return middle, error * (1.0 + 3.0 / len(ratios))

    def _log_ratios(self, name: str, other: str) -> list[float]:
        return [log(t[name] / t[other]) for t in self._rounds if name in t and other in t]

    def _clearly_slower(self, name: str, best: str) -> bool:
        ratios = self._log_ratios(name, best)
        if len(ratios) >= EARLY_ROUNDS and min(ratios) > EARLY_LOG_RATIO:
            return True
        if len(ratios) < MIN_ROUNDS:
            return False
        middle, error = self._compare(name, best)
        return middle > TIE_LOG_RATIO and middle - DROP_CONFIDENCE * error > 0.0

    def _timing(self, name: str, best: str | None) -> Timing:
        times = sorted(self._times(name))
        ratio, error = inf, inf
        if times and best is not None and name not in self._failed:
            ratio, error = self.compare(name, best)
        return Timing(
            name=name,
            outcome=self._failed.get(name, Ok()),
            median_us=median(times) if times else inf,
            spread_us=_half_quartile_range(times),
            samples=len(times),
            ratio_to_best=ratio,
            error=error,
        )


def _half_quartile_range(ordered: Sequence[float]) -> float:
    """Half the distance between the quartiles of sorted values; 0 for fewer than two."""
    if len(ordered) < 2:
        return 0.0
    low = ordered[(len(ordered) - 1) // 4]
    high = ordered[-1 - (len(ordered) - 1) // 4]
    return (high - low) / 2
