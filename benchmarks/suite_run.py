"""The cases of suites against their peers: built first, verified, raced, and written down as they are done.

Nothing is tuned: what is timed is what dispatch would run. A peer that breaks is a reason in its row; a trial that
breaks, and one that the time does not suffice for, is listed as not measured with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from attention_autotuner.arch import Policy
from attention_autotuner.codegen.render import render
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.errors import AttentionAutotunerError
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.pipeline import Pipeline

from .comparison import CLOCKS, MeetingRace, RacingMeasurer, Results, Say, contests, describe
from .confidence import interval
from .implementations import Implementation
from .rivals import (
    AUTOGRAD,
    DETERMINISTIC,
    PICK,
    STEP,
    Meeting,
    Rivals,
    forward_of,
    rivals_of,
)
from .suites import Trial

SCHEMA = 1
ALONE = ("default", "gain_over_default")  # of a row, where a default is in the race


@dataclass(kw_only=True)
class Run:
    """What a run is given.

    Attributes:
        trials: what is measured, in this order.
        peers: whom our kernels meet.
        policy: whose picks.
        pipeline: builds and verifies.
        measurer: times.
        seconds: of rounds a trial.
        budget_seconds: of wall time from ``started`` on; None is no limit.
        device_type: for what is called as a program would call it.
        environment: read after each race.
        alive: whether the GPU still answers; asked after each race.
        say: told one line at a time.
        jobs: processes that peers may compile with.
        clock: seconds.
        started: when the time began to count, by ``clock``.
    """

    trials: Sequence[Trial]
    peers: Sequence[Implementation]
    policy: Policy
    pipeline: Pipeline
    measurer: RacingMeasurer
    seconds: float
    budget_seconds: float | None
    device_type: str | None
    environment: Callable[[], Environment]
    alive: Callable[[], bool]
    say: Say
    jobs: int = 1
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    _taken: list[float] = field(default_factory=list, init=False)

    def asked(self, trial: Trial) -> list[Implementation]:
        """The peers that compute a trial's operation."""
        return [each for each in self.peers if each.op == trial.problem.op]

    def get_ready(self) -> None:
        """What peers compile before the first race, for all trials at once; one that cannot will say so in its rows."""
        with ThreadPoolExecutor() as pool:
            started: dict[str, Future[None]] = {}
            for each in self.peers:
                met = [t.problem for t in self.trials if each.can_run(t.problem) is None]
                if each.ready is not None and met:
                    self.say(f"{each.name} gets ready for {len(met)} problems")
                    problems = list(dict.fromkeys(met))
                    started[each.name] = pool.submit(each.ready, problems, self.jobs)
            for name, one in started.items():
                error = one.exception()
                self.say(f"{name} is ready" if error is None else f"{name} is not ready: {error}")

    def rows(self) -> Iterator[tuple[Trial, dict[str, Any] | str]]:
        """Every trial with its row, or why it has none.

        A trial is not begun where what one takes on the average does not fit into what is left of the budget.
        """
        meetings: dict[str, Meeting | str] = {
            t.key: _attempt(self._meeting, t) for t in self.trials
        }
        wanted = [
            one for m in meetings.values() if isinstance(m, Meeting) for one in m.candidates()
        ]
        wanted = list(dict.fromkeys(wanted))
        self.say(f"{len(wanted)} kernels to have built")
        with ThreadPoolExecutor(1) as beside:
            ready = beside.submit(self.get_ready)
            results = self.pipeline.build(
                [render(one) for one in wanted], lambda done, total, message: None
            )
            self.say(f"{sum(not isinstance(each, Outcome) for each in results)} are there")
            ready.result()
        built = dict(zip(wanted, results, strict=True))
        stopped = ""
        for trial in self.trials:
            stopped = stopped or self._overdue()
            meeting = meetings[trial.key]
            if stopped or isinstance(meeting, str):
                yield trial, stopped or str(meeting)
                continue
            began = self.clock()
            try:
                row = _attempt(self._row, trial, meeting, built)
            except KeyboardInterrupt:
                stopped = "the run was interrupted"
                row = stopped
            self._taken.append(self.clock() - began)
            yield trial, row
            if not stopped and not self.alive():
                stopped = f"the GPU stopped answering in {trial.key}"

    def _overdue(self) -> str:
        if self.budget_seconds is None:
            return ""
        left = self.budget_seconds - (self.clock() - self.started)
        usual = fmean(self._taken) if self._taken else 0.0
        return "" if left > usual else f"the {self.budget_seconds:g} s were used up"

    def _meeting(self, trial: Trial) -> Meeting:
        plain = _alone(rivals_of(trial.problem, self.policy))
        if trial.way != "step":
            return Meeting(plain=plain)
        opening = _alone(rivals_of(forward_of(trial.problem), self.policy))
        return Meeting(plain=plain, opening=opening)

    def _row(self, trial: Trial, meeting: Meeting, built: Results) -> dict[str, Any]:
        met = {each.name: each.peer(trial.problem, trial.way) for each in self.asked(trial)}
        mine = own_label(trial)
        race = MeetingRace(meeting, met, self.pipeline, built, self.device_type, also=(mine,))
        row = race.row(self.measurer, self.seconds)
        for name in ALONE:
            row.pop(name)
        found = {name: labels for name, labels in contests(met).items() if name != DETERMINISTIC}
        for each in row["ratios"].values():
            each["low"], each["high"] = interval(each["ratio"], each["error"])
        environment = self.environment()
        clocks = environment.to_json()
        row |= {
            "key": trial.key,
            "case": trial.case.name,
            "title": trial.case.title,
            "source": trial.case.source,
            "way": trial.way,
            "ours": mine,
            "contests": {name: list(labels) for name, labels in found.items()},
            "clocks": {name: clocks[name] for name in CLOCKS},
        }
        self.say(f"{trial.way}, {describe(row)}")
        return row


def own_label(trial: Trial) -> str:
    """The label of ours whose figure stands for a trial, whoever is met.

    A step of attention is two kernels; other operations are called as a program calls them.
    """
    if trial.way != "step":
        return PICK
    return STEP if trial.problem.op == "attention" else AUTOGRAD


def _alone(rivals: Rivals) -> Rivals:
    """A pick without the default beside it: nothing is decided here."""
    return Rivals(problem=rivals.problem, pick=rivals.pick, layer=rivals.layer, default=rivals.pick)


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function answers, or the error as a sentence."""
    try:
        return function(*arguments)
    except (AttentionAutotunerError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
