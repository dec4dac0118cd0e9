"""Progress of a search: its events, and the clock of the budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

LOGGER = logging.getLogger(__name__)

Phase = Literal["rank", "build", "verify", "measure", "confirm", "record"]
MIN_ROUNDS_SECONDS = 2.0  # even a spent budget measures this long


@dataclass(frozen=True)
class Event:
    """One step of progress.

    Attributes:
        phase: what is going on.
        done, total: steps of this phase.
        message: one line.
        best_us: the best time so far, measured or else predicted, microseconds.
        seconds_left: of the budget; None when there is none.
    """

    phase: Phase
    done: int
    total: int
    message: str = ""
    best_us: float | None = None
    seconds_left: float | None = None


Listener = Callable[[Event], None]


class Progress:
    """Tells a listener, and knows how much of the budget is left.

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
        """Log and send one event."""
        said = self._prefix + message
        LOGGER.debug("%s %d/%d: %s", phase, done, total, said)
        if self._listener is None:
            return
        self._listener(Event(phase, done, total, said, best_us, self.seconds_left))
