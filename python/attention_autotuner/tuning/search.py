"""The search: candidates, estimates, builds, checks, timings, record.

Nothing is written as measured that was not: without a GPU a search ends after the build with a ranking marked
``predicted``. Ctrl-C keeps the best so far, and so does the end of a budget: what promises most is built, checked and
timed first. The policy's default is replaced only for a gain of at least 1 %, which a second, fresh process is asked to
confirm. Of several processes that search for one problem one does, and the others take its record.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ..arch import Policy, resolve
from ..codegen.render import RenderedKernel, render
from ..codegen.source_digest import source_digest
from ..core.candidate import Candidate
from ..core.outcome import Infeasible, Ok, Outcome, Serialized, Spilled
from ..core.problem import Problem
from ..errors import LeaseError
from ..settings import Effort, Settings
from .arguments import check_listener, problem_of, settings_of
from .distributed import SAME_ON_ALL_RANKS, SharedSearch
from .pipeline import Built, Doubt, LocalPipeline, Pipeline, running
from .printing import print_ranking, printed
from .progress import Listener, Progress
from .ranking import learned, order, ranked
from .record_schema import Purpose, TuningRecord
from .records import RecordStore
from .result import (
    Row,
    Status,
    TuneResult,
    by_estimate,
    by_ratio,
    is_cut_short,
    median_us,
    postponed,
)
from .shortlist import shortlist
from .spills import SPILL_WORTH_TIMING, spilled_bytes
from .stages import MIN_GAIN, Engine, built_by_name, choose, log_outcomes, require_usable

ROUNDS_SECONDS = {"quick": 20.0, "full": 600.0}  # of timing, when nothing says otherwise
# Of a budget, kept for what comes after the builds and after the checks: a race and its confirmation, and for a kernel
# its check and its first launches in the race.
FINISH_SECONDS, FINISH_SHARE = 7.0, 0.35
CONFIRM_SECONDS, CONFIRM_SHARE = 4.0, 0.2
CHECK_SECONDS, SET_UP_SECONDS = 0.5, 0.15


def tune(
    problem: Problem | None = None,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    effort: Effort | None = None,
    budget_seconds: float | None = None,
    top_k: int = 8,
    confirm: bool = True,
    group: Any = None,
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
        budget_seconds: wall time for the whole search: compilers that still run are ended, what promises most goes
            first, and the best so far is recorded. None takes the setting.
        top_k: how many candidates ``quick`` builds beside the default.
        confirm: let a second process confirm a gain before the default is replaced; without it the pick serves but is
            recorded as unconfirmed.
        group: a ``torch.distributed`` process group whose ranks all make this call and share the work, each on its own
            GPU: the pick is the same on all. None tunes in this process alone.
        for_step: record it as half of a training step, and name its direction in each message.
        in_process: run candidates in this process, which one that faults ends; None takes the setting.
        listener: told about progress, which the setting ``PRINT`` prints beside that, and the ranking.
        records: where to remember; the settings' cache folder by default.
        pipeline: builds and measures; this machine by default.
        fields: fields of the problem, when ``problem`` is not given. Left out, ``heads_kv``, ``seqlen_k`` and ``dim_v``
            are as ``heads_q``, ``seqlen_q`` and ``dim_qk``; a dtype may be PyTorch's.

    Raises:
        UnsupportedArgumentError: ``problem`` and fields are there, or one that does not exist; no function as listener.
        SettingsError: ``effort``, ``budget_seconds`` or ``top_k`` is not among what is allowed.
        UnsupportedProblemError: the problem is outside what kernels here solve.
        UnsupportedArchitectureError: the policy is unknown, there is no GPU to ask for one, or the GPU here runs none
            of its kernels.
        NoCandidateError: nothing is legal, or nothing builds, verifies and runs: then the message tabulates why.
        ToolchainError, StoreError: the compiler is missing; a folder cannot be written.
        ArtifactError: the process that runs candidates does not start.
        BusyError: the GPU is at work for others, or takes no second process.
        MissingPackageError: cupy is missing, which the process that runs candidates needs.
        DistributedError: another rank of the group failed, is gone, or does something else.
    """
    problem = problem_of(problem, fields)
    check_listener(listener)
    settings = settings_of(
        top_k, effort=effort, budget_seconds=budget_seconds, in_process=in_process
    )
    policy = resolve(device_type)
    shared = SharedSearch(
        group,
        pipeline or LocalPipeline(policy, settings),
        records or RecordStore(settings.cache_dir / "records"),
        problem,
        policy,
        [for_step, top_k, confirm, *(getattr(settings, name) for name in SAME_ON_ALL_RANKS)],
    )
    search = _Search(
        problem=problem,
        purpose="step" if for_step else problem.direction,
        policy=running(policy, shared.pipeline.environment),
        settings=settings,
        progress=Progress(
            printed(listener) if settings.print_tuning else listener,
            settings.budget_seconds,
            prefix=shared.prefix + f"{problem.direction}: " if for_step else shared.prefix,
        ),
        records=shared.records,
        pipeline=shared.pipeline,
        fresh=settings.always_tune,
        alone=group is None,
        group=shared,
    )
    with shared.joined(search.measuring):
        if settings.budget_seconds is not None:
            search.deadline = time.monotonic() + settings.budget_seconds
        result = search.run(top_k=top_k, confirm=confirm)
    if settings.print_tuning:
        print_ranking(
            problem, result.arch, result.status, result.rows, result.pick, result.record_path
        )
    return result


@dataclass(kw_only=True)
class _Search(Engine):
    """One run of :func:`tune`; its methods are the steps, in order."""

    problem: Problem
    purpose: Purpose
    settings: Settings
    group: SharedSearch
    interrupted: bool = False

    def run(self, *, top_k: int, confirm: bool) -> TuneResult:
        """The whole search."""
        self.default = self.policy.untuned(self.problem)
        offered = ranked(self.problem, self.policy)
        best_us = min(expected.us for _, expected in offered)
        self.progress.tell(
            "rank", len(offered), len(offered), f"{len(offered)} candidates", best_us
        )
        chosen = offered
        if self.settings.effort != "full":
            chosen = shortlist(offered, self.default, top_k)
        rows = [Row(candidate=c, estimate=e, outcome=Ok()) for c, e in chosen]
        if self.settings.effort == "none":
            return self._predicted(rows)
        kernels = [render(c) for c in dict.fromkeys(row.candidate.compiled for row in rows)]
        sources = {kernel.name: source_digest(kernel) for kernel in kernels}
        digests = {row.candidate.name: sources[row.candidate.compiled.name] for row in rows}
        rows = [replace(row, source_digest=digests[row.candidate.name]) for row in rows]
        if not self.pipeline.can_measure():
            return self._predicted(self._build(kernels, rows))
        known = self._known(digests)
        if known is not None and all(known.entry(row.candidate.name) for row in rows):
            return self._recorded(known, rows)
        path = self.path(self.problem).with_suffix(".search.lease")
        try:
            lease = self.leased(path, self._tell_of_another) if self.alone else nullcontext()
        except LeaseError as error:
            return self._predicted(postponed(rows, str(error)))
        with lease:
            return self._measured(kernels, rows, digests, confirm)

    def _tell_of_another(self) -> None:
        self.progress.tell("rank", 0, 1, "another process searches for this problem")

    def _measured(
        self,
        kernels: Sequence[RenderedKernel],
        rows: list[Row],
        digests: dict[str, str],
        confirm: bool,
    ) -> TuneResult:
        """The search on the GPU, unless another process has finished it meanwhile."""
        known = self._known(digests)
        if known is not None and all(known.entry(row.candidate.name) for row in rows):
            return self._recorded(known, rows)
        if known is not None:
            anchors = {known.pick, self.default.name}
            rows = [
                row
                for row in rows
                if row.candidate.name in anchors or not known.entry(row.candidate.name)
            ]
        rows = self._build(kernels, rows)
        if not self.interrupted:
            rows = self._verify(rows)
        if not self.interrupted and not is_cut_short(rows):
            rows = self._race(rows, confirm)
        timed = [row for row in rows if row.outcome.ok and row.is_over]
        return self._decide(rows, timed, confirm) if timed else self._predicted(rows)

    # --- before the GPU ----------------------------------------------------------------------------

    def _known(self, digests: dict[str, str]) -> TuningRecord | None:
        return None if self.fresh else self.recall(self.problem, digests)

    def _build(self, kernels: Sequence[RenderedKernel], rows: list[Row]) -> list[Row]:
        order = {row.candidate.compiled.name: place for place, row in enumerate(rows)}
        order[self.default.compiled.name] = -1  # its time is what others must beat
        kernels = sorted(
            (kernel for kernel in kernels if kernel.name in order), key=lambda k: order[k.name]
        )
        if self.settings.budget_seconds is not None:  # more could not be checked in time
            kernels = kernels[: 1 + int(self.settings.budget_seconds / CHECK_SECONDS)]
        timed, built = self.pipeline.can_measure(), 0

        def progress(done: int, total: int, name: str, seconds: float) -> None:
            nonlocal built
            built = done
            self.on_built(done, total, name, seconds)
            self.journal(self.problem).write(built=name, seconds=seconds)

        def stop() -> bool:
            """True when the time left is what checks and a race of the kernels so far will take."""
            needed = self._reserve(FINISH_SECONDS, FINISH_SHARE) if timed and built else 0.0
            return self.seconds_left <= needed + built * (CHECK_SECONDS + SET_UP_SECONDS)

        for kernel in kernels:
            self.progress.happened("build_started", kernel.name)
        results: Sequence[Built | Outcome] = ()
        try:
            results = self.pipeline.build(kernels, progress, stop)
        except KeyboardInterrupt:
            self.interrupted = True
        by_name = dict(zip((kernel.name for kernel in kernels), results, strict=False))
        refined: list[Row] = []
        for row in rows:
            result = by_name.get(row.candidate.compiled.name)
            if result is not None:
                row = self.examine(self.problem, row, result, timed=timed)
            elif not self.interrupted:
                (row,) = postponed([row], "the budget does not suffice for so many kernels")
            refined.append(row)
        refined = self._distinct(refined)
        # A kernel that spills or waits is better than none, and a few bytes are better than many.
        for limit in (SPILL_WORTH_TIMING, inf):
            if not any(row.outcome.ok for row in refined):
                refined = [self._admitted(row, limit) for row in refined]
        if not is_cut_short(refined):
            require_usable(self.problem, self.policy.name, refined)
        return sorted(refined, key=by_estimate)

    def _distinct(self, rows: Sequence[Row]) -> list[Row]:
        """Rows without those whose machine code and launch knobs another one has already, the default first."""
        first: dict[tuple[str, ...], str] = {}
        distinct = []
        for row in sorted(rows, key=lambda row: row.candidate != self.default):
            name, built = row.candidate.name, row.built
            if row.outcome.ok and built and built.code_digest and built.host_digest:
                # The host's, too: it orders the CTAs, and says how many stay.
                code = (built.code_digest, built.host_digest, str(row.candidate.launch_knobs))
                same = first.setdefault(code, name)
                if same != name:
                    row = self.ended(row, Infeasible(reason=f"the same machine code as {same}"))
            distinct.append(row)
        return distinct

    def _reserve(self, seconds: float, share: float) -> float:
        """Seconds of the budget to keep: as many, or a share of a small budget."""
        return min(seconds, share * (self.settings.budget_seconds or inf))

    def _admitted(self, row: Row, limit: float = inf) -> Row:
        """A row that takes part although its compiler says that it is slow, if it spills no more bytes than a limit."""
        if row.built is None or not isinstance(row.outcome, (Spilled, Serialized)):
            return row
        return row if spilled_bytes(row.built.report) > limit else replace(row, outcome=Ok())

    # --- on the GPU --------------------------------------------------------------------------------

    def _verify(self, rows: list[Row]) -> list[Row]:
        checked: list[Row] = []
        rows = sorted(rows, key=lambda row: row.candidate != self.default)
        for index, row in enumerate(rows):
            self.progress.tell("verify", index, len(rows), row.candidate.name)
            if row.candidate == self.default:
                row = self._admitted(row)  # it serves untuned callers: others must beat its time
            if row.outcome.ok and row.built is not None and not self.interrupted:
                right = sum(other.outcome.ok for other in checked)
                needed = self._reserve(FINISH_SECONDS, FINISH_SHARE) + right * SET_UP_SECONDS
                if self.seconds_left <= (needed if right else 0.0):
                    checked += postponed([row], "the budget ended before it was checked")
                    continue
                try:
                    row = replace(row, outcome=self.verify(self.problem, row, row.built))
                except KeyboardInterrupt:
                    self.interrupted = True
            checked.append(row)
        outcomes = {row.candidate.name: row.outcome for row in checked}
        outcomes, self.interrupted = self.group.checked(outcomes, self.interrupted)
        return [replace(row, outcome=outcomes[row.candidate.name]) for row in checked]

    def _race(self, rows: list[Row], confirm: bool) -> list[Row]:
        count = sum(row.outcome.ok for row in rows)

        def on_round(rounds: int, running: list[str]) -> None:
            self.progress.tell("measure", rounds, rounds, f"{len(running)} of {count} in the race")

        kept = self._reserve(CONFIRM_SECONDS, CONFIRM_SHARE) if confirm else 0.0
        seconds = self.progress.seconds_for_rounds(ROUNDS_SECONDS[self.settings.effort], kept)
        try:
            raced, self.interrupted = self.race(self.problem, rows, seconds, on_round)
        except LeaseError as error:
            return postponed(rows, str(error))
        return raced

    def _decide(self, rows: list[Row], timed: list[Row], confirm: bool) -> TuneResult:
        pick, gain = choose(timed, self.default)
        confirmed = not gain
        asks = bool(gain) and confirm and not self.interrupted
        if asks and all(self.group.exchange("time to confirm", self.seconds_left > 0)):
            name = pick.candidate.name
            self.progress.tell("confirm", 0, 1, name, median_us(pick))
            doubt = Doubt.of(self.problem, name, self.default.name, built_by_name(timed))
            (ratio,) = self.confirm([doubt])
            if isinstance(ratio, Outcome):  # of the pick: not what should serve
                failed = replace(pick, outcome=ratio)
                rows = [failed if row is pick else row for row in rows]
                return self._decide(rows, [row for row in timed if row is not pick], confirm)
            confirmed = ratio is not None
            if ratio is not None and ratio - 1.0 < MIN_GAIN:
                pick = next(row for row in timed if row.candidate == self.default)
                gain = 0.0
        record = self.remember(
            self.problem, rows, pick.candidate, confirmed=confirmed, purpose=self.purpose
        )
        result = self._remembered("measured", rows, record, gain=gain)
        self.progress.tell("record", 1, 1, str(result.record_path), median_us(pick))
        return result

    # --- the end -----------------------------------------------------------------------------------

    def _predicted(self, rows: list[Row]) -> TuneResult:
        """The model's ranking; the default serves where an interrupted search knows nothing of the rest."""
        good = [(row.candidate, row.estimate) for row in rows if row.outcome.ok]
        pick = self.default
        if good and not self.interrupted:
            pick = order(self.problem, self.policy, good, learned(self.policy))[0][0]
        return self._result("predicted", pick, rows)

    def _recorded(self, known: TuningRecord, rows: list[Row]) -> TuneResult:
        entries = {entry.candidate.name: entry for entry in known.entries}
        for index, row in enumerate(rows):
            entry = entries[row.candidate.name]
            rows[index] = replace(row, outcome=entry.outcome, timing=entry.measurement)
        if known.purpose != self.purpose:
            known = self.records.put(replace(known, purpose=self.purpose))
        return self._remembered("recorded", sorted(rows, key=by_ratio(self.default)), known)

    def _remembered(
        self, status: Status, rows: list[Row], record: TuningRecord, gain: float | None = None
    ) -> TuneResult:
        return self._result(
            status,
            record.candidate,
            rows,
            gain=gain,
            confirmed=record.confirmed,
            record=record,
            record_path=self.path(self.problem),
        )

    def _result(self, status: Status, pick: Candidate, rows: list[Row], **more: Any) -> TuneResult:
        log_outcomes(self.problem, self.policy.name, status, pick, rows)
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
