"""The records of earlier searches, and what a search adds to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..arch.policy import Policy
from ..codegen.render import render
from ..codegen.source_digest import source_digest
from ..core.candidate import Candidate
from ..core.problem import Problem
from .environment import Environment
from .lookup import Hit, Query
from .record_schema import CandidateEntry, Purpose, TuningRecord, space_digest
from .records import RecordStore
from .result import Row
from .validity import Miss, PresentKernels, check


def source_digests(candidates: Iterable[Candidate]) -> dict[Candidate, str]:
    """The present source digest of each candidate."""
    return {candidate: source_digest(render(candidate)) for candidate in candidates}


def recall(
    records: RecordStore,
    problem: Problem,
    policy: Policy,
    environment: Environment,
    digests: Mapping[str, str],
) -> TuningRecord | None:
    """The record of this very problem, without the entries whose kernels changed since; None where there is none.

    Args:
        records: where to look.
        problem: the problem; a neighbour's record does not do.
        policy: whose records.
        environment: the present one; a difference of any field that is compared is a miss.
        digests: candidate name -> source digest now.
    """
    kernels = PresentKernels()
    query = Query(
        problem=problem,
        arch=policy.name,
        environment=environment,
        kernels=kernels,
        strict=True,
    )
    answer = records.find(query)
    if not isinstance(answer, Hit) or not answer.exact:
        return None
    record = answer.record
    return replace(record, entries=tuple(_holding(record, digests, kernels)))


def _holding(
    record: TuningRecord, digests: Mapping[str, str], kernels: PresentKernels
) -> Iterator[CandidateEntry]:
    """The entries that hold, those that a search asks about with their present digest."""
    for entry in record.entries:
        now = digests.get(entry.candidate.name)
        if now is None or now == entry.source_digest:
            yield entry
        elif not isinstance(check(entry, kernels), Miss):
            yield replace(entry, source_digest=now, kernel_digest=None)


def untried(rows: Sequence[Row], known: TuningRecord, anchors: Collection[str]) -> list[Row]:
    """The rows that a record does not know, with those of the anchors, to race them against."""
    return [
        row
        for row in rows
        if row.candidate.name in anchors or known.entry(row.candidate.name) is None
    ]


def extended(
    known: TuningRecord | None,
    rows: Sequence[Row],
    problem: Problem,
    policy: Policy,
    environment: Environment,
    *,
    pick: Candidate,
    default: Candidate,
    confirmed: bool,
    purpose: Purpose | None = None,
) -> TuningRecord:
    """The record of a search, with what an earlier one found about candidates that this one did not try.

    Args:
        known: the earlier record, if any.
        rows: what this search found.
        problem: as measured.
        policy: whose candidates.
        environment: of the measurement.
        pick: the candidate that serves from now on.
        default: the policy's own.
        confirmed: whether a second process confirmed the gain.
        purpose: of the search; its direction by default.
    """
    entries = {row.candidate.name: row.entry(environment.digest) for row in rows}
    environments = {environment.digest: environment}
    if known is not None:
        entries = {entry.candidate.name: entry for entry in known.entries} | entries
        environments |= {**known.environments, known.environment.digest: known.environment}
    return TuningRecord(
        problem=problem.bucketed(),
        measured_problem=problem,
        purpose=purpose or problem.direction,
        arch=policy.name,
        space_digest=space_digest(policy.legal(problem)),
        pick=pick.name,
        default=default.name,
        confirmed=confirmed,
        entries=tuple(entries.values()),
        environment=environment,
        environments=environments,
    )
