"""Tuning many problems under one budget: builds run ahead while what is built is verified, raced and confirmed.

A pick never loses to the policy's default: the default is in every race, and is replaced only after a second, fresh
process has confirmed a gain. Until then the record says the default, unconfirmed. Problems race as soon as their
kernels are built, the first of the plan first; where the budget does not suffice for all, for as many as it does, with
what is built of their kernels. Whatever ends a sweep early, each record that was written stays, and the next sweep goes
on from there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..core.outcome import Outcome
from ..core.problem import Problem
from ..errors import LeaseError, NoCandidateError
from .build_ahead import BuildAhead
from .pipeline import Built, Doubt
from .printing import print_ranking
from .record_schema import TuningRecord
from .result import Row
from .stages import MIN_GAIN, Engine, built_by_name, choose, log_outcomes, source_digests
from .sweep_plan import RACE_SECONDS, SET_UP_SECONDS, VERIFY_SECONDS, Group, Plan, racing_seconds

Status = Literal["measured", "recorded", "unconfirmed", "left", "failed"]
Waiting = tuple[int, int]  # problems and groups that are still to come, the present ones among them
WAIT_SECONDS = 0.5  # between looks at the builds
LEAST_VERIFIED = 2  # kernels of a group, however short the time is
MIN_DOUBTS = 3  # worth a second process while builds keep the GPU idle


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The result of a sweep for one problem.

    Attributes:
        problem: the problem.
        status: ``measured`` now; ``recorded`` by an earlier sweep; ``unconfirmed``: measured, and the default serves
            until a second process has confirmed the pick; ``left`` for want of time; ``failed``.
        record: what serves from now on, where there is a record.
        gain: how much faster the recorded pick is than the default by this sweep's race, e.g. 0.04.
        reason: why it was left or failed.
    """

    problem: Problem
    status: Status
    record: TuningRecord | None = None
    gain: float | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        record = self.record
        return {
            "problem": self.problem.describe(),
            "status": self.status,
            "pick": None if record is None else record.pick,
            "default": None if record is None else record.default,
            "median_us": None if record is None else measured_us(record, record.pick),
            "default_us": None if record is None else measured_us(record, record.default),
            "gain": self.gain,
            "confirmed": None if record is None else record.confirmed,
            "candidates": 0 if record is None else len(record.entries),
            "ties": [] if record is None else list(record.ties),
            "reason": self.reason,
        }


def measured_us(record: TuningRecord, name: str) -> float | None:
    """A candidate's recorded time, microseconds."""
    entry = record.entry(name)
    return None if entry is None or entry.measurement is None else entry.measurement.median_us


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        settled: every problem, in the order of the plan.
        seconds: wall time by phase; ``build`` overlaps the others, ``wait`` is what of it they waited for.
        kernels: how many were built, taken from the cache, or failed to build.
        failures: candidate name -> why it fell out.
        interrupted: stopped by Ctrl-C.
        exhausted: the budget ended it.
    """

    settled: tuple[Settled, ...]
    seconds: Mapping[str, float]
    kernels: int
    failures: Mapping[str, Outcome]
    interrupted: bool
    exhausted: bool

    def to_json(self) -> dict[str, Any]:
        """The part of a report that is about it."""
        return {
            "kernels": self.kernels,
            "failures": {name: outcome.to_json() for name, outcome in self.failures.items()},
            "problems": [settled.to_json() for settled in self.settled],
            "exhausted": self.exhausted,
        }


@dataclass(kw_only=True)
class Sweep(Engine):
    """One sweep; :meth:`run` does it. A ``fresh`` one measures what is recorded already, too.

    Attributes:
        plan: what to do.
        budget_seconds: wall time for all of it; compilers that still run are ended.
        printing: print the ranking of each race.
    """

    plan: Plan
    budget_seconds: float
    printing: bool = False
    _settled: dict[Problem, Settled] = field(default_factory=dict, init=False)
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    _failures: dict[str, Outcome] = field(default_factory=dict, init=False)
    # Of a race that the default lost: its record, the gain, and what is to be confirmed.
    _doubts: list[tuple[TuningRecord, float, Doubt]] = field(default_factory=list, init=False)
    _verified: int = field(default=0, init=False)
    _raced: int = field(default=0, init=False)

    def run(self) -> SweepResult:
        """Do what the budget allows.

        Raises:
            ToolchainError, StoreError: the compiler is missing; a folder cannot be written.
        """
        self.deadline = time.monotonic() + self.budget_seconds
        self._defaults = {self.policy.untuned(problem) for problem in self.plan.problems}
        self._digests = source_digests(self.plan.candidates)
        interrupted = False
        groups = [group for group in map(self._unsettled, self.plan.groups) if group.problems]
        ahead = BuildAhead(
            self.pipeline,
            [candidate for group in groups for candidate in group.pool],
            jobs=self.plan.jobs,
            on_built=self.on_built,
            deadline=self.deadline,
        )
        try:
            self._work(groups, ahead)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            ahead.stop()
            with self._timed("stop"):
                ahead.close()
        self._seconds["build"] = ahead.seconds
        why = "interrupted" if interrupted else "the budget was spent"
        for problem in self.plan.problems:
            if problem not in self._settled:
                self._settle(problem, "left", reason=why)
        settled = tuple(self._settled[problem] for problem in self.plan.problems)
        return SweepResult(
            settled=settled,
            seconds=dict(self._seconds),
            kernels=ahead.built,
            failures=self._failures,
            interrupted=interrupted,
            exhausted=not interrupted and any(problem.status == "left" for problem in settled),
        )

    # --- the order of things ------------------------------------------------------------------------

    def _work(self, groups: Sequence[Group], ahead: BuildAhead) -> None:
        total = sum(len(group.problems) for group in groups)
        waiting = list(groups)
        while waiting and self._has_time():
            left = (sum(len(group.problems) for group in waiting), len(waiting))
            group = self._next(waiting, ahead, left)
            if group is None:
                self._pass_time(waiting, ahead)
                continue
            waiting.remove(group)
            rows = self._prepare(group, ahead, left)
            for problem in group.problems:
                if not self._has_time():
                    break
                self.progress.tell("race", self._raced, total, problem.describe())
                with self._timed("race"):
                    self._settle_by_race(problem, rows)
                self._raced += 1
        ahead.close()  # nothing of what is still to come will be raced
        self.progress.tell("race", self._raced, total, "")
        if self._doubts:
            self._confirm()

    def _next(self, waiting: Sequence[Group], ahead: BuildAhead, left: Waiting) -> Group | None:
        """The first group that is built, or, where time is short, of which enough is to be raced."""
        groups = [group for group in waiting if ahead.ready(group.pool)]
        if not groups and self._spare(left) <= 0:
            groups = [group for group in waiting if self._is_raceable(group, ahead)]
        return groups[0] if groups else None

    def _is_raceable(self, group: Group, ahead: BuildAhead) -> bool:
        """Return whether a default of a group is built, and something to race it against."""
        built = ahead.results(group.pool)
        has_default = any(self.policy.untuned(problem) in built for problem in group.problems)
        return has_default and len(built) >= min(LEAST_VERIFIED, len(group.pool))

    def _pass_time(self, waiting: Sequence[Group], ahead: BuildAhead) -> None:
        """Confirm picks while there is nothing to race, or wait for a build."""
        if len(self._doubts) >= MIN_DOUBTS:
            self._confirm()
            return
        with self._timed("wait"):
            pool = [candidate for group in waiting for candidate in group.pool]
            ahead.wait(pool, min(WAIT_SECONDS, self.seconds_left))

    def _has_time(self) -> bool:
        """True where there is time for a race, once what is doubted is confirmed: that may take less than was kept."""
        if self._doubts and self._left(0) < self._race_seconds:
            self._confirm()
        return self._left(0) >= self._race_seconds

    @property
    def _race_seconds(self) -> float:
        """Seconds of a race, by those so far."""
        return (self._seconds["race"] + RACE_SECONDS + SET_UP_SECONDS) / (self._raced + 1)

    def _spare(self, waiting: Waiting) -> float:
        """Seconds beyond what the waiting problems take, with the least of each group verified."""
        races, groups = waiting
        verify_seconds = (self._seconds["verify"] + VERIFY_SECONDS) / (self._verified + 1)
        return self._left(races) - groups * LEAST_VERIFIED * verify_seconds

    def _left(self, races: int) -> float:
        """Seconds beyond what some races and all confirmations still take."""
        needed = racing_seconds(races, len(self._doubts), self._race_seconds)
        return self.deadline - time.monotonic() - needed

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - start

    # --- the steps ----------------------------------------------------------------------------------

    def _unsettled(self, group: Group) -> Group:
        """A group without the problems that an earlier sweep has settled."""
        if self.fresh:
            return group
        names = {candidate.name: self._digests[candidate] for candidate in group.pool}
        missing = []
        for problem in group.problems:
            known = self.recall(problem, names)
            default = self.policy.untuned(problem).name
            if known is not None and known.confirmed and known.entry(default) is not None:
                gain = _recorded_gain(known)
                self._settle(problem, "recorded", record=known, gain=gain)
            else:
                missing.append(problem)
        return replace(group, problems=tuple(missing))

    def _prepare(self, group: Group, ahead: BuildAhead, waiting: Waiting) -> list[Row]:
        """Rows of a group's pool after build and verification; fewer where time is short."""
        rows: list[Row] = []
        results = ahead.results(group.pool)
        for index, (candidate, result) in enumerate(results.items()):
            if self._spare(waiting) <= 0 and sum(row.outcome.ok for row in rows) >= LEAST_VERIFIED:
                break
            self.progress.tell("verify", index, len(results), candidate.name)
            default = candidate in self._defaults
            row = self.prepared(candidate, result, self._digests[candidate], default=default)
            rows.append(row)
            if not row.outcome.ok and row.is_over:
                self._failures[candidate.name] = row.outcome
        return rows

    def verify(self, problem: Problem, row: Row, built: Built) -> Outcome:
        """Check a kernel, and keep count of how many were and how long it took."""
        self._verified += 1
        with self._timed("verify"):
            return super().verify(problem, row, built)

    def _settle_by_race(self, problem: Problem, rows: Sequence[Row]) -> None:
        default, legal = self.policy.untuned(problem), {*self.policy.legal(problem)}
        rows = [row for row in rows if row.candidate in legal or row.candidate == default]
        if default not in {row.candidate for row in rows}:
            return  # it was not built in time: left
        try:
            raced, interrupted = self.race(problem, rows, RACE_SECONDS)
        except LeaseError:
            return  # the GPU was not to be had in time
        except NoCandidateError as error:
            self._settle(problem, "failed", reason=str(error))
            return
        if interrupted:
            raise KeyboardInterrupt
        if not any(row.outcome.ok and row.is_over for row in raced):
            return  # the budget ended before a round did
        pick, gain = choose(raced, default)
        # With no gain nothing is faster, or the default does not run at all, so that anything that does is better.
        serving = default if gain else pick.candidate
        record = self.remember(problem, raced, serving, confirmed=not gain)
        log_outcomes(problem, self.policy.name, "measured", serving, raced)
        if self.printing:
            path = self.path(problem)
            print_ranking(problem, self.policy.name, "measured", raced, serving, path)
        if not gain:
            self._settle(problem, "measured", record=record, gain=gain)
            return
        self._settle(problem, "unconfirmed", record=record, gain=0.0)
        doubt = Doubt.of(problem, pick.candidate.name, default.name, built_by_name(raced))
        self._doubts.append((record, gain, doubt))

    def _settle(self, problem: Problem, status: Status, **more: Any) -> None:
        self._settled[problem] = Settled(problem=problem, status=status, **more)

    def _confirm(self) -> None:
        """Ask a second process about every doubt; a pick that it does not confirm leaves the default in its place."""
        asked, self._doubts = self._doubts, []
        self.progress.tell("confirm", 0, len(asked), f"{len(asked)} picks in a second process")
        with self._timed("confirm"):
            ratios = self.confirm([doubt for _, _, doubt in asked])
        for (record, gain, doubt), ratio in zip(asked, ratios, strict=True):
            if ratio is None:
                continue  # the default serves, and the next sweep asks again
            if not isinstance(ratio, Outcome) and ratio - 1.0 >= MIN_GAIN:
                record = replace(record, pick=doubt.pick[0])
            else:
                gain = 0.0
            record = self.records.put(replace(record, confirmed=True))
            self.journal(doubt.problem).end()
            self._settle(doubt.problem, "measured", record=record, gain=gain)
        self.progress.tell("confirm", len(asked), len(asked), "")


def _recorded_gain(record: TuningRecord) -> float | None:
    """The gain of a record's pick over its default, where both were timed in one run."""
    timed = [
        entry.measurement
        for entry in (record.entry(record.pick), record.entry(record.default))
        if entry is not None and entry.measurement is not None
    ]
    if len(timed) < 2 or timed[0].environment != timed[1].environment:
        return None
    return timed[1].ratio_to_best / timed[0].ratio_to_best - 1.0
