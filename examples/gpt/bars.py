"""Bars for training with our attention: its distance from SDPA's losses, and the time of its steps.

The distance is in units of that between two references: two backends of SDPA, say. Windows and their root mean squares
are those of :mod:`.agreement`, but each window has its own unit, which no earlier one makes larger.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .agreement import LEAST_NOISE, WINDOW, Window, compare, mean_ratio

GAP_BAR = 1.5
"""How far from the first reference our losses may be, in units of the references' own distance."""
TIME_BAR = 1.0
"""The most time of a step, over that with the fastest reference."""


def bars_of(
    trainings: Mapping[int, Mapping[str, Mapping[str, Any]]], ours: str, references: Sequence[str]
) -> dict[str, Any]:
    """Measure the trainings of some seeds by the bars.

    Args:
        trainings: seed -> name -> what :meth:`.training.Trainee.report` gives.
        ours: the name of our run.
        references: the names of at least two others, the one that losses are compared with first.

    Returns:
        The bars, and the figures of each seed (``seeds``) and of ``all``, see :func:`figures_of`.
    """
    windows: list[Window] = []
    seeds = []
    for seed, runs in trainings.items():
        losses = {name: runs[name]["losses"] for name in (ours, *references)}
        of_seed = windows_of(losses[ours], [losses[name] for name in references])
        windows += of_seed
        step_ms = {name: runs[name]["step_ms"] for name in losses}
        seeds.append({"seed": seed, **figures_of(of_seed, step_ms, ours)})
    means = {
        name: statistics.fmean(runs[name]["step_ms"] for runs in trainings.values())
        for name in (ours, *references)
    }
    return {
        "gap_bar": GAP_BAR,
        "time_bar": TIME_BAR,
        "least_noise": LEAST_NOISE,
        "seeds": seeds,
        "all": figures_of(windows, means, ours),
    }


def windows_of(candidate: Sequence[float], references: Sequence[Sequence[float]]) -> list[Window]:
    """The windows of a comparison, each with the references' distance in itself as its noise."""
    pieces = [slice(start, start + WINDOW) for start in range(0, len(candidate), WINDOW)]
    return [
        compare(candidate[steps], [curve[steps] for curve in references]).windows[0]
        for steps in pieces
    ]


def figures_of(
    windows: Sequence[Window], step_ms: Mapping[str, float], ours: str
) -> dict[str, Any]:
    """The figures of one seed, or of all.

    Args:
        windows: of the seed, or of all.
        step_ms: name -> median time of a step, milliseconds; of all seeds their mean.
        ours: the name of our run.

    Returns:
        ``gap``, our distance from the first reference over that of the references, geometric mean of the windows;
        ``worst_gap``, the largest in any window; ``small_windows``, those where a distance was below
        :data:`.agreement.LEAST_NOISE` and counted as that; ``step_ms``; ``fastest``, the reference whose steps are
        shortest; ``time``, our step over that one's; ``gap_ok`` and ``time_ok``, whether these meet the bars.
    """
    others = {name: time for name, time in step_ms.items() if name != ours}
    fastest = min(others, key=lambda name: others[name])
    gap, time = mean_ratio(windows), step_ms[ours] / others[fastest]
    return {
        "gap": gap,
        "worst_gap": max(window.ratio for window in windows),
        "small_windows": sum(min(w.difference, w.noise) < LEAST_NOISE for w in windows),
        "step_ms": dict(step_ms),
        "fastest": fastest,
        "time": time,
        "gap_ok": gap <= GAP_BAR,
        "time_ok": time <= TIME_BAR,
    }
