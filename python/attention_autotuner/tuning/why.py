"""Why a candidate was picked, lost, failed, never tried or rejected: plain data for ``why`` and its ``--json``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..arch.policy import Policy
from ..core.candidate import Rejection
from ..core.outcome import Proof
from ..core.problem import Problem
from ..kernels.cost_model import rank
from .record_schema import CandidateEntry, TuningRecord
from .result import finite

Fate = Literal["kept", "tied", "lost", "failed", "untried", "rejected"]
ORDER: tuple[Fate, ...] = ("kept", "tied", "lost", "failed", "untried", "rejected")
SHOWN = ("median_us", "ratio_to_best", "ratio_low", "ratio_high")  # of a measurement
UNMEASURED = "the policy's default, nothing measured yet"
UNTIMED = "picked without a timing of its own"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One line of the answer.

    Attributes:
        name: the candidate's; empty for a rejection, which never became one.
        config: its knobs.
        fate: ``kept`` serves; ``tied`` could not be told from the best; ``lost`` was slower; ``failed`` fell out on
            the way; ``untried`` was ranked too low to be built, or nothing was measured yet; ``rejected`` is not
            legal.
        reason: one sentence.
        rank: place in the model's order, from 1.
        estimate_us: the model's time, microseconds.
        limiter: what the model says limits it.
        median_us: measured.
        ratio_to_best: measured, against the fastest.
        ratio_low, ratio_high: the interval that it is known to lie in; None where that was not kept.
        proof: what verification has shown; None where no proof was kept.
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
    ratio_low: float | None = None
    ratio_high: float | None = None
    proof: Proof | None = None


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
    ranked = rank(problem, policy.served(problem), policy.spec)
    known = [] if record is None else [_measured(entry, record) for entry in record.entries]
    by_name = {row.name: row for row in known}
    serving = policy.untuned(problem).name if record is None else record.pick
    rows = []
    for place, (candidate, estimate) in enumerate(ranked, start=1):
        row = by_name.pop(candidate.name, None)
        if row is None:
            slower = f", {estimate.us / ranked[0][1].us:.2f}x its best" if place > 1 else ""
            reason = f"ranked {place} by the cost model{slower}; limited by {estimate.limiter}"
            kept = candidate.name == serving
            if kept:
                why = UNMEASURED if record is None else UNTIMED
                reason = f"{why}; {reason}"
            row = Explanation(
                name=candidate.name,
                config=candidate.config,
                fate="kept" if kept else "untried",
                reason=reason,
            )
        us, limiter = finite(estimate.us), estimate.limiter
        rows.append(replace(row, rank=place, estimate_us=us, limiter=limiter))
    rows += by_name.values()  # measured once, but no longer offered by the policy
    rows += [
        Explanation(
            name="",
            config=entry.config,
            fate="rejected",
            reason=f"{entry.predicate}: {entry.reason}",
        )
        for entry in policy.candidates(problem)
        if isinstance(entry, Rejection)
    ]
    return sorted(rows, key=_order)


def _measured(entry: CandidateEntry, record: TuningRecord) -> Explanation:
    """A line about a candidate that a record knows."""
    fate, reason = _fate(entry, record)
    timing = entry.measurement
    return Explanation(
        name=entry.candidate.name,
        config=entry.candidate.config,
        fate=fate,
        reason=reason,
        estimate_us=entry.estimate_us,
        proof=entry.proof,
        **({} if timing is None else {name: getattr(timing, name) for name in SHOWN}),
    )


def _fate(entry: CandidateEntry, record: TuningRecord) -> tuple[Fate, str]:
    timing = entry.measurement
    if not entry.outcome.ok:
        log = f" (log: {entry.outcome.log})" if entry.outcome.log else ""
        return "failed", f"{entry.outcome.kind}: {entry.outcome.reason}{log}"
    if entry.candidate.name == record.pick:
        if timing is None:
            return "kept", UNTIMED
        how = "faster than the default"
        checked = "confirmed by a second process" if record.confirmed else "not confirmed"
        if record.pick == record.default:
            how, checked = "the default", "nothing beat it by 1 %"
        tied = [name for name in record.ties if name != record.pick]
        if tied and timing.tied:
            checked += f"; tied with {len(tied)} other{'s' if len(tied) > 1 else ''}"
        return "kept", f"{how}: {_timed(timing.median_us, timing.samples)}; {checked}"
    if timing is None:
        return "untried", "built and checked, but never timed"
    timed = _timed(timing.median_us, timing.samples)
    lost = f"{percent(timing.ratio_to_best)} % slower than the best"
    if timing.ratio_low is not None and timing.ratio_high is not None:
        lost += f", known to {percent(timing.ratio_low)} to {percent(timing.ratio_high)} %"
    if timing.tied:
        return "tied", f"no slower than can be told: {lost}: {timed}"
    return "lost", f"{lost}: {timed}"


def percent(ratio: float) -> str:
    """A ratio as what it is above 1, in percent."""
    return f"{(ratio - 1.0) * 100.0:.1f}"


def _timed(median_us: float, samples: int) -> str:
    return f"median {median_us:.1f} us of {samples} rounds"


def _order(row: Explanation) -> tuple[int, float, int]:
    by_time = row.ratio_to_best if row.ratio_to_best is not None else 0.0
    return (ORDER.index(row.fate), by_time, row.rank or 0)
