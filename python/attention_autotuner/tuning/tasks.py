"""The tasks of a worker: they take what JSON holds, give that and outcomes, and say before each launch whose it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.outcome import LaunchFailed, Outcome
from ..core.problem import Problem
from ..errors import ArtifactError
from ..serving.loader import load
from .entries import entry_of
from .measure import Sampler, free_memory, use_device, warm_up
from .rounds import Samples
from .verify import classify as classify
from .verify import verify

Tell = Callable[[str | None, float | None], None]
SLOWEST_FLOPS = 1e13  # FLOP/s that any usable kernel reaches on a large problem; an H100 does 6e14
FIRST_LAUNCHES = 10  # of an entry that gets ready, with its first sample


class Tasks:
    """The work of one process on one GPU.

    Args:
        tell: told the name of the candidate that runs from now on, None where it may be any of several, and the seconds
            that its launches may need on a slow GPU, None while nothing is launched.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._sampler: Sampler | None = None
        self._seconds = 0.0  # of a launch in the race

    def open(self, device: int, memory_bytes: int | None = None) -> str | None:
        """Begin on a CUDA device with so much of its memory; answers the CUDA that torch was built with."""
        return use_device(device, memory_bytes)

    def verify(
        self, problem: Mapping[str, Any], library: Mapping[str, Any], deterministic: bool
    ) -> Outcome:
        """The outcome of :func:`~.verify.verify`."""

        def launching(begun: bool) -> None:
            self._tell(None, 0.0 if begun else None)  # the problems of checks are small

        launching(True)  # what the library does when it is loaded may crash or hang as well
        try:
            kernel = load(Path(library["path"])).with_launch_knobs(library["launch_knobs"])
        except ArtifactError as error:
            return LaunchFailed(reason=str(error))
        launching(False)
        asked = Problem(**problem)
        return verify(asked, kernel, deterministic=deterministic, launching=launching)

    def prepare(
        self,
        problem: Mapping[str, Any],
        entries: Mapping[str, Sequence[Mapping[str, Any]]],
        seed: int,
    ) -> dict[str, Outcome]:
        """Get the entries of a race ready.

        Args:
            problem: fields of the problem.
            entries: name -> its library, or those of a step's forward and backward.
            seed: of the inputs.

        Returns:
            Name -> outcome of the entries that failed.
        """
        self.release()
        asked = Problem(**problem)
        self._seconds = asked.flops / SLOWEST_FLOPS
        self._sampler = Sampler(asked, seed=seed)
        warm_up()
        failures = {}
        for name, libraries in entries.items():
            self._tell(name, FIRST_LAUNCHES * self._seconds)
            failure = self._sampler.prepare(entry_of(name, libraries, asked))
            if failure is not None:
                failures[name] = failure
        return failures

    def round(self, order: Sequence[str], alone: bool) -> Samples:
        """One sample of each entry, microseconds or an outcome; ``alone`` as :meth:`~.measure.Sampler.round` has it."""
        if self._sampler is None:
            raise ValueError("no race was prepared")
        self._tell(None, len(order) * self._seconds)
        return self._sampler.round(
            order, (lambda name: self._tell(name, self._seconds)) if alone else None
        )

    def release(self) -> None:
        """Give the memory of the last race back."""
        if self._sampler is not None:
            self._sampler = None
            free_memory()
