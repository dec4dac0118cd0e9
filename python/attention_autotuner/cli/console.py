"""Output for people: tables, lines and progress, fitted to a terminal's width and plain elsewhere."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import isfinite
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from ..settings import current
from ..tuning.printing import Display, LinePrinter, describe, shown_by
from ..tuning.progress import Listener
from .names import short_names

ROOMY = 120  # columns of a terminal from which on tables show the columns that can be spared
PLAIN_WIDTH = 10_000  # where there is no terminal, nothing is cut: it can be searched
MIN_TEXT = 12  # columns that a cell of text keeps, however narrow the terminal
BAR = 16  # columns of a progress bar

FULL: ContextVar[bool] = ContextVar("full", default=False)


# Shows a step of progress: phase, steps done, steps in all, a message, and by name best_us and seconds_left.
Show = Callable[..., None]


@contextmanager
def full_tables(full: bool) -> Iterator[None]:
    """Inside the block, tables have every column, full names and no line breaks, if asked for."""
    token = FULL.set(full)
    try:
        yield
    finally:
        FULL.reset(token)


def print_json(value: object) -> None:
    """Print a value as JSON; what is not finite must have been made null before."""
    print(json.dumps(value, indent=1, allow_nan=False))


def microseconds(value: float | None) -> str:
    """A time for a table; a dash for none."""
    return "-" if value is None or not isfinite(value) else f"{value:,.1f}"


def cell(value: object, form: str = "") -> str:
    """A value for a table; a dash for none."""
    return "-" if value is None else format(value, form)


def ratio(middle: float | None, high: float | None) -> str:
    """A ratio to the best for a table, with half the width of the interval that ends at ``high``; a dash for none."""
    if middle is None or not isfinite(middle):
        return "-"
    return f"{middle:.3f}" if high is None else f"{middle:.3f} ±{high - middle:.3f}"


def named(text: str) -> str:
    """A text with its candidates by short names; as it is under ``--full``."""
    return text if FULL.get() else short_names(text)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    spare: Collection[str] = (),
    rare: Collection[str] = (),
    notes: Sequence[tuple[str, str]] = (),
) -> None:
    """Print a table on stdout; columns whose every cell is a number are right-aligned.

    Args:
        title: the line before it.
        columns: headings.
        rows: cells.
        spare: headings of columns that are left out where there is little room.
        rare: headings of columns that ``--full`` alone shows.
        notes: lines under it, each behind the row that it is about; rows with the same text share a line.
    """
    console, full = stdout_console(), FULL.get()
    print_line(title)
    if rows:
        roomy = console.is_terminal and console.width >= ROOMY
        hidden = () if full else (*rare, *(() if roomy else spare))
        kept = [i for i, column in enumerate(columns) if column not in hidden]
        headings = [columns[i] for i in kept]
        cells = [[row[i] for i in kept] for row in rows]
        table = Table(
            box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII,
            show_edge=not console.is_terminal,
            padding=(0, 0 if console.is_terminal else 1),
        )
        if console.is_terminal and not full:
            headings = [
                "\n".join(wrapped(heading, max(map(len, (*heading.split(), *column)))))
                for heading, column in zip(headings, zip(*cells, strict=True), strict=True)
            ]
            cells = _fitted(headings, cells, console.width)
        for heading, column in zip(headings, zip(*cells, strict=True), strict=True):
            numbers = all(_is_number(cell) for cell in column)
            table.add_column(Text(heading), justify="right" if numbers else "left", no_wrap=True)
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)
    places: dict[str, list[str]] = {}
    for place, note in notes:
        places.setdefault(note, []).append(place)
    for note, about in places.items():
        print_line(f"  {', '.join(about)}: {note}")


def _fitted(
    headings: Sequence[str], cells: list[list[str]], width: int, gap: int = 1
) -> list[list[str]]:
    """Cells with line breaks, so that their table is at most so wide; the columns with most text give way first."""
    least = [max(map(len, heading.split("\n"))) for heading in headings]
    columns = [list(column) for column in zip(*cells, strict=True)]
    widths = [max(low, *map(len, column)) for low, column in zip(least, columns, strict=True)]
    while sum(widths) + gap * (len(widths) - 1) > width:
        widest = max(range(len(widths)), key=lambda i: widths[i] - max(MIN_TEXT, least[i]))
        if widths[widest] <= max(MIN_TEXT, least[widest]):
            break  # too narrow a terminal for this many columns
        widths[widest] -= 1
    return [
        [
            "\n".join(wrapped(cell, size, whole=False))
            for cell, size in zip(row, widths, strict=True)
        ]
        for row in cells
    ]


def wrapped(text: str, width: int, *, whole: bool = True) -> list[str]:
    """A text as lines that break between words.

    Args:
        text: one line.
        width: of a line, where the words allow it.
        whole: whether names and paths longer than a line stay whole; otherwise they break behind ``_`` and ``/``.
    """
    lines = [""]
    for word in text.split():
        long = not whole and len(word) > width
        pieces = re.findall(r"[^_/]*[_/]+|[^_/]+", word) if long else [word]
        for index, piece in enumerate(pieces):
            gap = " " if index == 0 and lines[-1].strip() else ""
            if lines[-1] and len(lines[-1]) + len(gap) + len(piece) > width:
                lines.append(piece)
            else:
                lines[-1] += gap + piece
    return lines


def print_line(text: str = "") -> None:
    """Print a line on stdout, on a terminal wrapped between words."""
    console = stdout_console()
    if len(text) <= console.width:
        print(text, flush=True)  # work of minutes may follow, and a pipe would hold the line back
        return
    indent = " " * (len(text) - len(text.lstrip()))
    first, *others = wrapped(text, console.width - len(indent) - 2)
    print(indent + first)
    for line in others:
        print(f"{indent}  {line}")


def stdout_console() -> Console:
    """A console on the present stdout."""
    console = Console(file=sys.stdout, highlight=False)
    if FULL.get() or not console.is_terminal:
        return Console(file=sys.stdout, highlight=False, width=PLAIN_WIDTH, height=1)
    return console


def is_narrow() -> bool:
    """True on a terminal without room for the columns that tables can spare, unless ``--full`` asks for all."""
    return stdout_console().width < ROOMY


def _is_number(cell: str) -> bool:
    return cell in ("-", "") or re.sub("[,.]| ±", "", cell).rstrip("%x").isdigit()


@contextmanager
def search_progress(arguments: argparse.Namespace) -> Iterator[Listener]:
    """A listener that shows a search by :func:`progress`; silent where the setting ``PRINT`` has the search print."""
    with progress(quiet=arguments.json or current().print_tuning) as show:
        yield shown_by(show)


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Show]:
    """Show progress on stderr while the block runs: a bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda *_, **__: None
    elif console.is_terminal:
        fixed = Column(no_wrap=True)
        with Progress(
            TextColumn("{task.description:8}", table_column=fixed),
            BarColumn(bar_width=BAR, table_column=fixed),
            TextColumn("{task.completed}/{task.total}", table_column=fixed),
            TimeElapsedColumn(table_column=fixed),
            TextColumn("{task.fields[note]}", table_column=fixed, markup=False),
            console=console,
            transient=True,
        ) as bars:
            yield _Bars(bars).show
    else:
        yield LinePrinter().show


def cut(text: str, width: int) -> str:
    """A text without its middle, where it is longer than a width."""
    if len(text) <= width:
        return text
    head = max(0, width - 1) // 2
    return text[:head] + "…" + text[len(text) - max(0, width - 1 - head) :]


class _Bars(Display):
    def __init__(self, bars: Progress) -> None:
        super().__init__()
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def update(
        self, phase: str, done: int, total: int, message: str, seconds_left: float | None
    ) -> None:
        count, facts = f"{total}/{total}", describe("", self.best_us, seconds_left)
        # Phase, bar, count and elapsed time, each with a space behind it, come first; the message gets the rest.
        taken = max(8, len(phase)) + BAR + len(count) + len("0:00:00") + 4 + len(facts) + 2
        message = cut(named(message), self._bars.console.width - taken)
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total, note="")
        note = ", ".join(filter(None, (message, facts)))
        self._bars.update(self._tasks[phase], completed=done, total=total, note=note)
