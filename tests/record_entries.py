"""Entries of tuning records for tests: candidates with their measured times."""

from __future__ import annotations

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Ok, Outcome, Proof
from attention_autotuner.tuning.record_schema import CandidateEntry, Measurement

PROOF = Proof(
    verifier="0123456789abcdef",
    gpu_name="NVIDIA H100 80GB HBM3",
    checks=("a problem, seed 0", "another, seed 1"),
    repeats=2,
    same_bits=True,
    ratios={"o": 0.31, "lse": 0.02},
)
PROVEN = Ok(proof=PROOF)


def entry(
    candidate: Candidate,
    us: float | None,
    outcome: Outcome | None = None,
    *,
    environment: str = "e",
    source_digest: str = "k",
    code_digest: str | None = None,
    estimate_us: float | None = None,
) -> CandidateEntry:
    """The entry of a candidate that took ``us`` microseconds; None means not timed."""
    timing = None
    if us is not None:
        timing = Measurement(
            median_us=us,
            spread_us=0.1,
            samples=30,
            ratio_to_best=us / 100.0,
            environment=environment,
        )
    return CandidateEntry(
        candidate=candidate,
        source_digest=source_digest,
        code_digest=code_digest,
        outcome=outcome or PROVEN,
        measurement=timing,
        estimate_us=estimate_us,
    )
