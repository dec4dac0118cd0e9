"""Progress and rankings as plain lines of text, for the ``PRINT`` setting and for programs without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path

from ..core.candidate import Candidate
from ..core.problem import Problem
from .progress import Event, Listener
from .result import Row

SECONDS_BETWEEN_LINES = 5.0  # inside one phase


class Pace:
    """Time left of a phase, from its pace since the first event of it."""

    def __init__(self) -> None:
        self._phase = ""
        self._first = 0
        self._started = 0.0

    def seconds_left(self, phase: str, done: int, total: int) -> float | None:
        """Seconds until ``total``; None until a step was seen to pass, and when all are done."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._first, self._started = phase, done, now
        if not self._first < done < total:
            return None
        return (now - self._started) / (done - self._first) * (total - done)


class Display:
    """A display of progress that remembers the best time so far and the pace of the phase."""

    def __init__(self) -> None:
        self._pace = Pace()
        self.best_us: float | None = None

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
        """Say that ``done`` of ``total`` steps of a phase are behind."""
        self.best_us = best_us if best_us is not None else self.best_us
        pace = self._pace.seconds_left(phase, done, total)
        self.update(phase, done, total, message, pace if seconds_left is None else seconds_left)

    def update(
        self, phase: str, done: int, total: int, message: str, seconds_left: float | None
    ) -> None:
        """Show a step, with the seconds left as far as they are known."""
        raise NotImplementedError


class LinePrinter(Display):
    """Prints progress on stderr: a line at the start and end of a phase, and now and then between."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = ""
        self._printed = 0.0

    def update(
        self, phase: str, done: int, total: int, message: str, seconds_left: float | None
    ) -> None:
        """Print a line, unless the last one of the same phase was just now."""
        now = time.monotonic()
        if phase == self._phase and done < total and now - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._phase, self._printed = phase, now
        note = describe(message, self.best_us, seconds_left)
        _print(f"{phase} {done}/{total}" + (f": {note}" if note else ""))

    def listen(self, event: Event) -> None:
        """:meth:`show` for the events of a search."""
        shown_by(self.show)(event)


def shown_by(show: Callable[..., None]) -> Listener:
    """A listener that shows the steps of a search by a function like :meth:`Display.show`."""

    def listen(event: Event) -> None:
        if event.kind == "step":
            step = (event.phase, event.done, event.total, event.message)
            show(*step, best_us=event.best_us, seconds_left=event.seconds_left)

    return listen


def describe(message: str, best_us: float | None, seconds_left: float | None) -> str:
    """A message with the best time so far and the time left, as far as they are known."""
    notes = [message] if message else []
    if best_us is not None and isfinite(best_us):
        notes.append(f"best {best_us:,.1f} us")
    if seconds_left is not None:
        notes.append(f"{seconds_left:.0f} s left")
    return ", ".join(notes)


def printed(listener: Listener | None) -> Listener:
    """A listener to a search that prints each event, and tells another."""
    printer = LinePrinter()

    def listen(event: Event) -> None:
        printer.listen(event)
        if listener is not None:
            listener(event)

    return listen


def print_ranking(
    problem: Problem,
    arch: str,
    status: str,
    rows: Iterable[Row],
    pick: Candidate,
    path: Path | None,
) -> None:
    """Print the ranking of a search on stderr, best first, and where it is recorded."""
    _print(f"{problem.describe()} on {arch}: {status}")
    for row in rows:
        _print(f"  {_time(row):>24}  {row.candidate.name}{_fate(row, pick)}")
    if path is not None:
        _print(f"  recorded in {path}")


def _time(row: Row) -> str:
    if row.timing is not None and isfinite(row.timing.median_us):
        return f"measured {row.timing.median_us:,.1f} us"
    return f"estimate {row.estimate.us:,.1f} us"


def _fate(row: Row, pick: Candidate) -> str:
    if not row.outcome.ok:
        return f"  {row.outcome.kind}: {row.outcome.reason}"
    if row.candidate == pick:
        return "  <- pick"
    if row.tied:
        return "  tied"
    return "" if row.fate == "ok" else f"  {row.fate}"


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
