"""The table of settings, as the page of settings shows it."""

from __future__ import annotations

from attention_autotuner.settings import TABLE


def markdown_table() -> str:
    lines = ["| Variable | Values | Default | Meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.allowed} | {row.default} | {row.meaning} |" for row in TABLE]
    return "\n".join(lines) + "\n"
