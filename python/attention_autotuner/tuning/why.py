"""Why a candidate was picked, lost, failed, never tried or rejected: plain data for ``why`` and its ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from ..arch.policy import Policy
from ..core.candidate import Candidate, Rejection
from ..core.problem import Problem
from ..kernels.cost_model import Estimate, rank
from .predicted import PredictedHit
from .record_schema import CandidateEntry, TuningRecord

Verdict = Literal["kept", "lost", "failed", "untried", "rejected"]
ORDER: tuple[Verdict, ...] = ("kept", "lost", "failed", "untried", "rejected")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One line of the answer.

    Attributes:
        name: the candidate's; empty for a rejection, which never became one.
        config: its knobs.
        verdict: ``kept`` serves; ``lost`` was slower; ``failed`` fell out on the way; ``untried`` was ranked too low
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
    verdict: Verdict
    reason: str
    rank: int | None = None
    estimate_us: float | None = None
    limiter: str | None = None
    median_us: float | None = None
    ratio_to_best: float | None = None


def explain(
    problem: Problem,
    policy: Policy,
    record: TuningRecord | None = None,
    predicted: PredictedHit | None = None,
) -> list[Explanation]:
    """Every point of the search space with its fate: kept first, then lost by time, failed, untried, rejected.

    Without a record what is kept is the predicted pick, else the policy's default, and everything else is untried.

    Args:
        problem: the problem.
        policy: whose search space.
        record: what an earlier search found, if any.
        predicted: the prediction that serves, where no record does.
    """
    offered = policy.candidates(problem)
    legal = [entry for entry in offered if isinstance(entry, Candidate)]
    ranked = rank(problem, legal, policy.spec)
    serving, why_kept = _serving(problem, policy, record, predicted)
    best_us = ranked[0][1].us if ranked else 0.0
    rows = [
        _candidate_row(
            candidate,
            estimate,
            place,
            best_us,
            why_kept if candidate.name == serving else None,
            record,
        )
        for place, (candidate, estimate) in enumerate(ranked, start=1)
    ]
    # Measured or predicted once, but no longer offered by the policy.
    offered_names = {candidate.name for candidate in legal}
    if record is None and predicted is not None and serving not in offered_names:
        rows.append(
            Explanation(
                name=serving, config=predicted.candidate.config, verdict="kept", reason=why_kept
            )
        )
    if record is not None:
        rows += [
            _entry_row(entry, record, rank_=None, estimate=None)
            for entry in record.entries
            if entry.candidate.name not in offered_names
        ]
    rows += [
        Explanation(
            name="",
            config=entry.config,
            verdict="rejected",
            reason=f"{entry.predicate}: {entry.reason}",
        )
        for entry in offered
        if isinstance(entry, Rejection)
    ]
    return sorted(rows, key=_order)


def _serving(
    problem: Problem,
    policy: Policy,
    record: TuningRecord | None,
    predicted: PredictedHit | None,
) -> tuple[str, str]:
    """The name of what serves, and how it came to that where nothing was measured."""
    if record is not None:
        return record.pick, "picked without a timing of its own"
    if predicted is None:
        return policy.default(problem).name, "the policy's default, nothing measured yet"
    pick = predicted.pick
    if predicted.is_default:
        why = "the policy's default: the cost model knows of no gain that it is trusted with"
    else:
        gain = (pick.default_us / pick.estimate_us - 1.0) * 100.0
        why = f"predicted, nothing measured yet: by the cost model {gain:.0f} % faster than the default"
    return predicted.candidate.name, why


def _candidate_row(
    candidate: Candidate,
    estimate: Estimate,
    place: int,
    best_us: float,
    why_kept: str | None,
    record: TuningRecord | None,
) -> Explanation:
    entry = None if record is None else record.entry(candidate.name)
    if entry is not None and record is not None:
        return _entry_row(entry, record, rank_=place, estimate=estimate)
    slower = "" if place == 1 or best_us <= 0 else f", {estimate.us / best_us:.2f}x its best"
    reason = f"ranked {place} by the cost model{slower}; limited by {estimate.limiter}"
    if why_kept is not None:
        reason = f"{why_kept}; {reason}"
    return Explanation(
        name=candidate.name,
        config=candidate.config,
        verdict="untried" if why_kept is None else "kept",
        reason=reason,
        rank=place,
        estimate_us=_finite(estimate.us),
        limiter=estimate.limiter,
    )


def _entry_row(
    entry: CandidateEntry,
    record: TuningRecord,
    *,
    rank_: int | None,
    estimate: Estimate | None,
) -> Explanation:
    verdict, reason = _fate(entry, record)
    timing = entry.measurement
    return Explanation(
        name=entry.candidate.name,
        config=entry.candidate.config,
        verdict=verdict,
        reason=reason,
        rank=rank_,
        estimate_us=entry.estimate_us if estimate is None else _finite(estimate.us),
        limiter=None if estimate is None else estimate.limiter,
        median_us=None if timing is None else timing.median_us,
        ratio_to_best=None if timing is None else timing.ratio_to_best,
    )


def _fate(entry: CandidateEntry, record: TuningRecord) -> tuple[Verdict, str]:
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


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _order(row: Explanation) -> tuple[int, float, int]:
    by_time = row.ratio_to_best if row.ratio_to_best is not None else 0.0
    return (ORDER.index(row.verdict), by_time, row.rank or 0)
