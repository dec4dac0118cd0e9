"""The rows and the result of a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core.candidate import Candidate
from ..core.outcome import Outcome, Postponed
from ..core.problem import Problem
from ..kernels.cost_model import Estimate
from .racing import FIGURES, Timing
from .record_schema import CandidateEntry, Measurement, TuningRecord

if TYPE_CHECKING:
    from .pipeline import Built

Status = Literal["measured", "recorded", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate of the shortlist, with its outcome.

    Attributes:
        candidate: the candidate.
        estimate: the model's last word: with the compiler's report where it was built.
        outcome: Ok, or why it fell out.
        timing: its place in the race, where it was measured now, or by the search that recorded it.
        built: what was built of it, where it was.
        source_digest: what its source says.
    """

    candidate: Candidate
    estimate: Estimate
    outcome: Outcome
    timing: Timing | Measurement | None = None
    built: Built | None = None
    source_digest: str = ""

    @property
    def artifact(self) -> Path | None:
        """The built library's folder or file, where it was built."""
        return None if self.built is None else self.built.path

    @property
    def is_over(self) -> bool:
        """True where it was timed or fell out, so that no later search need try it."""
        if self.outcome.ok:
            return self.timing is not None and self.timing.samples > 0
        return not isinstance(self.outcome, Postponed)

    @property
    def tied(self) -> bool:
        """True where it could not be told from the fastest."""
        return self.outcome.ok and self.timing is not None and self.timing.tied

    @property
    def fate(self) -> str:
        """The stage that it came to, for tables: ``ok`` was timed."""
        if not self.outcome.ok:
            return self.outcome.kind
        if self.timing is not None:
            return "ok"
        return "not built" if self.built is None else "not timed"

    def entry(self, environment: str) -> CandidateEntry:
        """The entry that a record keeps of it.

        Args:
            environment: digest of the environment it was measured in.
        """
        timing, measurement = self.timing, None
        if timing is not None and timing.samples and isfinite(timing.ratio_to_best):
            measurement = Measurement(
                environment=environment, **{name: getattr(timing, name) for name in FIGURES}
            )
        return CandidateEntry(
            candidate=self.candidate,
            source_digest=self.source_digest,
            code_digest=None if self.built is None else self.built.code_digest,
            outcome=self.outcome,
            measurement=measurement,
            estimate_us=finite(self.estimate.us),
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form; times that are infinite become null."""
        timing = self.timing
        return {
            "name": self.candidate.name,
            "family": self.candidate.family,
            "config": self.candidate.config,
            "estimate_us": finite(self.estimate.us),
            "limiter": self.estimate.limiter,
            "outcome": self.outcome.to_json(),
            **{n: None if timing is None else finite(getattr(timing, n)) for n in FIGURES},
            "tied": self.tied,
            "artifact": None if self.artifact is None else str(self.artifact),
        }


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of a search.

    Attributes:
        problem: what was tuned.
        arch: the policy's name.
        status: ``measured`` now, ``recorded`` by an earlier search, or only ``predicted`` by the model.
        pick: the candidate to use.
        default: the policy's own candidate.
        rows: the shortlist, best first; candidates that fell out last.
        gain: how much faster the pick is than the default, e.g. 0.04; None unless both were measured.
        confirmed: whether a second, fresh process confirmed the gain; true when the default was kept.
        interrupted: stopped by Ctrl-C; what is here is the best so far.
        record: what was written or found, if so.
        record_path: its file.
        seconds: wall time.
    """

    problem: Problem
    arch: str
    status: Status
    pick: Candidate
    default: Candidate
    rows: tuple[Row, ...]
    gain: float | None = None
    confirmed: bool = False
    interrupted: bool = False
    record: TuningRecord | None = None
    record_path: Path | None = None
    seconds: float = 0.0

    @property
    def predicted_gain(self) -> float | None:
        """The gain by the cost model; None where it does not know both."""
        times = {row.candidate: finite(row.estimate.us) for row in self.rows}
        pick, default = times.get(self.pick), times.get(self.default)
        return default / pick - 1.0 if pick and default else None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form for the command line."""
        return {
            "problem": self.problem.describe(),
            "direction": self.problem.direction,
            "purpose": None if self.record is None else self.record.purpose,
            "arch": self.arch,
            "status": self.status,
            "pick": self.pick.name,
            "default": self.default.name,
            "gain": self.gain,
            "predicted_gain": self.predicted_gain,
            "confirmed": self.confirmed,
            "interrupted": self.interrupted,
            "record_path": None if self.record_path is None else str(self.record_path),
            "seconds": self.seconds,
            "candidates": [row.to_json() for row in self.rows],
        }


def gain_over(row: Row, base: Row) -> float:
    """The gain of a row over another of the same race, from paired rounds: 0.04 is 4 %.

    Raises:
        ValueError: one of them was not timed.
    """
    if row.timing is None or base.timing is None:
        raise ValueError("a gain needs two timed rows")
    return base.timing.ratio_to_best / row.timing.ratio_to_best - 1.0


def by_estimate(row: Row) -> tuple[bool, float, str]:
    """Sort key: usable first, then the model's time."""
    return (not row.outcome.ok, row.estimate.us, row.candidate.name)


def by_ratio(default: Candidate) -> Callable[[Row], tuple[bool, float, bool, float]]:
    """A sort key: usable first, then the place in the race; of a tie the default first, then by the model's time."""

    def key(row: Row) -> tuple[bool, float, bool, float]:
        ratio = inf if row.timing is None else row.timing.ratio_to_best
        place = 0.0 if row.tied else ratio
        return (not row.outcome.ok, place, row.candidate != default, row.estimate.us)

    return key


def median_us(row: Row) -> float | None:
    """The measured time, microseconds; None where it was not timed."""
    return None if row.timing is None else row.timing.median_us


def finite(value: float | None) -> float | None:
    """The value, or None in place of one that JSON cannot hold."""
    return value if value is not None and isfinite(value) else None


def postponed(rows: Sequence[Row], reason: str) -> list[Row]:
    """Rows whose turn did not come."""
    late = Postponed(reason=reason)
    return [replace(row, outcome=late) if row.outcome.ok else row for row in rows]


def is_cut_short(rows: Sequence[Row]) -> bool:
    """Return whether the budget ended before anything was found to be usable."""
    return not any(row.outcome.ok for row in rows) and any(
        isinstance(row.outcome, Postponed) for row in rows
    )
