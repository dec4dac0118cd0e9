"""The search: candidates, estimates, builds, checks, timings, record.

Nothing is written as measured that was not: without a GPU a search ends after the build with a ranking marked
``predicted``. Ctrl-C keeps the best so far. The policy's default is replaced only for a gain of at least 1 %, which a
second, fresh process is asked to confirm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from math import inf
from pathlib import Path
from typing import Any

from .. import settings as settings_module
from ..arch import Policy, resolve
from ..codegen.render import RenderedKernel, render, unique
from ..codegen.source_digest import source_digest
from ..core.candidate import Candidate, Rejection
from ..core.outcome import Ok, Outcome, Serialized, Spilled
from ..core.problem import Problem
from ..errors import SettingsError
from ..kernels.cost_model import rank
from ..settings import Effort, Settings
from .failures import require_legal, require_usable
from .history import extended, recall, untried
from .pipeline import Built, Doubt, LocalPipeline, Pipeline, running
from .printing import LinePrinter, print_ranking
from .progress import Listener, Progress
from .record_schema import Purpose, TuningRecord
from .records import RecordStore
from .result import Row, Status, TuneResult, by_estimate, by_ratio, median_us
from .shortlist import shortlist
from .spills import SPILL_WORTH_TIMING, spilled_bytes
from .stages import MIN_GAIN as MIN_GAIN
from .stages import choose, examine, time_rows

ROUNDS_SECONDS = {"quick": 20.0, "full": 600.0}  # of timing, when nothing says otherwise


def tune(
    problem: Problem | None = None,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    effort: Effort | None = None,
    budget_seconds: float | None = None,
    top_k: int = 8,
    confirm: bool = True,
    for_step: bool = False,
    in_process: bool | None = None,
    listener: Listener | None = None,
    records: RecordStore | None = None,
    pipeline: Pipeline | None = None,
    **fields: Any,
) -> TuneResult:
    """Find the fastest kernel for a problem and remember it; :func:`tune_step` does it for both directions.

    Args:
        problem: what to tune for; or give its fields by name, e.g. ``seqlen_q=4096, causal=True``.
        device_type: a policy, its class or its name; None is the present GPU's.
        effort: ``none`` ranks only, ``quick`` builds and measures the model's best, ``full`` every legal candidate;
            None takes the setting.
        budget_seconds: wall time for the whole search; building that has begun is not cut short, measuring is. None
            takes the setting.
        top_k: how many candidates ``quick`` builds beside the default.
        confirm: let a second process confirm a gain before the default is replaced; without it the pick serves but is
            recorded as unconfirmed.
        for_step: record it as half of a training step.
        in_process: run candidates in this process, which one that faults ends; None takes the setting.
        listener: told about progress; None prints it, and the ranking, if the setting ``PRINT`` is on.
        records: where to remember; the settings' cache folder by default.
        pipeline: builds and measures; this machine by default.
        fields: fields of the problem, when ``problem`` is not given.

    Raises:
        TypeError: both ``problem`` and fields are given, or a field does not exist.
        SettingsError: ``effort``, ``budget_seconds`` or ``top_k`` is not among what is allowed.
        UnsupportedProblemError: the problem is outside what kernels here solve.
        UnsupportedArchitectureError: the policy is unknown, there is no GPU to ask for one, or the GPU here runs none
            of its kernels.
        NoCandidateError: nothing legal, or nothing that builds, verifies and runs; the message tabulates why.
        ToolchainError, StoreError: the compiler is missing; a folder cannot be written.
        ArtifactError: the process that runs candidates does not start.
    """
    problem = problem_of(problem, fields)
    settings = settings_of(effort, budget_seconds, top_k, in_process)
    policy = resolve(device_type)
    printer = LinePrinter() if listener is None and settings.print_tuning else None
    if printer is not None:
        listener = printer.listen
    pipeline = pipeline or LocalPipeline(policy, settings)
    search = _Search(
        problem=problem,
        purpose="step" if for_step else problem.direction,
        policy=running(policy, pipeline.environment),
        settings=settings,
        progress=Progress(listener, settings.budget_seconds),
        records=records or RecordStore(settings.cache_dir / "records"),
        pipeline=pipeline,
    )
    result = search.run(top_k=top_k, confirm=confirm)
    if printer is not None:
        print_ranking(result)
    return result


def problem_of(problem: Problem | None, fields: Mapping[str, Any]) -> Problem:
    """The problem of a call that names it whole or by its fields.

    Raises:
        TypeError: it names both, or a field does not exist.
        UnsupportedProblemError: the problem is outside what kernels here solve.
    """
    if problem is not None and fields:
        raise TypeError(f"give a problem or its fields, not both: {sorted(fields)}")
    known = [field.name for field in dataclass_fields(Problem)]
    for name in fields:
        if name not in known:
            raise TypeError(f"a problem has no field {name!r}; its fields: {', '.join(known)}")
    return Problem(**fields) if problem is None else problem


def settings_of(
    effort: Effort | None,
    budget_seconds: float | None,
    top_k: int,
    in_process: bool | None = None,
) -> Settings:
    """The settings in force, with the arguments of a search in their place.

    Raises:
        SettingsError: an argument is not among what is allowed.
    """
    if type(top_k) is not int or top_k < 0:  # nor a bool
        raise SettingsError(f"top_k={top_k!r}: must be an integer of at least 0")
    changes: dict[str, Any] = {
        "effort": effort,
        "budget_seconds": budget_seconds,
        "in_process": in_process,
    }
    return replace(
        settings_module.current(),
        **{name: value for name, value in changes.items() if value is not None},
    )


@dataclass(kw_only=True)
class _Search:
    """One run of :func:`tune`; its methods are the steps, in order."""

    problem: Problem
    purpose: Purpose
    policy: Policy
    settings: Settings
    progress: Progress
    records: RecordStore
    pipeline: Pipeline
    interrupted: bool = False

    def run(self, *, top_k: int, confirm: bool) -> TuneResult:
        """The whole search."""
        self.default = self.policy.default(self.problem)
        ranked = rank(self.problem, self._legal(), self.policy.spec)
        best_us = ranked[0][1].us
        self.progress.tell("rank", len(ranked), len(ranked), f"{len(ranked)} candidates", best_us)
        chosen = ranked
        if self.settings.effort != "full":
            chosen = shortlist(ranked, self.default, top_k)
        rows = [Row(candidate=c, estimate=e, outcome=Ok()) for c, e in chosen]
        if self.settings.effort == "none":
            return self._predicted(rows)
        kernels = unique(render(row.candidate) for row in rows)
        digests = {kernel.name: source_digest(kernel) for kernel in kernels}
        rows = [
            replace(row, source_digest=digests[row.candidate.name])
            for row in rows
            if row.candidate.name in digests
        ]
        known = self._known(digests)
        if known is not None and all(known.entry(row.candidate.name) for row in rows):
            return self._recorded(known, rows)
        if known is not None:
            rows = untried(rows, known, {known.pick, self.default.name})
        built, rows = self._build(kernels, rows)
        if self.interrupted or not self.pipeline.can_measure():
            return self._predicted(rows)
        rows = self._verify(built, [self._admit_default(row) for row in rows])
        return self._decide(built, self._measure(built, rows), known, confirm)

    # --- before the GPU ----------------------------------------------------------------------------

    def _legal(self) -> list[Candidate]:
        offered = self.policy.candidates(self.problem)
        legal = [entry for entry in offered if isinstance(entry, Candidate)]
        rejections = (entry for entry in offered if isinstance(entry, Rejection))
        require_legal(self.problem, self.policy.name, legal, rejections)
        return legal

    def _known(self, digests: dict[str, str]) -> TuningRecord | None:
        if self.settings.always_tune or not self.pipeline.can_measure():
            return None
        return recall(self.records, self.problem, self.policy, self.pipeline.environment, digests)

    def _build(
        self, kernels: Sequence[RenderedKernel], rows: list[Row]
    ) -> tuple[dict[str, Built], list[Row]]:
        wanted = {row.candidate.name for row in rows}
        kernels = [kernel for kernel in kernels if kernel.name in wanted]

        def progress(done: int, total: int, message: str) -> None:
            self.progress.tell("build", done, total, message)

        results: Sequence[Built | Outcome] = ()
        try:
            results = self.pipeline.build(kernels, progress)
        except KeyboardInterrupt:
            self.interrupted = True
        by_name = dict(zip((kernel.name for kernel in kernels), results, strict=False))
        timed = self.pipeline.can_measure()
        built: dict[str, Built] = {}
        refined: list[Row] = []
        for row in rows:
            result = by_name.get(row.candidate.name)
            if isinstance(result, Outcome):
                row = replace(row, outcome=result)
            elif result is not None:
                built[row.candidate.name] = result
                row = examine(self.problem, row, result, self.policy, timed=timed)
            refined.append(row)
        # A kernel that spills or waits is better than none, and a few bytes are better than many.
        for limit in (SPILL_WORTH_TIMING, inf):
            if not any(row.outcome.ok for row in refined):
                refined = [
                    replace(row, outcome=Ok())
                    if isinstance(row.outcome, (Spilled, Serialized))
                    and spilled_bytes(built[row.candidate.name].report) <= limit
                    else row
                    for row in refined
                ]
        require_usable(self.problem, self.policy.name, refined)
        return built, sorted(refined, key=by_estimate)

    def _admit_default(self, row: Row) -> Row:
        """The default is timed even if it spills: it serves untuned callers, its time is what others must beat."""
        slow = isinstance(row.outcome, (Spilled, Serialized)) and row.candidate == self.default
        return replace(row, outcome=Ok()) if slow else row

    # --- on the GPU --------------------------------------------------------------------------------

    def _verify(self, built: dict[str, Built], rows: list[Row]) -> list[Row]:
        checked: list[Row] = []
        for index, row in enumerate(rows):
            self.progress.tell("verify", index, len(rows), row.candidate.name)
            if row.outcome.ok and not self.interrupted:
                try:
                    outcome = self.pipeline.verify(
                        self.problem,
                        built[row.candidate.name],
                        deterministic=row.candidate.deterministic,
                    )
                    row = replace(row, outcome=outcome)
                except KeyboardInterrupt:
                    self.interrupted = True
            checked.append(row)
        require_usable(self.problem, self.policy.name, checked)
        return checked

    def _measure(self, built: dict[str, Built], rows: list[Row]) -> list[Row]:
        if self.interrupted:
            return rows
        count = sum(row.outcome.ok for row in rows)

        def on_round(rounds: int, running: list[str]) -> None:
            self.progress.tell("measure", rounds, rounds, f"{len(running)} of {count} in the race")

        seconds = self.progress.seconds_for_rounds(ROUNDS_SECONDS[self.settings.effort])
        measured, self.interrupted = time_rows(
            self.problem, self.default, rows, built, self.pipeline, seconds, on_round
        )
        require_usable(self.problem, self.policy.name, measured)
        return measured

    def _decide(
        self,
        built: dict[str, Built],
        rows: list[Row],
        known: TuningRecord | None,
        confirm: bool,
    ) -> TuneResult:
        timed = [row for row in rows if row.outcome.ok and row.timing is not None]
        if not timed:
            return self._predicted(rows)
        pick, gain = choose(timed, self.default)
        if not gain:
            return self._finish(rows, pick, gain, True, known)
        if not confirm or self.interrupted:
            return self._finish(rows, pick, gain, False, known)
        self.progress.tell("confirm", 0, 1, pick.candidate.name, median_us(pick))
        names = (pick.candidate.name, self.default.name)
        (ratio,) = self.pipeline.confirm_all([Doubt.of(self.problem, *names, built)])
        if isinstance(ratio, Outcome):  # of the pick: not what should serve
            rows = [replace(row, outcome=ratio) if row is pick else row for row in rows]
            return self._decide(built, rows, known, confirm)
        if ratio is not None and ratio - 1.0 < MIN_GAIN:
            base = next(row for row in timed if row.candidate == self.default)
            return self._finish(rows, base, 0.0, True, known)
        return self._finish(rows, pick, gain, ratio is not None, known)

    # --- the end -----------------------------------------------------------------------------------

    def _finish(
        self,
        rows: list[Row],
        pick: Row,
        gain: float | None,
        confirmed: bool,
        known: TuningRecord | None,
    ) -> TuneResult:
        record = extended(
            known,
            rows,
            self.problem,
            self.policy,
            self.pipeline.environment,
            pick=pick.candidate,
            default=self.default,
            confirmed=confirmed,
            purpose=self.purpose,
        )
        record, path = self.records.put(record), self._record_path()
        self.progress.tell("record", 1, 1, str(path), median_us(pick))
        return self._result(
            "measured",
            pick.candidate,
            rows,
            gain=gain,
            confirmed=confirmed,
            record=record,
            record_path=path,
        )

    def _predicted(self, rows: list[Row]) -> TuneResult:
        """The model's ranking; the default serves where an interrupted search knows nothing of the rest."""
        good = [row for row in rows if row.outcome.ok]
        pick = self.default if self.interrupted or not good else good[0].candidate
        return self._result("predicted", pick, rows)

    def _recorded(self, known: TuningRecord, rows: list[Row]) -> TuneResult:
        entries = {entry.candidate.name: entry for entry in known.entries}
        rows = [row.recorded(entries[row.candidate.name]) for row in rows]
        if known.purpose != self.purpose:
            known = self.records.put(replace(known, purpose=self.purpose))
        return self._result(
            "recorded",
            known.candidate,
            sorted(rows, key=by_ratio),
            confirmed=known.confirmed,
            record=known,
            record_path=self._record_path(),
        )

    def _result(self, status: Status, pick: Candidate, rows: list[Row], **more: Any) -> TuneResult:
        return TuneResult(
            problem=self.problem,
            arch=self.policy.name,
            status=status,
            pick=pick,
            default=self.default,
            rows=tuple(rows),
            interrupted=self.interrupted,
            seconds=self.progress.elapsed_seconds,
            **more,
        )

    def _record_path(self) -> Path:
        gpu_name = self.pipeline.environment.gpu_name
        return self.records.path(self.problem, self.policy.name, gpu_name)
