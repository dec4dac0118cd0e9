"""The README's table of results, from the committed JSON.

python -m benchmarks.report            # rewrites the part of README.md between its markers
python -m benchmarks.report --check    # answers 1 when that part is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_autotuner.codegen.files import write_atomic
from attention_autotuner.codegen.problem import Problem

from .cases import column_label, row_label
from .retention_tables import alone_table, decode_table, retention_tables, retnet_tables
from .rivals import DETERMINISTIC, PICK, STEP

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING = "No results are committed yet."


def attention_table(document: Mapping[str, Any], ours: str, contest: str | None) -> list[str]:
    """Markdown: one of ours in TFLOP/s and its speed over another's, by head dim and mask.

    Args:
        document: a result file.
        ours: the label of ours; rows without it have an empty cell.
        contest: whose ratio stands in brackets; None leaves the brackets out.
    """
    columns: dict[str, None] = {}
    cells: dict[str, dict[str, str]] = {}
    for row in document["rows"]:
        problem = Problem(**row["problem"])
        column = column_label(problem)
        columns.setdefault(column)
        cells.setdefault(row_label(problem), {})[column] = _cell(row, ours, contest)
    lines = [
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for label, found in cells.items():
        lines.append(f"| {label} | " + " | ".join(found.get(c, "") for c in columns) + " |")
    return lines


def _cell(row: Mapping[str, Any], ours: str, contest: str | None) -> str:
    figures = row["entries"].get(ours)
    if figures is None:
        return ""
    if "tflops" not in figures:
        return str(figures["outcome"]["kind"])
    text = f"{figures['tflops']:.0f}"
    if contest in row["ratios"]:
        ratio = row["ratios"][contest]["ratio"]
        text += f" (**{ratio:.2f}**)" if ratio < 1.0 else f" ({ratio:.2f})"
    return text


def _verdict(title: str, summary: Mapping[str, Any]) -> str:
    least = f"least {summary['min']:.3f} ({summary['min_at']})"
    return (
        f"Speed over {title}, {summary['problems']} problems: geometric mean "
        f"{summary['geometric_mean']:.3f}, {least}."
    )


def _verdicts(document: Mapping[str, Any]) -> list[str]:
    """A paragraph for each peer, and one for deterministic mode."""
    lines = []
    for peer, title in document["peers"].items():
        if peer in document["summary"]:
            lines += ["", _verdict(title, document["summary"][peer])]
    figures = document["summary"].get(DETERMINISTIC)
    if figures is not None:
        lines += [
            "",
            f"Deterministic mode takes {1 / figures['geometric_mean']:.3f} times as long as the pick, "
            f"{figures['problems']} problems' geometric mean, at most {1 / figures['min']:.3f} "
            f"({figures['min_at']}).",
        ]
    return lines


def _first(document: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of some contests that has figures."""
    return next((name for name in names if name in document["summary"]), None)


def _place(document: Mapping[str, Any]) -> str:
    """The environment, in one sentence."""
    found = document["environment"]
    parts = [f"driver {found['driver']}", f"CUDA {found['nvcc']}", f"torch {found['torch']}"]
    clocks = [row["clocks"]["sm_clock_mhz"] for row in document["rows"] if row.get("clocks")]
    known = [clock for clock in clocks if clock is not None]
    if known:
        parts.append(f"SM clock after each race {min(known):.0f} to {max(known):.0f} MHz")
    return f"{found['gpu_name']}, {', '.join(parts)}, {found['time_utc']}."


def _legend(subject: str, title: str) -> str:
    return (
        f"TFLOP/s of {subject}, fp16, 16k tokens, hidden size 2048, by head dim and sequence length; in brackets "
        f"its speed over {title}, bold where it is slower. All in one interleaved run with a cold L2."
    )


def forward_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of attention forward, as Markdown."""
    peers: Mapping[str, str] = document["peers"]
    return [
        f"### Attention forward on {document['environment']['gpu_name']}",
        "",
        _legend("the tuned pick", next(iter(peers.values()))),
        "",
        *attention_table(document, PICK, _first(document, list(peers))),
        *_verdicts(document),
        "",
        _place(document),
    ]


def backward_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of attention backward, as Markdown: the backward pass alone, then whole steps."""
    peers: Mapping[str, str] = document["peers"]
    lines = [f"### Attention backward on {document['environment']['gpu_name']}"]
    for subject, ours in (("the tuned pick", PICK), ("forward and backward, both tuned", STEP)):
        names = [name for name in peers if document["contests"][name][0] == ours]
        contest = _first(document, names)
        if contest is not None:
            table = attention_table(document, ours, contest)
            lines += ["", _legend(subject, peers[contest]), "", *table]
    return [*lines, *_verdicts(document), "", _place(document)]


def retnet_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of retention with an explicit mask, as Markdown."""
    return [*retnet_tables(document), *_verdicts(document), "", _place(document)]


def retention_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of retention with decay, as Markdown."""
    return [*retention_tables(document), *_verdicts(document), "", _place(document)]


def decode_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of decoding, as Markdown."""
    return [*decode_table(document), "", _place(document)]


SECTIONS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "attention_forward": forward_section,
    "attention_backward": backward_section,
    "retnet": retnet_section,
    "retention": retention_section,
    "peers_retention": alone_table,
    "decode": decode_section,
}
"""Benchmark -> its part of the README. A result file of any other benchmark is not reported there."""


def results_text(root: Path) -> str:
    """What stands between the markers, for all result files under a folder ``<gpu>/<benchmark>.json``."""
    parts = [
        "\n".join(section(json.loads(path.read_text(encoding="utf-8"))))
        for benchmark, section in SECTIONS.items()
        for path in sorted(root.glob(f"*/{benchmark}.json"))
    ]
    return "\n\n".join(parts) or NOTHING


def replace_between_markers(text: str, inner: str) -> str:
    """The text with what stands between its markers replaced.

    Raises:
        ValueError: it does not hold each marker once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must hold {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{inner}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    options = parser.parse_args(arguments)
    text = options.readme.read_text(encoding="utf-8")
    wanted = replace_between_markers(text, results_text(options.results))
    if wanted == text:
        return 0
    if options.check:
        print(f"{options.readme} is out of date: run python -m benchmarks.report")
        return 1
    write_atomic(options.readme, wanted)
    print(f"rewrote {options.readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
