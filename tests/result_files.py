"""Committed result files, for tests that hold figures of pages to them."""

from __future__ import annotations

import json
from typing import Any

from attention_autotuner.codegen.files import read_text
from tests.snippets.pages import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results" / "nvidia-h200"


def result(name: str) -> Any:
    """A result file of the H200, packed or not."""
    plain = RESULTS / f"{name}.json"
    return json.loads(read_text(plain if plain.exists() else plain.with_suffix(".json.xz")))


def summary(benchmark: str, baseline: str, mode: str) -> tuple[float, float]:
    """Geometric mean and least of our speed over a baseline's, in one mode (forward, backward, step)."""
    figures = result(benchmark)["summary"]
    names = (f"{baseline} {mode}", f"{baseline}_{mode}", baseline)
    name = next(name for name in names if name in figures)
    return figures[name]["geometric_mean"], figures[name]["min"]
