"""The README's tables of retention: a kernel without a time has a reason."""

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


def test_a_kernel_without_a_time_has_its_reason_below_the_table() -> None:
    results = document({"outcome": {"kind": "wrong", "reason": "dk is off by 2"}})
    assert f"| {NOT_TIMED} | 5 |" in contest_table(results, "peer")[-1]
    (line,) = [line for line in reasons(results) if line.startswith("- ")]
    assert "ours" in line
    assert "wrong: dk is off by 2" in line


def test_a_table_of_times_has_no_reasons() -> None:
    results = document({"median_us": 4.0})
    assert NOT_TIMED not in contest_table(results, "peer")[-1]
    assert reasons(results) == []
