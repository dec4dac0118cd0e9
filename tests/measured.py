"""Rows of a search for tests: candidates with the times that they were measured at."""

from __future__ import annotations

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Ok, Outcome
from attention_autotuner.tuning.record_schema import CandidateEntry, Measurement


def entry(
    one: Candidate,
    us: float | None,
    outcome: Outcome | None = None,
    *,
    environment: str = "e",
    source_digest: str = "k",
    code_digest: str | None = None,
    estimate_us: float | None = None,
) -> CandidateEntry:
    """A candidate that took ``us`` microseconds; None for one that was not timed."""
    timing = None
    if us is not None:
        timing = Measurement(
            candidate_name=one.name,
            median_us=us,
            spread_us=0.1,
            samples=30,
            ratio_to_best=us / 100.0,
            environment=environment,
        )
    return CandidateEntry(
        candidate=one,
        source_digest=source_digest,
        code_digest=code_digest,
        outcome=outcome or Ok(),
        measurement=timing,
        estimate_us=estimate_us,
    )
