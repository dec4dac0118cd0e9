"""Why a candidate was picked, lost, failed, never tried or rejected: plain data for ``why`` and its ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..arch.policy import Policy
from ..core.candidate import Candidate, Rejection
from ..core.problem import Problem
from ..kernels.cost_model import Estimate, rank
from .record_schema import CandidateEntry, TuningRecord
from .result import finite

Fate = Literal["kept", "lost", "failed", "untried", "rejected"]
ORDER: tuple[Fate, ...] = ("kept", "lost", "failed", "untried", "rejected")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One line of the answer.

    Attributes:
        name: the candidate's; empty for a rejection, which never became one.
        config: its knobs.
        fate: ``kept`` serves; ``lost`` was slower; ``failed`` fell out on the way; ``untried`` was ranked too low
            to be built, or nothing was measured yet; ``rejected`` is not legal.
        reason: one sentence.
        rank: place in the model's order, from 1.
        estimate_us: the model's time, microseconds.
        limiter: what the model says limits it.
        median_us: measured.
        ratio_to_best: measured, against the fastest.
    """

    name: str
    config: dict[str, Any]
    fate: Fate
    reason: str
    rank: int | None = None
    estimate_us: float | None = None
    limiter: str | None = None
    median_us: float | None = None
    ratio_to_best: float | None = None


def explain(
    problem: Problem, policy: Policy, record: TuningRecord | None = None
) -> list[Explanation]:
    """Every point of the search space with its fate: kept first, then lost by time, failed, untried, rejected.

    Without a record the policy's default is kept, and everything else is untried.

    Args:
        problem: the problem.
        policy: whose search space.
        record: of an earlier search, if any.
    """
    offered = policy.candidates(problem)
    legal = [entry for entry in offered if isinstance(entry, Candidate)]
    ranked = rank(problem, legal, policy.spec)
    serving = policy.default(problem).name if record is None else record.pick
    best_us = ranked[0][1].us if ranked else 0.0
    rows = [
        _candidate_row(candidate, estimate, place, best_us, candidate.name == serving, record)
        for place, (candidate, estimate) in enumerate(ranked, start=1)
    ]
    if record is not None:  # measured once, but no longer offered by the policy
        offered_names = {candidate.name for candidate in legal}
        rows += [
            _entry_row(entry, record, rank_=None, estimate=None)
            for entry in record.entries
            if entry.candidate.name not in offered_names
        ]
    rows += [
        Explanation(
            name="",
            config=entry.config,
            fate="rejected",
            reason=f"{entry.predicate}: {entry.reason}",
        )
        for entry in offered
        if isinstance(entry, Rejection)
    ]
    return sorted(rows, key=_order)


def _candidate_row(
    candidate: Candidate,
    estimate: Estimate,
    place: int,
    best_us: float,
    kept: bool,
    record: TuningRecord | None,
) -> Explanation:
    entry = None if record is None else record.entry(candidate.name)
    if entry is not None and record is not None:
        return _entry_row(entry, record, rank_=place, estimate=estimate)
    slower = "" if place == 1 or best_us <= 0 else f", {estimate.us / best_us:.2f}x its best"
    reason = f"ranked {place} by the cost model{slower}; limited by {estimate.limiter}"
    if kept:
        why = "the policy's default, nothing measured yet"
        reason = f"{why if record is None else 'picked without a timing of its own'}; {reason}"
    return Explanation(
        name=candidate.name,
        config=candidate.config,
        fate="kept" if kept else "untried",
        reason=reason,
        rank=place,
        estimate_us=finite(estimate.us),
        limiter=estimate.limiter,
    )


def _entry_row(
    entry: CandidateEntry,
    record: TuningRecord,
    *,
    rank_: int | None,
    estimate: Estimate | None,
) -> Explanation:
    fate, reason = _fate(entry, record)
    timing = entry.measurement
    return Explanation(
        name=entry.candidate.name,
        config=entry.candidate.config,
        fate=fate,
        reason=reason,
        rank=rank_,
        estimate_us=entry.estimate_us if estimate is None else finite(estimate.us),
        limiter=None if estimate is None else estimate.limiter,
        median_us=None if timing is None else timing.median_us,
        ratio_to_best=None if timing is None else timing.ratio_to_best,
    )


def _fate(entry: CandidateEntry, record: TuningRecord) -> tuple[Fate, str]:
    timing = entry.measurement
    if not entry.outcome.ok:
        log = f" (log: {entry.outcome.log})" if entry.outcome.log else ""
        return "failed", f"{entry.outcome.kind}: {entry.outcome.reason}{log}"
    if entry.candidate.name == record.pick:
        if timing is None:
            return "kept", "picked without a timing of its own"
        how = "the default" if record.pick == record.default else "faster than the default"
        checked = "confirmed by a second process" if record.confirmed else "not confirmed"
        if record.pick == record.default:
            checked = "nothing beat it by 1 %"
        return "kept", f"{how}: {_timed(timing.median_us, timing.samples)}; {checked}"
    if timing is None:
        return "untried", "built and checked, but never timed"
    lost = (timing.ratio_to_best - 1.0) * 100.0
    return "lost", f"{lost:.1f} % slower than the best: {_timed(timing.median_us, timing.samples)}"


def _timed(median_us: float, samples: int) -> str:
    return f"median {median_us:.1f} us of {samples} rounds"


def _order(row: Explanation) -> tuple[int, float, int]:
    by_time = row.ratio_to_best if row.ratio_to_best is not None else 0.0
    return (ORDER.index(row.fate), by_time, row.rank or 0)
