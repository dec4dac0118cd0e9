"""Committed result files, for tests that hold figures of pages to them."""

from __future__ import annotations

import json
from typing import Any

from tests.snippets.pages import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results" / "nvidia-h200"


def result(name: str) -> Any:
    """A result file of the H200."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def summary(benchmark: str, baseline: str, mode: str) -> tuple[float, float]:
    """Geometric mean and least of our speed over a baseline's, in one mode (forward, backward, step)."""
    figures = result(benchmark)["summary"]
    names = (f"{baseline} {mode}", f"{baseline}_{mode}", baseline)
    name = next(name for name in names if name in figures)
    return figures[name]["geometric_mean"], figures[name]["min"]
