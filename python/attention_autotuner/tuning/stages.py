"""The search engine: the stages that every search puts candidates through, and what it remembers of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from ..arch.policy import Policy
from ..codegen.files import store_errors
from ..codegen.render import render
from ..codegen.source_digest import source_digest
from ..core.candidate import Candidate
from ..core.identity import slug
from ..core.leases import Lease
from ..core.outcome import Infeasible, Ok, Outcome, Postponed, Serialized
from ..core.problem import Problem
from ..errors import LeaseError, NoCandidateError
from ..kernels.cost_model import estimate, refine
from ..settings import current
from .class_pools import small_problem
from .journal import Journal, Ratio, kernel_id, key_of
from .lookup import Hit, Query
from .pipeline import Built, Doubt, Pipeline, launched
from .progress import Progress
from .record_schema import Purpose, TuningRecord, space_digest
from .records import JOURNALS, RecordStore
from .result import Row, gain_over
from .spills import check_spills
from .validity import Miss, PresentKernels, check

LOGGER = logging.getLogger(__name__)

MIN_GAIN = 0.01  # over the default, or it stays
GRACE_SECONDS = 3.0  # after a deadline, for what is nearly done on the GPU


def built_of(
    candidates: Iterable[Candidate],
    pipeline: Pipeline,
    progress: Callable[[int, int, str, float], None] = lambda done, total, name, seconds: None,
) -> dict[Candidate, Built | Outcome]:
    """Kernels built in one batch, each once, or why they are not."""
    wanted = list(dict.fromkeys(candidates))
    results = pipeline.build([render(candidate) for candidate in wanted], progress)
    return {c: launched(result, c) for c, result in zip(wanted, results, strict=True)}


def source_digests(candidates: Iterable[Candidate]) -> dict[Candidate, str]:
    """The present source digest of each candidate."""
    return {candidate: source_digest(render(candidate)) for candidate in candidates}


def built_by_name(rows: Iterable[Row]) -> dict[str, Built]:
    """Candidate name -> kernel, of the rows that were built."""
    return {row.candidate.name: row.built for row in rows if row.built is not None}


def require_usable(problem: Problem, arch: str, rows: Sequence[Row]) -> None:
    """Check that some candidate came through.

    Raises:
        NoCandidateError: none did; the message says of each why, and where its log is.
    """
    if any(row.outcome.ok for row in rows):
        return
    lines = [f"no candidate for {problem.describe()} on {arch} is usable:"]
    for row in rows:
        log = f" (log: {row.outcome.log})" if row.outcome.log else ""
        lines.append(f"  {row.candidate.name}: {row.outcome.kind}: {row.outcome.reason}{log}")
    raise NoCandidateError("\n".join(lines))


def log_outcomes(
    problem: Problem, arch: str, status: str, pick: Candidate, rows: Iterable[Row]
) -> None:
    """Log the pick of a search, and what became of each candidate."""
    LOGGER.info("%s on %s: %s, pick %s", problem.describe(), arch, status, pick.name)
    for row in rows:
        LOGGER.debug("%s: %s %s", row.candidate.name, row.fate, row.outcome.reason)


def choose(raced: Sequence[Row], default: Candidate) -> tuple[Row, float | None]:
    """The fastest, or the default where nothing is at least :data:`MIN_GAIN` faster.

    Args:
        raced: usable rows first, the fastest first.
        default: the policy's own.

    Returns:
        The pick, and its gain over the default; None where the default does not run.
    """
    best = raced[0]
    base = next((row for row in raced if row.candidate == default and row.outcome.ok), None)
    if base is None:
        return best, None
    gain = gain_over(best, base)
    return (best, gain) if best is not base and gain >= MIN_GAIN else (base, 0.0)


@dataclass(kw_only=True)
class Engine:
    """The stages, for any number of problems.

    Attributes:
        policy: whose candidates.
        pipeline: builds, verifies, measures and confirms.
        records: where picks are kept, and journals beside them.
        fresh: nothing counts that earlier searches wrote into journals.
        deadline: of ``time.monotonic``, seconds; nobody is waited for any longer.
        alone: no other ranks take part. With them journals are neither read nor written, as ranks that know different
            things would part ways, and the pipeline takes the lease of the GPU, which none holds while it waits for
            another.
        progress: told of each step, and of what becomes of each candidate.
    """

    policy: Policy
    pipeline: Pipeline
    records: RecordStore
    fresh: bool = False
    deadline: float = inf
    alone: bool = True
    progress: Progress = field(default_factory=lambda: Progress(None, None))
    _journals: dict[tuple[str, str], Journal] = field(default_factory=dict, init=False)
    _kernels: dict[str, str] = field(default_factory=dict, init=False)  # ids by candidate name

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def path(self, problem: Problem) -> Path:
        """The file of a problem's record."""
        gpu_name = self.pipeline.environment.gpu_name
        return self.records.path(problem, self.policy.name, gpu_name)

    def journal(self, problem: Problem, suffix: str = JOURNALS[0]) -> Journal:
        """The journal of a problem, or of whole steps with it, as it was when this engine first asked for it."""
        key = key_of(problem, self.pipeline.environment)
        if (key, suffix) not in self._journals:
            path = self.path(problem).with_suffix(suffix) if self.alone else None
            self._journals[key, suffix] = Journal(path, key, fresh=self.fresh)
        return self._journals[key, suffix]

    def measuring(self) -> Lease:
        """The lease of the GPU, held, to be used as a context manager.

        Raises:
            LeaseError: another process holds it until the deadline.
        """
        self.pipeline.deadline = self.deadline + GRACE_SECONDS
        return self.leased(self.records.root / "gpus" / f"{slug(self.pipeline.gpu_id)}.lease")

    def held(self) -> AbstractContextManager[object]:
        """:meth:`measuring`, or nothing where the pipeline sees to it."""
        return self.measuring() if self.alone else nullcontext()

    def leased(self, path: Path, tick: Callable[[], None] = lambda: None) -> Lease:
        """A lease, held, which is waited for until the deadline; see :meth:`.Lease.wait`.

        Raises:
            LeaseError: another process holds it until then.
            StoreError: the folder cannot be written.
        """
        with store_errors(path):
            return Lease(path).wait(None if self.deadline == inf else self.seconds_left, tick)

    def recall(self, problem: Problem, digests: Mapping[str, str]) -> TuningRecord | None:
        """The record of this very problem, without the entries whose kernels changed since; None where there is none.

        Args:
            problem: the problem; a neighbour's record does not do, nor one of another environment.
            digests: candidate name -> source digest now; entries that hold get it.
        """
        kernels = PresentKernels()
        query = Query(
            problem=problem,
            arch=self.policy.name,
            environment=self.pipeline.environment,
            kernels=kernels,
            strict=True,
            proven=current().strict_proof,
        )
        answer = self.records.find(query)
        if not isinstance(answer, Hit) or not answer.exact:
            return None
        entries = []
        for entry in answer.record.entries:
            if query.proven and entry.outcome.ok and entry.proof is None:
                continue
            now = digests.get(entry.candidate.name)
            if now is None or now == entry.source_digest:
                entries.append(entry)
            elif not isinstance(check(entry, kernels), Miss):
                entries.append(replace(entry, source_digest=now, kernel_digest=None))
        return replace(answer.record, entries=tuple(entries))

    def examine(
        self, problem: Problem, row: Row, result: Built | Outcome, *, timed: bool = True
    ) -> Row:
        """A row after its build: the estimate with the compiler's report, and whether that leaves it worth timing.

        Args:
            problem: what it computes.
            row: of the candidate.
            result: what was built of it, or why nothing was.
            timed: measured, or about to be; otherwise only the model ranks it.
        """
        if isinstance(result, Outcome):
            return self.ended(row, result)
        report = result.report
        refined = refine(problem, row.candidate, self.policy.spec, report)
        outcome = check_spills(row.candidate, report, timed=timed)
        if outcome.ok and report.serialized:
            outcome = Serialized(reason=report.serialized)
        if outcome.ok and refined.occupancy == 0:
            outcome = Infeasible(reason=f"no CTA fits an SM with {report.registers} registers")
        built = replace(result, launch_knobs=row.candidate.launch_knobs)
        return self.ended(replace(row, estimate=refined, built=built), outcome)

    def ended(self, row: Row, outcome: Outcome) -> Row:
        """A row with its outcome, which is told where it ends there."""
        if not outcome.ok:
            self.progress.happened("eliminated", row.candidate.name, outcome=outcome)
        return replace(row, outcome=outcome)

    def on_built(self, done: int, total: int, name: str, seconds: float) -> None:
        """Tell that a kernel was compiled."""
        self.progress.tell("build", done, total, f"{name} in {seconds:.0f} s")
        self.progress.happened("built", name, seconds=seconds)

    def verify(self, problem: Problem, row: Row, built: Built) -> Outcome:
        """Check a row's kernel against the reference, unless the journal has the outcome."""
        journal, kernel = self.journal(problem), kernel_id(row.candidate.name, row.source_digest)
        outcome = journal.outcome(kernel)
        if outcome is None:
            try:
                with self.held():
                    claims = row.candidate.deterministic
                    outcome = self.pipeline.verify(problem, built, deterministic=claims)
            except LeaseError as error:
                outcome = Postponed(reason=str(error))
            journal.add_outcome(kernel, outcome)
        self.progress.happened("verified", row.candidate.name, outcome=outcome)
        return self.ended(row, outcome).outcome

    def prepared(
        self, candidate: Candidate, result: Built | Outcome, source_digest: str, *, default: bool
    ) -> Row:
        """A row for races of any problems of a candidate's class, after build and verification.

        Args:
            candidate: the kernel.
            result: what became of its build.
            source_digest: what its source says.
            default: is verified even if it spills: it serves untuned callers, its time is what others must beat.
        """
        small = small_problem(candidate)
        row = Row(
            candidate=candidate,
            estimate=estimate(small, candidate, self.policy.spec),
            outcome=Ok(),
            source_digest=source_digest,
        )
        row = self.examine(small, row, result)
        if row.built is not None and (row.outcome.ok or default):
            row = replace(row, outcome=self.verify(small, row, row.built))
        return row

    def race(
        self,
        problem: Problem,
        rows: Sequence[Row],
        seconds: float,
        on_round: Callable[[int, list[str]], None] = lambda rounds, running: None,
    ) -> tuple[list[Row], bool]:
        """Time the usable rows against one another, the default first, then by their estimates.

        Args:
            problem: what is timed; the rows' estimates become those for it. Its default is timed in every round.
            rows: after build and verification.
            seconds: of timing rounds.
            on_round: called after each round with (rounds, names still in the race).

        Returns:
            The rows with their timings, the fastest first, those without one last; and whether Ctrl-C cut it short.

        Raises:
            NoCandidateError: no row is usable, before or after.
            LeaseError: another process measures on the GPU until the deadline.
        """
        require_usable(problem, self.policy.name, rows)
        default = self.policy.untuned(problem)
        by_name = {row.candidate.name: self._estimated(problem, row) for row in rows}
        usable = sorted(
            (row for row in by_name.values() if row.outcome.ok),
            key=lambda row: (row.candidate != default, row.estimate.us),
        )
        built = built_by_name(usable)
        for row in usable:
            self._kernels[row.candidate.name] = kernel_id(row.candidate.name, row.source_digest)
        history = self.journal(problem).race({name: self._kernels[name] for name in built})
        with self.held():
            timings, interrupted = self.pipeline.measure(
                problem,
                built,
                budget_seconds=seconds,
                keep=[name for name in built if name == default.name],
                on_round=self.progress.watching(built, on_round),
                history=history,
            )
        raced = []
        for timing in timings:
            self.progress.happened("timed", timing.name, timing=timing, outcome=timing.outcome)
            row = by_name.pop(timing.name)
            outcome = row.outcome if timing.outcome.ok else timing.outcome  # the former has a proof
            raced.append(replace(row, outcome=outcome, timing=timing))
        raced += by_name.values()
        if not interrupted:
            require_usable(problem, self.policy.name, raced)
        return raced, interrupted

    def _estimated(self, problem: Problem, row: Row) -> Row:
        """A row with the model's time for a problem: with the compiler's report where it was built."""
        candidate, spec = row.candidate, self.policy.spec
        if row.built is None:
            return replace(row, estimate=estimate(problem, candidate, spec))
        return replace(row, estimate=refine(problem, candidate, spec, row.built.report))

    def confirm(self, doubts: Sequence[Doubt]) -> list[Ratio]:
        """Ask a second process about picks of races, as far as the journals do not have its answer.

        Returns:
            See :meth:`.Pipeline.confirm_all`.
        """
        ratios = [self.journal(doubt.problem).ratio(*self._ids(doubt)) for doubt in doubts]
        places = [place for place, ratio in enumerate(ratios) if ratio is None]
        if places:
            asked = [doubts[place] for place in places]
            with suppress(LeaseError), self.held():
                answers = self.pipeline.confirm_all(asked)
                for place, doubt, ratio in zip(places, asked, answers, strict=True):
                    ratios[place] = ratio
                    self.journal(doubt.problem).add_ratio(*self._ids(doubt), ratio)
        return ratios

    def _ids(self, doubt: Doubt) -> tuple[str, str]:
        return self._kernels[doubt.pick[0]], self._kernels[doubt.default[0]]

    def remember(
        self,
        problem: Problem,
        rows: Sequence[Row],
        pick: Candidate,
        *,
        confirmed: bool,
        purpose: Purpose | None = None,
    ) -> TuningRecord:
        """Write the record of a search; what an earlier one found about candidates that this one did not try stays.

        Args:
            problem: as measured.
            rows: what this search found; those that came to no end are left out.
            pick: the candidate that serves from now on.
            confirmed: whether a second process confirmed its gain, or it is the default.
            purpose: of the search; its direction by default.
        """
        environment = self.pipeline.environment
        record = TuningRecord(
            problem=problem.bucketed(),
            measured_problem=problem,
            purpose=purpose or problem.direction,
            arch=self.policy.name,
            space_digest=space_digest(self.policy.legal(problem)),
            pick=pick.name,
            default=self.policy.untuned(problem).name,
            confirmed=confirmed,
            entries=tuple(
                row.entry(environment.digest)
                for row in rows
                if row.is_over or row.candidate.name == pick.name
            ),
            environment=environment,
            environments={environment.digest: environment},
        )
        record = self.records.put(record)
        self.progress.happened("picked", pick.name)
        if confirmed:
            self.journal(problem).end()
        return record
