"""Check the budgets of the style guide: lines of a source file, and bytes of all data that is not packed."""

from __future__ import annotations

import sys
from pathlib import Path

from tracked import ROOT, files

BUDGETS = dict.fromkeys((".py", ".h", ".cuh", ".hpp", ".cu", ".cpp"), 400) | {".jinja": 120}
TEST_BUDGET = 500  # a test file is a list of cases, read one at a time
DATA = (".json", ".jsonl", ".svg", ".html", ".csv")
DATA_BUDGET = 1_000_000  # bytes, of all together


def over_budget(paths: list[Path]) -> list[str]:
    """One message per file that is too long."""
    messages = []
    for path in paths:
        budget = BUDGETS.get(path.suffix)
        if budget is None:
            continue
        if path.is_relative_to(ROOT / "tests"):
            budget = TEST_BUDGET
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > budget:
            messages.append(f"{path.relative_to(ROOT)}: {lines} lines, the budget is {budget}")
    return messages


def too_much_data(paths: list[Path]) -> list[str]:
    """A message where all data files together are too large."""
    size = sum(path.stat().st_size for path in paths if path.suffix in DATA)
    return (
        [f"{size} bytes of data files, the budget is {DATA_BUDGET}"] if size > DATA_BUDGET else []
    )


def main() -> int:
    """Check; answers 1 when something is over its budget."""
    messages = [*over_budget(files()), *too_much_data(files())]
    for message in messages:
        print(message)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
