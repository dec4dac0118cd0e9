"""The trials of a run: kernels built first, verified, raced with the baselines, and handed on as they are done.

What is timed is what dispatch would run. A baseline that fails is a reason in its row; a trial that fails, and one that
the time does not suffice for, has a reason in place of a row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from attention_autotuner.arch import Policy
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import AttentionAutotunerError
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.measure import InProcessMeasurer
from attention_autotuner.tuning.pipeline import Pipeline
from attention_autotuner.tuning.stages import built_of

from .baselines import BASELINES
from .baselines.base import Baseline
from .comparison import Comparison, Inspect, describe, opponents_of
from .contenders import AUTOGRAD, DETERMINISTIC, PICK, STEP, Contenders, Results, contenders_of
from .suites import Trial

CLOCKS = ("sm_clock_mhz", "power_draw_w", "temperature_c")  # of the environment, a row


@dataclass(kw_only=True)
class Session:
    """A run's trials and what they are measured with.

    Attributes:
        trials: what is measured, in this order.
        baselines: what our kernels are compared with; None leaves it to each trial's suite.
        extra: names of baselines that are raced beside the suite's.
        policy: whose picks.
        pipeline: builds and verifies.
        measurer: times.
        seconds: of rounds a trial; None leaves it to the suite.
        budget_seconds: of wall time from ``started`` on; None is no limit.
        device_type: for what is called as a program would call it.
        environment: read after each race.
        alive: whether the GPU still answers; asked after each race.
        say: takes one line of progress at a time.
        defaults: race the defaults where a suite settles records.
        inspect: takes what is not a time about two calls, where a suite asks for that.
        jobs: processes that baselines may compile with.
        clock: seconds.
        started: when the time began to count, by ``clock``.
    """

    trials: Sequence[Trial]
    policy: Policy
    pipeline: Pipeline
    measurer: InProcessMeasurer
    environment: Callable[[], Environment]
    alive: Callable[[], bool]
    say: Callable[[str], None]
    baselines: Sequence[Baseline] | None = None
    extra: Sequence[str] = ()
    seconds: float | None = None
    budget_seconds: float | None = None
    device_type: str | None = None
    defaults: bool = True
    inspect: Inspect | None = None
    jobs: int = 1
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    _durations: list[float] = field(default_factory=list, init=False)

    def baselines_of(self, trial: Trial) -> list[Baseline]:
        """The baselines that a trial is raced with."""
        if self.baselines is not None:
            return list(self.baselines)
        names = {*(trial.suite.baselines or BASELINES), *self.extra}
        return [baseline for name, baseline in BASELINES.items() if name in names]

    def get_ready(self) -> None:
        """Have baselines compile before the first race, for all trials at once; a failure shows in its rows."""
        problems: dict[Baseline, dict[Problem, None]] = {}
        for trial in self.trials:
            for baseline in self.baselines_of(trial):
                if not baseline.available(trial.problem):
                    problems.setdefault(baseline, {}).setdefault(trial.problem)
        with ThreadPoolExecutor() as pool:
            started = {
                baseline.name: pool.submit(baseline.get_ready, list(wanted), self.jobs)
                for baseline, wanted in problems.items()
            }
            for name, future in started.items():
                if error := future.exception():
                    self.say(f"{name} is not ready: {error}")

    def rows(self) -> Iterator[tuple[Trial, dict[str, Any] | str]]:
        """Every trial with its row, or why it has none.

        A trial is not begun where what one takes on the average does not fit into what is left of the budget.
        """
        contenders = [_attempt(self._contenders, trial) for trial in self.trials]
        raced = [c for c in contenders if isinstance(c, Contenders)]
        built = self._build([*raced, *self._simpler()])
        stopped = ""
        for trial, entrants in zip(self.trials, contenders, strict=True):
            stopped = stopped or self._overdue()
            if stopped or isinstance(entrants, str):
                yield trial, stopped or str(entrants)
                continue
            began = self.clock()
            try:
                row = _attempt(self._row, trial, entrants, built)
            except KeyboardInterrupt:
                stopped = "the run was interrupted"
                row = stopped
            self._durations.append(self.clock() - began)
            yield trial, row
            if not stopped and not self.alive():
                stopped = f"the GPU stopped answering in {trial.key}"

    def _simpler(self) -> list[Contenders]:
        """Our kernels on the problems that baselines of ours run, for all trials; a failure shows in its rows."""
        problems = dict.fromkeys(
            baseline.simpler(trial.problem)
            for trial in self.trials
            for baseline in self.baselines_of(trial)
            if not baseline.available(trial.problem)
        )
        entrants = [
            _attempt(partial(contenders_of, defaults=False), problem, self.policy)
            for problem in problems
            if problem is not None
        ]
        return [contenders for contenders in entrants if isinstance(contenders, Contenders)]

    def _build(self, contenders: Sequence[Contenders]) -> Results:
        """Every kernel in one batch, while the baselines get ready."""
        wanted = dict.fromkeys(c for entrants in contenders for c in entrants.candidates())
        self.say(f"{len(wanted)} kernels to build")
        with ThreadPoolExecutor(1) as pool:
            ready = pool.submit(self.get_ready)
            built = built_of(wanted, self.pipeline)
            self.say(f"{sum(not isinstance(r, Outcome) for r in built.values())} kernels are built")
            ready.result()
        return built

    def _overdue(self) -> str:
        if self.budget_seconds is None:
            return ""
        left = self.budget_seconds - (self.clock() - self.started)
        usual = fmean(self._durations) if self._durations else 0.0
        return "" if left > usual else f"the {self.budget_seconds:g} s were used up"

    def _contenders(self, trial: Trial) -> Contenders:
        defaults = self.defaults and trial.suite.tuning is not None
        contenders = contenders_of(trial.problem, self.policy, defaults=defaults)
        return contenders if "step" in trial.modes else replace(contenders, forward=None)

    def _row(self, trial: Trial, contenders: Contenders, built: Results) -> dict[str, Any]:
        label = our_label(trial)
        opponents = [
            opponent
            for opponent in opponents_of(trial.problem, trial.modes, self.baselines_of(trial))
            # Where our deterministic mode is not raced, nothing is there to compare with.
            if opponent.ours != DETERMINISTIC or contenders.deterministic is not None
        ]
        race = Comparison(
            contenders,
            opponents,
            self.pipeline,
            built,
            self.device_type,
            also=(label,),
            lengths=trial.suite.lengths,
        )
        seconds = trial.suite.seconds if self.seconds is None else self.seconds
        row = race.row(self.measurer, seconds, self.inspect if trial.suite.inspects else None)
        environment = self.environment().to_json()
        self.say(f"{', '.join(trial.modes)}: {describe(trial.problem, row)}")
        return {
            "key": trial.key,
            "case": trial.case.name,
            "title": trial.case.title,
            "modes": list(trial.modes),
            "ours": label,
            "problem": json.loads(json.dumps(asdict(trial.problem))),
            **row,
            "clocks": {name: environment[name] for name in CLOCKS},
        }


def our_label(trial: Trial) -> str:
    """The label of ours whose figure stands for a trial, whatever it is compared with.

    A step of attention is two kernels; other operations are called as a program calls them.
    """
    if trial.modes[0] in ("forward", "backward"):
        return PICK
    return STEP if trial.modes[0] == "step" and trial.problem.op == "attention" else AUTOGRAD


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or its error as a sentence."""
    try:
        return function(*arguments)
    except (AttentionAutotunerError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
