"""Progress of a search: its events, and the clock of the budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ..core.outcome import Ok, Outcome
from .arguments import check_listener
from .racing import Timing
from .rounds import OnRound

LOGGER = logging.getLogger(__name__)

Phase = Literal["rank", "peaks", "build", "verify", "measure", "race", "confirm", "record"]
Kind = Literal["step", "build_started", "built", "verified", "timed", "eliminated", "picked"]
MIN_ROUNDS_SECONDS = 2.0  # even a spent budget measures this long


@dataclass(frozen=True)
class Event:
    """One step of progress, or something that became of a candidate.

    Attributes:
        phase: what is going on.
        done, total: steps of this phase.
        message: one line.
        best_us: the best time so far, measured or else predicted, microseconds.
        seconds_left: of the budget; None when there is none.
        kind: ``step`` of a phase. Of a candidate: ``build_started`` when it is handed to the compilers, ``built``,
            ``verified``, ``timed``, ``eliminated`` from the race or before it, ``picked``.
        candidate: its name; of builds the compiled kernel's, which candidates that differ in launch knobs share.
        outcome: of ``verified`` and ``eliminated``; of the latter ``Ok`` where it was slower.
        timing: of ``timed``.
        seconds: of ``built``: what compiling it took.
    """

    phase: Phase
    done: int
    total: int
    message: str = ""
    best_us: float | None = None
    seconds_left: float | None = None
    kind: Kind = "step"
    candidate: str = ""
    outcome: Outcome | None = None
    timing: Timing | None = None
    seconds: float | None = None


Listener = Callable[[Event], None]
_LISTENERS: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have a function called with every event of every search in this process, in the thread that searches.

    The searches of calls where mode is ``tune`` are among them. An error in the function ends the search.

    Args:
        listener: takes an event.

    Raises:
        UnsupportedArgumentError: it is no function.
    """
    check_listener(listener, optional=False)
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


class Progress:
    """Tells listeners, and knows how much of the budget is left.

    Args:
        listener: called with every event, or None.
        budget_seconds: wall time from now on, or None.
        prefix: of every message.
    """

    def __init__(
        self, listener: Listener | None, budget_seconds: float | None, prefix: str = ""
    ) -> None:
        self._prefix = prefix
        self._listener = listener
        self._place: tuple[Phase, int, int] = ("rank", 0, 0)
        self._budget_seconds = budget_seconds
        self._started = time.monotonic()

    @property
    def elapsed_seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Of the budget; None when there is none."""
        if self._budget_seconds is None:
            return None
        return max(0.0, self._budget_seconds - self.elapsed_seconds)

    def seconds_for_rounds(self, otherwise: float, kept: float) -> float:
        """Seconds to time: what is left of the budget but for those that are kept, or ``otherwise`` without one."""
        left = self.seconds_left
        return otherwise if left is None else max(MIN_ROUNDS_SECONDS, left - kept)

    def tell(
        self, phase: Phase, done: int, total: int, message: str, best_us: float | None = None
    ) -> None:
        """Log and send one step."""
        said, self._place = self._prefix + message, (phase, done, total)
        LOGGER.debug("%s %d/%d: %s", phase, done, total, said)
        self._send(Event(phase, done, total, said, best_us, self.seconds_left))

    def happened(self, kind: Kind, candidate: str, **about: Any) -> None:
        """Send what became of a candidate, in the phase of the last step.

        Args:
            kind: see :class:`Event`, as of the others.
            candidate: its name.
            about: outcome, timing or seconds.
        """
        message = f"{self._prefix}{candidate}: {kind.replace('_', ' ')}"
        self._send(Event(*self._place, message, kind=kind, candidate=candidate, **about))

    def watching(self, names: Collection[str], on_round: OnRound) -> OnRound:
        """A function to be called after each round of a race, which tells of the names that leave it."""
        racing = list(names)

        def watched(rounds: int, running: list[str]) -> None:
            for name in [name for name in racing if name not in running]:
                racing.remove(name)
                self.happened("eliminated", name, outcome=Ok())
            on_round(rounds, running)

        return watched

    def _send(self, event: Event) -> None:
        for listener in (*_LISTENERS, *([self._listener] if self._listener else ())):
            listener(event)
