"""What is said of predicted picks: a line for a file, and the tables of docs/cost_model.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean
from typing import Any

from attention_autotuner.core.problem import Direction, Op

from .evidence import LOGS, MARGIN, SAMPLES, Trial
from .prediction import POLICIES, verdict_of

BEGIN, END = "<!-- predicted picks: begin -->", "<!-- predicted picks: end -->"
KINDS: tuple[tuple[Op, Direction], ...] = (
    ("attention", "forward"),
    ("attention", "backward"),
    ("retnet", "forward"),
    ("retnet", "backward"),
    ("retention", "forward"),
    ("retention", "backward"),
)
SOURCES = {LOGS: "recorded searches", SAMPLES: "exhaustive, H200"}


def summary(document: dict[str, Any]) -> str:
    """One line of what a file holds."""
    groups = document["groups"]
    rows = [row for group in groups for row in group["picks"]]
    place = document["columns"].index("kernel")
    counts = Counter("default" if row[place] is None else "model" for row in rows)
    kernels = sum(len(group["kernels"]) for group in groups)
    return (
        f"{len(rows)} shapes in {len(groups)} classes, {counts['model']} by {kernels} kernels of the "
        f"model, {counts['default']} by defaults"
    )


def page(text: str, trials: Sequence[Trial]) -> str:
    """The page with its tables written anew.

    Raises:
        ValueError: the page has not the two marks, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must have {BEGIN!r} and, after it, {END!r}")
    return f"{before}{BEGIN}\n\n{tables(trials)}\n{END}{after}"


def tables(trials: Sequence[Trial]) -> str:
    """Three tables: each measured problem, each policy's verdicts, and what a predicted gain is worth."""
    return "\n".join((_measured(trials), _verdicts(trials), _gains(trials)))


def _measured(trials: Sequence[Trial]) -> str:
    rows = [
        f"| {SOURCES[trial.source]} | {trial.policy} | {trial.problem.describe()} "
        f"| {trial.predicted_gain:.3f} | {trial.own:.3f} | {trial.default:.3f} | {trial.served:.3f} |"
        for trial in trials
        if trial.source in SOURCES
    ]
    head = (
        "| measured | policy | problem | predicted gain | model's first | default | served |\n"
        "|---|---|---|---|---|---|---|"
    )
    return "\n".join((head, *rows, ""))


def _verdicts(trials: Sequence[Trial]) -> str:
    rows = []
    for op, direction in KINDS:
        for policy in POLICIES:
            found = verdict_of(POLICIES[policy](), op, direction, trials)
            if not found.trials:
                rows.append(f"| {op} {direction} | {policy} | none | | | | default |")
                continue
            source = "of the H200" if found.borrowed else "own"
            rows.append(
                f"| {op} {direction} | {policy} | {len(found.trials)}, {source} | {found.own:.3f} "
                f"| {found.default:.3f} | {found.served:.3f} "
                f"| {'model' if found.trusted else 'default'} |"
            )
    head = (
        "| operation | policy | trials | model's first | default | served | who chooses |\n"
        "|---|---|---|---|---|---|---|"
    )
    return "\n".join((head, *rows, ""))


def _gains(trials: Sequence[Trial]) -> str:
    """Trials by predicted gain: how often the model's own choice was faster than the default."""
    rows = []
    limits = (1.0, 1.0 + MARGIN, 1.1, float("inf"))
    for low, high in pairwise(limits):
        inside = [t for t in trials if low <= t.predicted_gain < high and t.predicted_gain > 1.0]
        if not inside:
            continue
        faster = sum(t.own < t.default for t in inside)
        gain = exp(fmean(log(t.default / t.own) for t in inside))
        name = f"{low - 1:.0%} to {high - 1:.0%}" if high < 9 else f"{low - 1:.0%} and more"
        rows.append(f"| {name} | {len(inside)} | {faster} | {gain:.3f} |")
    error = sqrt(fmean(log(t.predicted_gain * t.own / t.default) ** 2 for t in trials))
    head = (
        "| predicted gain | trials | the model's choice was faster in | measured gain, geometric mean |\n"
        "|---|---|---|---|"
    )
    last = f"Root mean square of the error of a predicted gain, all trials: {exp(error) - 1:.1%}."
    return "\n".join((head, *rows, "", last, ""))
