"""The rounds of a race over whatever takes samples: a device of this process, or a worker that is asked for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from ..core.outcome import Crashed, LaunchFailed, Outcome, OutOfMemory
from ..errors import AttentionAutotunerError
from .racing import SETTLED_ROUNDS, Race

MIN_ROUNDS = 4
MAX_ROUNDS = 200

Samples = Mapping[str, float | Outcome]  # microseconds of a launch, or why there is no sample
OnRound = Callable[[int, list[str]], None]


class FaultError(Exception):
    """A process, or its CUDA context, did not survive what it ran.

    Attributes:
        outcome: of the candidate that is to blame.
        at: its name; None where it may be any of several, or where one alone ran that the caller knows.
    """

    def __init__(self, outcome: Outcome, at: str | None = None) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome
        self.at = at


def classify(error: BaseException) -> Outcome:
    """The outcome that an exception of a load, a launch or a wait stands for."""
    text = f"{type(error).__name__}: {error}"
    # A DeviceMemoryError is a MemoryError, as is cupy's; torch's is known by its name, the host's by its words.
    no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if no_memory or "can't allocate memory" in text or "cudaErrorMemoryAllocation" in text:
        return OutOfMemory(reason=text)
    if isinstance(error, AttentionAutotunerError):
        return LaunchFailed(reason=text)
    return Crashed(reason=text)


def run_rounds(
    race: Race,
    sample: Callable[[Sequence[str]], Samples],
    deadline: float,
    *,
    rounds: int = SETTLED_ROUNDS,
    rest: float = 0.0,
    on_round: OnRound | None = None,
    agreed: Callable[[bool], bool] = bool,
) -> None:
    """Sample rounds until a race is settled or its time is up.

    Args:
        race: gets the samples; entries that could not be sampled fail in it.
        sample: takes one sample of every name, in the given order.
        deadline: of ``time.monotonic``, seconds; at least a few rounds are run whatever it is.
        rounds: at least so many before statistics may end the race.
        rest: pause after a round, as a multiple of what it took.
        on_round: called after each round with (rounds, names still in the race).
        agreed: whether the time is up that counts, given whether this process's own is.
    """
    while race.running and race.rounds < max(MAX_ROUNDS, rounds):
        began = time.monotonic()
        times = {}
        for name, result in sample(race.order()).items():
            if isinstance(result, Outcome):
                race.fail(name, result)
            elif 0.0 < result < inf:
                times[name] = result
            else:
                race.fail(name, LaunchFailed(reason=f"a sample of it took {result} us"))
        took = time.monotonic() - began
        race.add(times)
        if on_round is not None:
            on_round(race.rounds, race.running)
        over = agreed(time.monotonic() > deadline) and race.balanced
        if race.rounds >= MIN_ROUNDS and (over or race.settled(min_rounds=rounds)):
            return
        if rest > 0.0:
            time.sleep(rest * took)
