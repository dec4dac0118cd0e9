"""Checks and races of built kernels in a worker: a fault costs the candidate that it is of, and nothing else."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from ..codegen.artifact import Artifact
from ..core.outcome import Crashed, Leaked, Outcome, Postponed
from ..core.problem import Problem
from .racing import History, Race, Timing
from .rounds import FaultError, OnRound, Samples, classify, run_rounds
from .worker import Worker

LOGGER = logging.getLogger(__name__)
TORCH_TASKS = "attention_autotuner.tuning.measure"


class InProcess:
    """A stand-in for a worker: tasks run in the caller's process, and one that faults leaves it without CUDA."""

    deadline = inf  # is not held to

    def __init__(self, device: int, *, tasks: str = TORCH_TASKS) -> None:
        self.device = device
        self._module = tasks
        self._tasks: Any = None

    def start(self) -> None:
        """Nothing is to be started."""

    renew = start

    def call(self, task: str, **arguments: Any) -> Any:
        """See :meth:`.worker.Worker.call`."""
        module = importlib.import_module(self._module)
        if self._tasks is None:
            self._tasks = module.Tasks(lambda at, seconds: None)
            self._tasks.open(self.device)
        try:
            return getattr(self._tasks, task)(**arguments)
        except FaultError:
            raise
        except Exception as error:  # as in a worker
            raise FaultError(module.classify(error)) from error


def crossing(library: Artifact) -> dict[str, Any]:
    """The fields of a built kernel that cross to a worker, as JSON has them; ``entry_of`` and ``tasks`` read them."""
    return {"path": str(library.path), "launch_knobs": dict(library.launch_knobs)}


def verify(
    worker: Worker | InProcess, problem: Problem, library: Artifact, *, deterministic: bool
) -> Outcome:
    """The outcome of :func:`~.verify.verify`, or of what became of the worker.

    Raises:
        ArtifactError: there is no worker to be had.
    """
    from . import remote  # needs torch

    try:
        described = worker.call("load", library=crossing(library))
        if isinstance(described, Outcome):
            return described
        outcome = remote.verify(worker.call, described, problem, worker.device, deterministic)
    except FaultError as fault:
        return fault.outcome
    if isinstance(outcome, (Crashed, Leaked)):
        worker.renew()  # neither its context nor its memory is to be relied on
    return outcome


def measure(
    worker: Worker | InProcess,
    problem: Problem,
    entries: Mapping[str, Sequence[Artifact]],
    *,
    seed: int = 0,
    history: History | None = None,
    **options: Any,
) -> tuple[list[Timing], bool]:
    """Race kernels: :func:`race`, whose options these are, with the libraries of each or of both halves of a step.

    Raises:
        ArtifactError: there is no worker to be had.
    """
    from . import remote  # needs torch

    crossed = {name: [crossing(library) for library in entries[name]] for name in entries}
    try:
        held, asked = remote.race_of(problem, seed, worker.device)
    except (MemoryError, RuntimeError) as error:
        failed = Race(list(crossed), history=history)
        for name in failed.running:
            failed.fail(name, classify(error))
        return failed.results(), False
    raced = race(worker, asked, crossed, seed=seed, history=history, **options)
    del held
    return raced


def race(
    worker: Worker | InProcess,
    asked: Mapping[str, Any],
    crossed: Mapping[str, Any],
    *,
    budget_seconds: float,
    keep: Collection[str] = (),
    seed: int = 0,
    on_round: OnRound | None = None,
    history: History | None = None,
) -> tuple[list[Timing], bool]:
    """Race entries; one that takes the worker with it is left out, and the others go on with the rounds so far.

    Where a round does not show whose fault it was, as many rounds are run again in which every entry is waited for by
    itself. Those do not count; if they do not show it either, the race goes on in that way.

    Args:
        worker: takes the samples.
        asked: what its task ``prepare`` is given beside the entries.
        crossed: name -> what it takes for an entry; in tie-breaking order.
        budget_seconds: wall time of the rounds; at least a few rounds are run whatever it is.
        keep: names that are timed in every round.
        seed: of the order.
        on_round: called after each round with (rounds, names still in the race).
        history: see :class:`.racing.Race`; what is settled by it is not timed again.

    Returns:
        The timings, fastest first, as :meth:`.racing.Race.results` has them; and whether Ctrl-C cut the race short.

    Raises:
        ArtifactError: there is no worker to be had.
    """
    race = Race(list(crossed), keep=keep, seed=seed, history=history)
    alone, replays = False, 0
    deadline = 0.0

    def sample(order: Sequence[str]) -> Samples:
        samples: Samples = worker.call("round", order=order, alone=alone)
        return samples

    try:
        while race.running and not race.settled():
            before, prepared = race.rounds, False
            try:
                running = {name: crossed[name] for name in race.running}
                failures = worker.call("prepare", **asked, entries=running)
                for name, failure in failures.items():
                    race.fail(name, failure)
                prepared = True
                for _ in range(replays if race.running else 0):
                    sample(race.running)
                replays = 0
                deadline = deadline or time.monotonic() + budget_seconds
                run_rounds(race, sample, deadline, on_round=on_round)
                break
            except FaultError as fault:
                race.void()
                if isinstance(fault.outcome, Postponed):
                    break  # with the rounds so far
                known = fault.at in race.running
                if known or alone or not prepared:
                    for name in race.running:
                        if name == fault.at or not known:
                            race.fail(name, fault.outcome)
                    alone, replays = False, 0
                else:
                    LOGGER.warning("a round of %d kernels failed: %s", len(race.running), fault)
                    alone, replays = True, race.rounds - before + 1
        with suppress(FaultError):
            worker.call("release")
    except KeyboardInterrupt:
        return race.results(), True
    return race.results(), False
