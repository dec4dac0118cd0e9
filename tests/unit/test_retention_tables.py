"""The README's tables of retention: what has no time says why, and a peer timed alone has a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.cases import GRIDS
from benchmarks.retention_tables import NOT_TIMED, alone_table, contest_table, reasons


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


def test_a_peer_alone_has_a_row_for_each_shape() -> None:
    row = {
        "shape": [8, 32, 2048, 64, 64],
        "forward": {"median_us": 159.0},
        "step": {"median_us": 584.8},
    }
    text = alone_table({"gpu": "NVIDIA H200", "torch": "2.11.0", "fla": [row]})
    assert text[-1] == "| 8, 32, 2048, 64/64 | 159 | 585 |"
    assert "NVIDIA H200" in text[0]
