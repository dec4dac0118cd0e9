"""Tables of docs/benchmarks.md that are made of the registries: suites with their cases, and peers."""

from __future__ import annotations

from ..implementations import IMPLEMENTATIONS
from ..suites import SUITES, Case, Suite

CASES = ("<!-- cases:begin -->", "<!-- cases:end -->")
PEERS = ("<!-- peers:begin -->", "<!-- peers:end -->")
MANY = 11  # cases beyond which a suite is told by its first and last


def cases_text() -> str:
    """Markdown: every suite, its cases and where their numbers come from."""
    return "\n\n".join("\n".join(_suite(suite)) for suite in SUITES.values())


def _suite(suite: Suite) -> list[str]:
    lines = [f"**`{suite.name}`**: {suite.title}", "", "| case | problem | ways | source |"]
    lines.append("|---|---|---|---|")
    if len(suite.cases) > MANY:
        first, last = suite.cases[0], suite.cases[-1]
        words = f"{len(suite.cases)} cases, `{first.name}` to `{last.name}`"
        return [*lines, _row(words, f"{_shape(first)} to {_shape(last)}", first)]
    return [*lines, *(_row(f"`{case.name}`", _shape(case), case) for case in suite.cases)]


def _row(name: str, shape: str, case: Case) -> str:
    return f"| {name} | {shape} | {', '.join(case.ways)} | {case.source} |"


def _shape(case: Case) -> str:
    """A problem without what all of them have."""
    return case.shape.describe().replace(" forward fp16", "")


def peers_text() -> str:
    """Markdown: everyone we are compared with."""
    lines = ["| name | implementation | operation | backward is timed |", "|---|---|---|---|"]
    for each in IMPLEMENTATIONS.values():
        way = "below autograd where it can be" if each.fused is not None else "through autograd"
        lines.append(f"| `{each.name}` | {each.title} | {each.op} | {way} |")
    return "\n".join(lines)
