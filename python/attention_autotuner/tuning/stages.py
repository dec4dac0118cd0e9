"""The search engine: the stages that every search puts candidates through, and what it remembers of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..arch.policy import Policy
from ..codegen.render import render
from ..codegen.source_digest import source_digest
from ..core.candidate import Candidate
from ..core.outcome import Infeasible, Ok, Outcome, Serialized
from ..core.problem import Problem
from ..errors import NoCandidateError
from ..kernels.cost_model import estimate, refine
from ..settings import current
from .class_pools import small_problem
from .lookup import Hit, Query
from .pipeline import Built, Pipeline, launched
from .record_schema import Purpose, TuningRecord, space_digest
from .records import RecordStore
from .result import Row, gain_over
from .spills import check_spills
from .validity import Miss, PresentKernels, check

LOGGER = logging.getLogger(__name__)

MIN_GAIN = 0.01  # over the default, or it stays


def built_of(
    candidates: Iterable[Candidate],
    pipeline: Pipeline,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
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
        records: where picks are kept.
    """

    policy: Policy
    pipeline: Pipeline
    records: RecordStore

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
            return replace(row, outcome=result)
        report = result.report
        refined = refine(problem, row.candidate, self.policy.spec, report)
        outcome = check_spills(row.candidate, report, timed=timed)
        if outcome.ok and report.serialized:
            outcome = Serialized(reason=report.serialized)
        if outcome.ok and refined.occupancy == 0:
            outcome = Infeasible(reason=f"no CTA fits an SM with {report.registers} registers")
        built = launched(result, row.candidate)
        return replace(row, estimate=refined, outcome=outcome, built=built)

    def verify(self, problem: Problem, candidate: Candidate, built: Built) -> Outcome:
        """Check a kernel against the reference."""
        return self.pipeline.verify(problem, built, deterministic=candidate.deterministic)

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
            row = replace(row, outcome=self.verify(small, candidate, row.built))
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
        """
        require_usable(problem, self.policy.name, rows)
        default = self.policy.default(problem)
        by_name = {row.candidate.name: self._estimated(problem, row) for row in rows}
        usable = sorted(
            (row for row in by_name.values() if row.outcome.ok),
            key=lambda row: (row.candidate != default, row.estimate.us),
        )
        built = built_by_name(usable)
        timings, interrupted = self.pipeline.measure(
            problem,
            built,
            budget_seconds=seconds,
            keep=[name for name in built if name == default.name],
            on_round=on_round,
        )
        raced = []
        for timing in timings:
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
            rows: what this search found.
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
            default=self.policy.default(problem).name,
            confirmed=confirmed,
            entries=tuple(row.entry(environment.digest) for row in rows),
            environment=environment,
            environments={environment.digest: environment},
        )
        return self.records.put(record)
