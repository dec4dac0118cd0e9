"""What people see: tables and progress, in colour on a terminal and plain elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..tuning.printing import LinePrinter, Pace, describe

PLAIN_WIDTH = (
    10_000  # columns where there is no terminal: nothing is cut, so that it can be searched
)


class Show(Protocol):
    """Shows one step of progress."""

    def __call__(
        self,
        phase: str,
        done: int,
        total: int,
        message: str = "",
        *,
        best_us: float | None = None,
        seconds_left: float | None = None,
    ) -> None:
        """Say that ``done`` of ``total`` steps of a phase are behind."""


def print_json(value: object) -> None:
    """Print a value as JSON; what is not finite must have been made null before."""
    print(json.dumps(value, indent=1, allow_nan=False))


def finite(value: float | None) -> float | None:
    """A number for JSON: None for infinities."""
    return value if value is not None and isfinite(value) else None


def microseconds(value: float | None) -> str:
    """A time for a table; a dash for none."""
    return "-" if value is None or not isfinite(value) else f"{value:,.1f}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; columns whose every cell is a number are right-aligned."""
    console = stdout_console()
    table = Table(box=box.SIMPLE if console.is_terminal else box.ASCII)
    for index, column in enumerate(columns):
        right = bool(rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    print(title)
    if rows:
        console.print(table)


def print_line(text: str = "") -> None:
    """Print a line on stdout, as it is."""
    print(text)


def stdout_console() -> Console:
    """A console on the present stdout."""
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=PLAIN_WIDTH)
    return console


def _is_number(cell: str) -> bool:
    return cell in ("-", "") or cell.replace(",", "").replace(".", "").rstrip("%x").isdigit()


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Show]:
    """Show progress on stderr while the block runs: a bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield _ignore
    elif console.is_terminal:
        with Progress(
            TextColumn("{task.description:8}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        ) as bars:
            yield _Bars(bars).show
    else:
        yield LinePrinter().show


def _ignore(phase: str, done: int, total: int, message: str = "", **_: Any) -> None:
    """Show nothing."""


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._pace = Pace()
        self._tasks: dict[str, Any] = {}
        self._best_us: float | None = None

    def show(
        self,
        phase: str,
        done: int,
        total: int,
        message: str = "",
        *,
        best_us: float | None = None,
        seconds_left: float | None = None,
    ) -> None:
        self._best_us = best_us if best_us is not None else self._best_us
        pace = self._pace.seconds_left(phase, done, total)
        note = describe(message, self._best_us, pace if seconds_left is None else seconds_left)
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total, note="")
        self._bars.update(self._tasks[phase], completed=done, total=total, note=note)
