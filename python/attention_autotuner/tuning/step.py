"""The training step: both directions of one shape tuned, each with its own budget, then timed one after the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ..arch import Policy, resolve
from ..core.candidate import Candidate
from ..core.outcome import Outcome
from ..core.problem import Problem
from ..errors import UnsupportedArgumentError
from ..settings import Effort
from .arguments import check_listener, problem_of, settings_of
from .distributed import SharedSearch
from .journal import kernel_id
from .pipeline import Built, LocalPipeline, Pipeline
from .progress import Listener
from .racing import Race, Timing
from .records import JOURNALS, RecordStore
from .result import TuneResult, finite
from .search import tune
from .stages import Engine, built_of, source_digests

LOGGER = logging.getLogger(__name__)
STEP_SECONDS = 3.0  # of timing rounds of whole steps
PICKS, DEFAULTS = "picks", "defaults"
# Fields of a result about the step as a whole.
TIMED = ("source", "picks_us", "defaults_us", "gain", "tied", "reverted")

Source = Literal["measured", "predicted", "unknown"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of tuning a step.

    Attributes:
        forward: the forward search.
        backward: the backward search; None where Ctrl-C came before it.
        source: where the times come from: steps ``measured`` as wholes, estimates added up (``predicted``), or nowhere.
        picks_us: a step with both picks, microseconds.
        defaults_us: a step with both defaults; None where it is not known, e.g. because one of them does not build.
        gain: how much faster the step is with the picks than with the defaults, from paired rounds; None unless both
            were measured.
        tied: the two could not be told apart; None unless both were measured, and where they are one.
        reverted: the step was slower with the picks, here or on another rank of the group, so that both directions have
            their defaults back.
        interrupted: stopped by Ctrl-C; what is here is the best so far.
    """

    forward: TuneResult
    backward: TuneResult | None
    source: Source = "unknown"
    picks_us: float | None = None
    defaults_us: float | None = None
    gain: float | None = None
    tied: bool | None = None
    reverted: bool = False
    interrupted: bool = False

    @property
    def results(self) -> tuple[TuneResult, ...]:
        """The searches that ran."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form for the command line."""
        return {
            "forward": self.forward.to_json(),
            "backward": None if self.backward is None else self.backward.to_json(),
            "step": {name: getattr(self, name) for name in TIMED},
            "interrupted": self.interrupted,
        }


def problems_of_step(problem: Problem) -> tuple[Problem, Problem]:
    """The forward and the backward problem of a shape, given either of them; a form is the forward's alone."""
    return (
        replace(problem, direction="forward", deterministic=False),
        replace(problem, direction="backward", form="auto"),
    )


def tune_step(
    problem: Problem | None = None,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    effort: Effort | None = None,
    budget_seconds: float | None = None,
    backward_budget_seconds: float | None = None,
    top_k: int = 8,
    confirm: bool = True,
    group: Any = None,
    in_process: bool | None = None,
    listener: Listener | None = None,
    records: RecordStore | None = None,
    pipeline: Pipeline | None = None,
    **fields: Any,
) -> StepResult:
    """Find the fastest forward and the fastest backward kernel of a shape, and remember both as tuned for the step.

    Where a step with both picks is slower than one with the defaults, the defaults are recorded.

    The arguments are those of :func:`tune`, but for:

    Args:
        problem: of either direction; or give its fields by name, without ``direction``.
        device_type: see :func:`tune`.
        effort: see :func:`tune`.
        budget_seconds: wall time of the forward search. None takes the setting.
        backward_budget_seconds: wall time of the backward search. None is as much as the forward's.
        top_k: see :func:`tune`; for each direction.
        confirm: see :func:`tune`.
        group: see :func:`tune`; each rank times whole steps on its own GPU, and the worst rank decides.
        in_process: see :func:`tune`.
        listener: told about progress, each message with its direction.
        records: see :func:`tune`.
        pipeline: see :func:`tune`; it also times whole steps.
        fields: fields of the problem, when ``problem`` is not given; ``deterministic`` is about the backward.

    Raises:
        UnsupportedArgumentError, SettingsError, UnsupportedProblemError, UnsupportedArchitectureError,
            NoCandidateError, ToolchainError, StoreError, ArtifactError, BusyError, DistributedError: as :func:`tune`.
    """
    if "direction" in fields:
        raise UnsupportedArgumentError(
            f"a step has both directions, got direction={fields['direction']!r}"
        )
    if problem is None:
        fields["direction"] = "backward"
    problem = problem_of(problem, fields)
    check_listener(listener)
    settings = settings_of(
        top_k, effort=effort, budget_seconds=budget_seconds, in_process=in_process
    )
    settings_of(top_k, budget_seconds=backward_budget_seconds)
    policy = resolve(device_type)
    pipeline = pipeline or LocalPipeline(policy, settings)
    records = records or RecordStore(settings.cache_dir / "records")

    search = partial(
        tune,
        device_type=policy,
        effort=effort,
        top_k=top_k,
        confirm=confirm,
        group=group,
        for_step=True,
        listener=listener,
        records=records,
        pipeline=pipeline,
    )
    forward, backward = problems_of_step(problem)
    first = search(forward, budget_seconds=budget_seconds)
    if first.interrupted:
        return StepResult(forward=first, backward=None, interrupted=True)
    second = search(backward, budget_seconds=backward_budget_seconds or budget_seconds)
    result = StepResult(forward=first, backward=second, interrupted=second.interrupted)
    if second.interrupted:
        return result
    if "predicted" in (first.status, second.status):
        return replace(
            result,
            source="predicted",
            picks_us=_predicted_us(result, first.pick, second.pick),
            defaults_us=_predicted_us(result, first.default, second.default),
        )
    shared = SharedSearch(group, pipeline, records, second.problem, policy, ["step"])
    engine = Engine(
        policy=policy,
        pipeline=shared.pipeline,
        records=shared.records,
        fresh=settings.always_tune,
        alone=group is None,
    )
    with shared.joined(engine.measuring):
        result = _timed(result, first, second, engine)
        slower = result.gain is not None and result.gain < 0.0 and not result.tied
        if any(shared.exchange("step", slower)):
            return _reverted(result, first, second, shared.records)
    return result


def _reverted(
    result: StepResult, first: TuneResult, second: TuneResult, records: RecordStore
) -> StepResult:
    """The result with the defaults recorded as picks of both directions."""
    LOGGER.warning("the step is slower with the picks: the defaults serve both directions")
    halves = []
    for half in (first, second):
        assert half.record is not None
        record = replace(half.record, pick=half.default.name, confirmed=True)
        halves.append(replace(half, pick=half.default, gain=0.0, record=records.put(record)))
    return replace(result, forward=halves[0], backward=halves[1], reverted=True)


def _predicted_us(result: StepResult, *candidates: Candidate) -> float | None:
    """The model's times of candidates, added up; None where one is unknown or cannot run."""
    rows = [row for half in result.results for row in half.rows if row.outcome.ok]
    times = [row.estimate.us for row in rows if row.candidate in candidates]
    return finite(sum(times)) if len(times) == len(candidates) else None


def _timed(result: StepResult, first: TuneResult, second: TuneResult, engine: Engine) -> StepResult:
    """The result with the times of whole steps."""
    wanted = {PICKS: (first.pick, second.pick), DEFAULTS: (first.default, second.default)}
    if wanted[PICKS] == wanted[DEFAULTS]:
        del wanted[DEFAULTS]
    candidates = (candidate for pair in wanted.values() for candidate in pair)
    results = built_of(candidates, engine.pipeline)
    built = {c: result for c, result in results.items() if not isinstance(result, Outcome)}
    steps = {name: pair for name, pair in wanted.items() if all(c in built for c in pair)}
    if not steps:
        return result
    timings, interrupted = _raced(engine, second.problem, steps, built)
    by_name: dict[str, Timing] = {t.name: t for t in timings if t.outcome.ok and t.samples}
    for timing in timings:
        if not timing.outcome.ok:
            LOGGER.warning("the step with the %s was not timed: %s", timing.name, timing.outcome)
    picks, defaults = by_name.get(PICKS), by_name.get(DEFAULTS if DEFAULTS in wanted else PICKS)
    gain = tied = None
    if picks is not None and defaults is not None:
        gain = defaults.ratio_to_best / picks.ratio_to_best - 1.0
        tied = picks.tied and defaults.tied if picks is not defaults else None
    return replace(
        result,
        source="measured" if by_name else "unknown",
        picks_us=None if picks is None else picks.median_us,
        defaults_us=None if defaults is None else defaults.median_us,
        gain=gain,
        tied=tied,
        interrupted=interrupted,
    )


def _raced(
    engine: Engine,
    problem: Problem,
    steps: Mapping[str, tuple[Candidate, Candidate]],
    built: Mapping[Candidate, Built],
) -> tuple[list[Timing], bool]:
    """Time steps of a forward and a backward candidate, unless the journal of the backward problem has their race."""
    sources = source_digests(candidate for pair in steps.values() for candidate in pair)
    kernels = {
        name: "+".join(kernel_id(candidate.name, sources[candidate]) for candidate in pair)
        for name, pair in steps.items()
    }
    journal = engine.journal(problem, JOURNALS[1])
    history = journal.race(kernels)
    if journal.is_over(kernels.values()):
        return Race(list(steps), keep=steps, history=history).results(), False
    pairs = {name: (built[first], built[second]) for name, (first, second) in steps.items()}
    with engine.held():
        timings, interrupted = engine.pipeline.measure_steps(
            problem, pairs, budget_seconds=STEP_SECONDS, history=history
        )
    if not interrupted:
        journal.add_over(kernels.values())
    return timings, interrupted
