"""The README's tables of retention: what has no time says why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.cases import GRIDS
from benchmarks.retention_tables import NOT_TIMED, contest_table, reasons


def document(entry: dict[str, Any]) -> dict[str, Any]:
    row = {
        "problem": asdict(GRIDS["retnet"].problems[0]),
        "entries": {"pick": entry, "peer": {"median_us": 5.0}},
        "ratios": {},
    }
    return {"peers": {"peer": "a peer"}, "contests": {"peer": ["pick", "peer"]}, "rows": [row]}


def test_what_has_no_time_is_not_timed_and_the_reason_stands_below() -> None:
    found = document({"outcome": {"kind": "wrong", "reason": "dk is off by 2"}})
    assert f"| {NOT_TIMED} | 5 |" in contest_table(found, "peer")[-1]
    (line,) = [line for line in reasons(found) if line.startswith("- ")]
    assert "ours" in line
    assert "wrong: dk is off by 2" in line


def test_where_all_have_times_there_is_no_reason() -> None:
    found = document({"median_us": 4.0})
    assert NOT_TIMED not in contest_table(found, "peer")[-1]
    assert reasons(found) == []
