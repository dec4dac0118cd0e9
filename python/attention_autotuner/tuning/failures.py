"""The tables of reasons that a search ends with when nothing is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..core.candidate import Rejection
from ..core.problem import Problem
from ..errors import NoCandidateError
from .result import Row


def require_legal(
    problem: Problem, arch: str, candidates: Sequence[object], rejections: Iterable[Rejection]
) -> None:
    """Check that a policy offers something.

    Raises:
        NoCandidateError: it does not; the message counts the reasons.
    """
    if candidates:
        return
    counts = Counter((rejection.predicate, rejection.reason) for rejection in rejections)
    lines = [f"  {n:5d} x {name}: {why}" for (name, why), n in counts.most_common()]
    raise NoCandidateError(
        "\n".join((f"no candidate for {problem.describe()} is legal on {arch}:", *lines))
    )


def require_usable(problem: Problem, arch: str, rows: Sequence[Row]) -> None:
    """Check that some candidate of a shortlist came through.

    Raises:
        NoCandidateError: none did; the message says of each why, and where its log is.
    """
    if any(row.outcome.ok for row in rows):
        return
    lines = []
    for row in rows:
        log = f" (log: {row.outcome.log})" if row.outcome.log else ""
        lines.append(f"  {row.candidate.name}: {row.outcome.kind}: {row.outcome.reason}{log}")
    raise NoCandidateError(
        "\n".join((f"no candidate for {problem.describe()} on {arch} is usable:", *lines))
    )
