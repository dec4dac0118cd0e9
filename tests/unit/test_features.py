"""The table of features, ``tests/data/features.csv``: what tuners of kernels offer, and the tests that show it here.

Rows come from what NATTEN's tuner (N), CuTe DSL's guide to tuning (C), the first README of this project (R), Triton's
autotune (T) and Triton-distributed's tuners (D) offer or name as limits, and from what none of them has (E). A row is
``done``, or ``struck`` for a reason; a reason beside ``done`` says which part of it is struck.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

COUNTS = {"N": 26, "C": 26, "R": 32, "T": 29, "D": 26, "E": 10}
ROOT = Path(__file__).parents[2]


def rows() -> list[dict[str, str]]:
    with (ROOT / "tests" / "data" / "features.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


@cache
def functions(file: str) -> set[str]:
    """The names of a module's functions."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def mistakes(row: dict[str, str]) -> Iterator[str]:
    """The ways in which a row does not hold."""
    if not row["feature"] or row["state"] not in ("done", "struck"):
        yield "it is neither done nor struck"
    if row["state"] == "struck" and not row["reason"]:
        yield "it is struck for no reason"
    if not row["page"].endswith((".md", ".rst")) or not (ROOT / row["page"]).is_file():
        yield f"there is no page {row['page']!r}"
    if not row["shown_by"]:
        yield "nothing shows it"
    for place in row["shown_by"].split():
        file, _, function = place.partition("::")
        if not (ROOT / file).is_file():
            yield f"there is no {file}"
        elif file.startswith("tests/"):
            if not function.startswith("test_") or function not in functions(file):
                yield f"there is no {place}"
        elif not file.startswith("benchmarks/results/"):
            yield f"{place} is neither a test nor a result"


def test_every_row_is_there_and_holds() -> None:
    listed = rows()
    expected = [f"{group}{n}" for group, count in COUNTS.items() for n in range(1, count + 1)]
    assert [row["id"] for row in listed] == expected
    assert [f"{row['id']}: {mistake}" for row in listed for mistake in mistakes(row)] == []


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ({"state": "later"}, "neither done nor struck"),
        ({"state": "struck", "reason": ""}, "struck for no reason"),
        ({"page": "docs/none.md"}, "there is no page"),
        ({"shown_by": ""}, "nothing shows it"),
        ({"shown_by": "tests/unit/test_none.py::test_a"}, "there is no tests/unit/test_none.py"),
        ({"shown_by": "tests/unit/test_features.py::rows"}, "there is no tests/unit/test_fea"),
        ({"shown_by": "README.md"}, "neither a test nor a result"),
    ],
)
def test_a_row_that_does_not_hold_is_named(change: dict[str, str], mistake: str) -> None:
    (said,) = mistakes(rows()[0] | change)
    assert mistake in said
