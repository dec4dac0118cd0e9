"""What the cost model had said beside what was measured: exhaustive sweeps, and the records that ship."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from statistics import median
from typing import Any

from attention_autotuner.core.problem import Problem

from .drawing import FAINT, INK, MARKERS, SERIES, SMALL, canvas, svg_of

BAND = 1.25  # either way around equality, shaded


@dataclass(frozen=True, kw_only=True)
class Guess:
    """One kernel on one problem.

    Attributes:
        group: what it is drawn with.
        predicted_us, measured_us: microseconds.
    """

    group: str
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """Logarithm of predicted over measured."""
        return log(self.predicted_us / self.measured_us)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How far a group's guesses are off.

    Attributes:
        group: the group.
        kernels: how many.
        bias: predicted over measured, the median.
        typical: factor that half of the guesses are within, either way.
        correlation: of the ranks of predicted and measured times.
    """

    group: str
    kernels: int
    bias: float
    typical: float
    correlation: float


def of_sweeps(document: Mapping[str, Any]) -> list[Guess]:
    """Every timed candidate of exhaustive sweeps, with the estimate after its registers were known."""
    found = []
    for each in document["problems"]:
        problem = Problem(**each["problem"])
        group = problem.describe().replace("attention forward fp16 ", "")
        for one in each["candidates"]:
            predicted = one.get("refined_us") or one.get("estimate_us")
            found += _guess(group, predicted, one.get("median_us"))
    return found


def of_records(records: Sequence[Mapping[str, Any]]) -> list[Guess]:
    """Every timed entry of tuning records that carries an estimate."""
    found = []
    for record in records:
        problem = record["problem"]
        for entry in record["entries"]:
            measured = (entry.get("measurement") or {}).get("median_us")
            group = f"{problem['op']} {problem['direction']}"
            found += _guess(group, entry.get("estimate_us"), measured)
    return found


def _guess(group: str, predicted: float | None, measured: float | None) -> list[Guess]:
    if not predicted or not measured or not isfinite(measured) or not isfinite(predicted):
        return []
    return [Guess(group=group, predicted_us=predicted, measured_us=measured)]


def fits(guesses: Sequence[Guess]) -> list[Fit]:
    """The errors of each group, and of all together."""
    groups = list(dict.fromkeys(guess.group for guess in guesses))
    found = [_fit(group, [g for g in guesses if g.group == group]) for group in groups]
    return [*found, _fit("all", guesses)] if len(groups) > 1 else found


def _fit(group: str, guesses: Sequence[Guess]) -> Fit:
    errors = [guess.error for guess in guesses]
    return Fit(
        group=group,
        kernels=len(guesses),
        bias=exp(median(errors)),
        typical=exp(median(abs(error) for error in errors)),
        correlation=_rank_correlation(guesses),
    )


def _rank_correlation(guesses: Sequence[Guess]) -> float:
    if len(guesses) < 2:
        return float("nan")
    predicted = _ranks([guess.predicted_us for guess in guesses])
    measured = _ranks([guess.measured_us for guess in guesses])
    middle = (len(guesses) - 1) / 2.0
    together = sum((a - middle) * (b - middle) for a, b in zip(predicted, measured, strict=True))
    spread = sum((a - middle) ** 2 for a in predicted) * sum((b - middle) ** 2 for b in measured)
    return float(together / spread**0.5) if spread else float("nan")


def _ranks(values: Sequence[float]) -> list[float]:
    """The place of each value; equal ones share the mean of theirs."""
    order = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(order)))}
    last = {value: index for index, value in enumerate(order)}
    return [(first[value] + last[value]) / 2.0 for value in values]


def scatter(panels: Mapping[str, Sequence[Guess]], name: str, title: str) -> str | None:
    """Predicted over measured times, a panel for each source; None where no source has any.

    Args:
        panels: title -> guesses.
        name: of the figure.
        title: for a reader who does not see it.
    """
    kept = {head: guesses for head, guesses in panels.items() if guesses}
    if not kept:
        return None
    with canvas(4.6 * len(kept), 5.2) as figure:
        axes = figure.subplots(1, len(kept), squeeze=False)[0]
        for axis, (head, guesses) in zip(axes, kept.items(), strict=True):
            _draw(axis, head, guesses)
        return svg_of(figure, name, title)


def _draw(axis: Any, head: str, guesses: Sequence[Guess]) -> None:
    times = [time for guess in guesses for time in (guess.predicted_us, guess.measured_us)]
    low, high = min(times) / 1.15, max(times) * 1.15
    axis.fill_between(
        [low, high], [low / BAND, high / BAND], [low * BAND, high * BAND], color=FAINT, alpha=0.25
    )
    axis.plot([low, high], [low, high], color=INK, linewidth=1.0)
    for index, group in enumerate(dict.fromkeys(guess.group for guess in guesses)):
        mine = [guess for guess in guesses if guess.group == group]
        axis.plot(
            [guess.measured_us for guess in mine],
            [guess.predicted_us for guess in mine],
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            markersize=4.5,
            color=SERIES[index % len(SERIES)],
            alpha=0.75,
            markeredgewidth=0,
            label=group,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_aspect("equal")
    _ticks(axis, low, high)
    axis.set_xlabel("measured, µs")
    axis.set_ylabel("predicted, µs")
    axis.set_title(head, loc="left")
    axis.grid(visible=True)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=1, fontsize=SMALL)


def _ticks(axis: Any, low: float, high: float) -> None:
    """1, 2, 5 of every power of ten in range, written out."""
    places = [m * 10**e for e in range(-1, 7) for m in (1, 2, 5)]
    places = [place for place in places if low <= place <= high]
    if len(places) > 6:
        places = [place for place in places if str(f"{place:g}").startswith("1")]
    for each in (axis.xaxis, axis.yaxis):
        each.set_ticks(places, labels=[f"{place:g}" for place in places])
        each.set_ticks([], minor=True)
