"""The search over configurations of a call: checks and a race, in a worker or here, on one rank or on all of a group.

Calls that communicate are made by all ranks in step, in this process; others by each rank for itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..core.outcome import Ok, Outcome, Wrong
from ..errors import DistributedError, NoCandidateError
from . import isolated
from .calls import Call, Config
from .distributed import lost, merge, race_together
from .isolated import InProcess
from .progress import Kind, Progress
from .racing import Race, Timing
from .ranks import Ranks
from .rounds import MAX_ROUNDS, FaultError, Samples, run_rounds
from .stages import MIN_GAIN
from .worker import Worker

RACE_SECONDS = 10.0  # of timing, when nothing says otherwise
# For a collective of a function under search, which waits in vain for a rank that failed.
COLLECTIVE_SECONDS = 20.0


@dataclass(frozen=True)
class FunctionResult:
    """The result of a search for a function.

    Attributes:
        function: its name.
        key: what it was tuned for.
        status: ``measured`` now, or ``recorded`` by an earlier search.
        pick, default: configurations; the default is the first that ``prune`` leaves.
        configs: by name.
        timings: fastest first; configurations that fell out last, with their outcomes. Empty where it was recorded.
        gain: how much faster the pick is than the default, e.g. 0.04; None unless both were measured.
        interrupted: cut short by Ctrl-C.
    """

    function: str
    key: Any
    status: str
    pick: Config
    default: Config
    configs: Mapping[str, Config]
    timings: tuple[Timing, ...]
    gain: float | None = None
    interrupted: bool = False


def named(configs: Sequence[Config]) -> dict[str, Config]:
    """Configurations by names that say what they are."""
    return {", ".join(f"{k}={v}" for k, v in config.items()): config for config in configs}


def print_ranking(result: FunctionResult) -> None:
    """Print a ranking on stderr, fastest first."""
    lines = [f"{result.function} for {result.key}: {result.status}, {result.pick}"]
    for timing in result.timings:
        fate = f"{timing.median_us:,.1f} us, {timing.ratio_to_best:.3f} of the fastest"
        if not timing.outcome.ok:
            fate = f"{timing.outcome.kind}: {timing.outcome.reason}"
        lines.append(f"  {timing.name}: {fate}")
    sys.stderr.write("\n".join(lines) + "\n")


class FunctionSearch:
    """A search for the fastest configuration of a call.

    Args:
        runner: makes the calls.
        call: the call as the runner takes it.
        configs: by name, the default first.
        progress: told about each step.
        ranks: of the group that searches; None is this process alone.
        collective: all ranks make each call together.
    """

    def __init__(
        self,
        runner: Worker | InProcess,
        call: Call | Mapping[str, Any],
        configs: Mapping[str, Config],
        progress: Progress,
        ranks: Ranks | None = None,
        *,
        collective: bool = False,
    ) -> None:
        self._runner, self._call, self._configs = runner, call, configs
        self._progress, self._ranks = progress, ranks
        self._in_step = ranks if collective else None
        self.interrupted = False

    def run(self, function: str, key: Any) -> FunctionResult:
        """Check and race all; the default is replaced for a gain of at least 1 %.

        Raises:
            NoCandidateError: no configuration runs and is right; the message tabulates why.
            DistributedError: another rank failed, is gone, or does something else.
            ArtifactError: the process that makes the calls does not start.
        """
        outcomes = self._checked()
        names = [name for name, outcome in outcomes.items() if outcome.ok]
        seconds = self._progress.seconds_for_rounds(RACE_SECONDS, kept=0.0)
        timings: list[Timing] = []
        if self._in_step is not None:
            with _impatient(self._in_step.group):
                timings = self._raced_in_step(self._in_step, names, seconds) if names else []
        elif self._ranks is not None:
            timings = race_together(self._ranks, names, lambda some: self._raced(some, seconds / 2))
        elif names:
            timings = self._raced(names, seconds)
        timings += [lost(name, outcome) for name, outcome in outcomes.items() if not outcome.ok]
        if self.interrupted and not timings[0].samples:
            raise KeyboardInterrupt
        if not timings[0].outcome.ok or not timings[0].samples:
            lines = [f"  {t.name}: {t.outcome.kind}: {t.outcome.reason}" for t in timings]
            raise NoCandidateError(
                "\n".join([f"no configuration of {function} is usable:", *lines])
            )
        default = next(iter(self._configs))
        best, base = timings[0], next(t for t in timings if t.name == default)
        gain = base.ratio_to_best / best.ratio_to_best - 1.0 if base.outcome.ok else None
        if gain is not None and gain < MIN_GAIN:
            best, gain = base, 0.0
        for timing in timings:
            outcome = timing.outcome
            kind: Kind = "timed" if outcome.ok else "eliminated"
            self._progress.happened(kind, timing.name, outcome=outcome, timing=timing)
        self._progress.happened("picked", best.name)
        return FunctionResult(
            function,
            key,
            "measured",
            self._configs[best.name],
            self._configs[default],
            self._configs,
            tuple(timings),
            gain,
            self.interrupted,
        )

    def _checked(self) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        right: Config | None = None
        shares = self._ranks is not None and self._in_step is None
        with _impatient(self._in_step.group if self._in_step else None):
            for index, (name, config) in enumerate(self._configs.items()):
                if self._ranks is not None:
                    self._ranks.check()
                    if shares and index and index % self._ranks.size != self._ranks.rank:
                        continue
                self._progress.tell("verify", index, len(self._configs), name)
                outcomes[name] = self._together(name, self._check(name, config, right))[0]
                self._progress.happened("verified", name, outcome=outcomes[name])
                if right is None and outcomes[name].ok:
                    right = config
        if self._ranks is not None and shares:
            merged = merge(self._ranks.exchange("checks", outcomes))
            outcomes = {name: merged[name] for name in self._configs}
        return outcomes

    def _check(self, name: str, config: Config, right: Config | None) -> Outcome:
        try:
            outcome: Outcome = self._runner.call(
                "check", call=self._call, name=name, config=config, against=right
            )
        except FaultError as fault:
            return fault.outcome
        return outcome

    def _raced(self, names: Sequence[str], seconds: float) -> list[Timing]:
        timings, interrupted = isolated.race(
            self._runner,
            {"call": self._call, "seed": 0},
            {name: self._configs[name] for name in names},
            budget_seconds=seconds,
            keep=names[:1],
            on_round=self._on_round,
        )
        self.interrupted |= interrupted
        return timings

    def _on_round(self, rounds: int, running: Collection[str]) -> None:
        if self._ranks is not None:
            self._ranks.check()
        note = f"{len(running)} of {len(self._configs)} in the race"
        self._progress.tell("measure", rounds, MAX_ROUNDS, note)

    # --- all ranks in step -------------------------------------------------------------------------

    def _together(self, name: str, outcome: Outcome, us: float = 0.0) -> tuple[Outcome, float]:
        """The outcome on all ranks and the longest time; this rank's own, unless they are in step.

        Raises:
            DistributedError: it failed on some and not on others, which wait for them, or not alike.
        """
        if self._in_step is None:
            return outcome, us
        answers = self._in_step.exchange(name, [outcome, us])
        outcomes = [of_rank[0] for of_rank in answers]
        compared = all(o.ok or isinstance(o, Wrong) for o in outcomes)
        if not compared and len(set(outcomes)) > 1:
            said = "; ".join(f"rank {r}: {o.reason or 'ok'}" for r, o in enumerate(outcomes))
            raise DistributedError(f"{name} did not end alike on all ranks: {said}")
        return next((o for o in outcomes if not o.ok), outcome), max(us for _, us in answers)

    def _raced_in_step(self, ranks: Ranks, names: Sequence[str], seconds: float) -> list[Timing]:
        """A race whose samples are of all ranks at once; the slowest rank's time counts."""
        race, deadline = Race(names, keep=names[:1]), time.monotonic() + seconds
        entries = {name: self._configs[name] for name in names}
        failures = self._runner.call(
            "prepare",
            call=self._call,
            seed=0,
            entries=entries,
            agreed=lambda us: max(ranks.exchange("estimate", us)),
        )
        for name in names:
            if not (failure := self._together(name, failures.get(name, Ok()))[0]).ok:
                race.fail(name, failure)

        def sample(order: Sequence[str]) -> Samples:
            samples: dict[str, float | Outcome] = {}
            for name in order:
                mine = self._runner.call("round", order=[name], alone=True)[name]
                failed = isinstance(mine, Outcome)
                outcome, us = self._together(name, mine if failed else Ok(), 0 if failed else mine)
                samples[name] = us if outcome.ok else outcome
            return samples

        def agreed(over: bool) -> bool:
            return bool(ranks.exchange("budget", over)[0])

        run_rounds(race, sample, deadline, on_round=self._on_round, agreed=agreed)
        self._runner.call("release")
        return race.results()


@contextmanager
def _impatient(group: Any) -> Iterator[None]:
    """Let collectives of a group end with an error after :data:`COLLECTIVE_SECONDS`; of None nothing."""
    if group is None:
        yield
        return
    from torch.distributed import distributed_c10d

    backends = {group._get_backend(device) for device in group._device_types}
    before = [(backend, backend.options._timeout) for backend in backends]
    distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_SECONDS), group)
    try:
        yield
    finally:
        for backend, timeout in before:
            backend._set_default_timeout(timeout)
