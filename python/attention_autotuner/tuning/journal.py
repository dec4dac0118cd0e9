"""The journal of a search: every outcome and every round of a race, written as it happens.

``<record>.jsonl`` beside the record of a problem holds one line for each, in one write at its end, so that a process
that is killed loses what it was at and nothing else. A line holds for one problem, one GPU with its software, and
kernels of one source and compiler; a later search reads what holds for it and goes on from there. A search that has
ended says so: then the record has its timings, and the next race begins with none. Races of whole steps, which no
record has, stand in ``<record>.step.jsonl`` beside that of the backward problem; one that has ended is not run again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from ..codegen.files import append_line
from ..core.identity import digest16
from ..core.outcome import Outcome, OutOfMemory, Postponed, outcome_from_json
from ..core.problem import Problem
from ..core.trust import parse_json
from .environment import Environment
from .locking import storing
from .racing import History

# Of an environment, that decide whether what was found out in it holds.
FIELDS = ("gpu_name", "num_sms", "driver", "cuda_driver", "torch", "nvcc", "cutlass")
PASSING = (OutOfMemory, Postponed)  # outcomes that another time may differ

Ratio = float | Outcome | None


def key_of(problem: Problem, environment: Environment) -> str:
    """Sixteen hex characters for a problem on a GPU with its software."""
    return digest16(problem, *(getattr(environment, name) for name in FIELDS))


def kernel_id(name: str, source_digest: str) -> str:
    """The name of a kernel of this very source."""
    return f"{name}@{source_digest[:16]}"


def lines_of(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """The lines of a journal that have a key; none where there is no file.

    Raises:
        StoreError: it cannot be read.
    """
    text = ""
    with storing(f"read the journal {path}"), suppress(FileNotFoundError):
        text = path.read_text(encoding="utf-8", errors="replace")
    for line in filter(None, text.splitlines()):
        with suppress(ValueError):  # torn by a kill
            said = parse_json(line)
            if isinstance(said, dict) and said.get("key") == key:
                yield said


@dataclass
class Journal:
    """The journal of one problem in one environment.

    Args:
        path: of the file, which need not exist; None keeps nothing.
        key: see :func:`key_of`.
        fresh: begin with nothing, whatever was written before.
    """

    path: Path | None
    key: str
    fresh: bool = False
    _outcomes: dict[str, Outcome] = field(default_factory=dict, init=False)
    _raced: dict[str, Outcome] = field(default_factory=dict, init=False)
    _rounds: list[dict[str, float]] = field(default_factory=list, init=False)
    _ratios: dict[tuple[str, str], float | Outcome] = field(default_factory=dict, init=False)
    _over: set[frozenset[str]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        for line in () if self.fresh else lines_of(self.path, self.key):
            with suppress(ValueError, TypeError, LookupError, AttributeError):  # another version's
                self._take(line)
        if self.fresh and self.path.exists():
            self.end()

    def outcome(self, kernel: str) -> Outcome | None:
        """The outcome of a kernel's verification, where it is known."""
        return self._outcomes.get(kernel)

    def add_outcome(self, kernel: str, outcome: Outcome) -> None:
        """Write the outcome of a verification."""
        if not isinstance(outcome, PASSING):
            self._outcomes[kernel] = outcome
            self.write(kernel=kernel, outcome=outcome.to_json())

    def ratio(self, pick: str, default: str) -> float | Outcome | None:
        """The ratio that a second process found for a pick, or how the pick failed; None where it was not asked."""
        return self._ratios.get((pick, default))

    def add_ratio(self, pick: str, default: str, ratio: Ratio) -> None:
        """Write the answer of a second process."""
        if ratio is not None:
            said = ratio.to_json() if isinstance(ratio, Outcome) else ratio
            self.write(pick=pick, default=default, ratio=said)

    def race(self, kernels: Mapping[str, str]) -> History:
        """The race so far of kernels, name -> :func:`kernel_id`; what is added to it is written."""
        names = {kernel: name for name, kernel in kernels.items()}
        rounds = [
            {names[kernel]: us for kernel, us in times.items() if kernel in names}
            for times in self._rounds
        ]
        failed = {names[kernel]: out for kernel, out in self._raced.items() if kernel in names}
        return _Race(
            rounds=[times for times in rounds if times],
            failed=failed,
            journal=self,
            kernels=dict(kernels),
        )

    def is_over(self, kernels: Collection[str]) -> bool:
        """True where a race of these very kernels, and no others, has come to its end."""
        return frozenset(kernels) in self._over

    def add_over(self, kernels: Collection[str]) -> None:
        """Write that a race of kernels has come to its end."""
        self._over.add(frozenset(kernels))
        self.write(over=sorted(kernels))

    def end(self) -> None:
        """Say that the search is over: its timings are in the record."""
        self._forget()
        self.write(end=True)

    def _forget(self) -> None:
        self._rounds, self._raced, self._ratios, self._over = [], {}, {}, set()

    def write(self, **said: Any) -> None:
        """Append one line.

        Raises:
            StoreError: the file cannot be written.
        """
        if self.path is None:
            return
        # The first newline ends what a killed process may have left.
        line = {"key": self.key, "at": round(time.time(), 3), **said}
        with storing(f"write the journal {self.path}"):
            append_line(self.path, "\n" + json.dumps(line, separators=(",", ":")))

    def _take(self, said: Mapping[str, Any]) -> None:
        if "outcome" in said:
            self._outcomes[said["kernel"]] = outcome_from_json(said["outcome"])
        elif "raced" in said:
            self._raced[said["kernel"]] = outcome_from_json(said["raced"])
        elif "round" in said:
            times = {str(kernel): float(us) for kernel, us in said["round"].items()}
            if not all(0.0 < us < inf for us in times.values()):
                raise ValueError("a time must be positive and finite")
            self._rounds.append(times)
        elif "ratio" in said:
            ratio = said["ratio"]
            known = outcome_from_json(ratio) if isinstance(ratio, dict) else float(ratio)
            self._ratios[said["pick"], said["default"]] = known
        elif "over" in said:
            self._over.add(frozenset(said["over"]))
        elif said.get("end"):
            self._forget()


@dataclass(kw_only=True)
class _Race(History):
    """A race whose rounds are written down."""

    journal: Journal
    kernels: Mapping[str, str]

    def add(self, times_us: dict[str, float]) -> None:
        super().add(times_us)
        self.journal.write(round={self.kernels[name]: us for name, us in times_us.items()})

    def fail(self, name: str, outcome: Outcome) -> None:
        super().fail(name, outcome)
        if not isinstance(outcome, PASSING):
            self.journal.write(kernel=self.kernels[name], raced=outcome.to_json())
