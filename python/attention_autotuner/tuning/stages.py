"""The stages that searches and sweeps put candidates through: build, the compiler's report, race, choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..arch.policy import Policy
from ..codegen.render import render
from ..core.candidate import Candidate
from ..core.outcome import Infeasible, Outcome, Serialized
from ..core.problem import Problem
from ..errors import NoCandidateError
from ..kernels.cost_model import estimate, refine
from .pipeline import Built, Pipeline
from .result import Row, gain_over
from .spills import check_spills

MIN_GAIN = 0.01  # over the default, or it stays


def built_of(
    candidates: Iterable[Candidate],
    pipeline: Pipeline,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> dict[Candidate, Built | Outcome]:
    """Kernels built in one batch, each once, or why they are not."""
    wanted = list(dict.fromkeys(candidates))
    results = pipeline.build([render(candidate) for candidate in wanted], progress)
    return dict(zip(wanted, results, strict=True))


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


def examine(problem: Problem, row: Row, built: Built, policy: Policy, *, timed: bool) -> Row:
    """A row with its kernel: the estimate with the compiler's report, and whether that leaves it worth timing.

    Args:
        problem: what it computes.
        row: of the candidate.
        built: what was built of it.
        policy: whose candidate.
        timed: measured, or about to be; otherwise only the model ranks it.
    """
    refined = refine(problem, row.candidate, policy.spec, built.report)
    outcome = check_spills(row.candidate, built.report, timed=timed)
    if outcome.ok and built.report.serialized:
        outcome = Serialized(reason=built.report.serialized)
    if outcome.ok and refined.occupancy == 0:
        registers = built.report.registers
        outcome = Infeasible(reason=f"no CTA fits an SM with {registers} registers")
    return replace(
        row,
        estimate=refined,
        outcome=outcome,
        artifact=built.path,
        code_digest=built.code_digest,
    )


def race(
    problem: Problem,
    policy: Policy,
    rows: Sequence[Row],
    built: Mapping[str, Built],
    pipeline: Pipeline,
    seconds: float,
    on_round: Callable[[int, list[str]], None] = lambda rounds, running: None,
) -> tuple[list[Row], bool]:
    """Time the usable rows against one another, the default first, then by their estimates.

    Args:
        problem: what is timed; the rows' estimates become those for it.
        policy: whose candidates; its default for the problem is timed in every round.
        rows: after build and verification.
        built: candidate name -> kernel.
        pipeline: measures.
        seconds: of timing rounds.
        on_round: called after each round with (rounds, names still in the race).

    Returns:
        The rows with their timings, the fastest first, those without one last; and whether Ctrl-C cut it short.

    Raises:
        NoCandidateError: no row is usable, before or after.
    """
    require_usable(problem, policy.name, rows)
    default = policy.default(problem)
    by_name = {row.candidate.name: _estimated(problem, row, policy, built) for row in rows}
    usable = sorted(
        (row for row in by_name.values() if row.outcome.ok),
        key=lambda row: (row.candidate != default, row.estimate.us),
    )
    names = [row.candidate.name for row in usable]
    timings, interrupted = pipeline.measure(
        problem,
        {name: built[name] for name in names},
        budget_seconds=seconds,
        keep=[name for name in names if name == default.name],
        on_round=on_round,
    )
    raced = [
        replace(by_name.pop(timing.name), outcome=timing.outcome, timing=timing)
        for timing in timings
    ]
    raced += by_name.values()
    if not interrupted:
        require_usable(problem, policy.name, raced)
    return raced, interrupted


def _estimated(problem: Problem, row: Row, policy: Policy, built: Mapping[str, Built]) -> Row:
    """A row with the model's time for a problem: with the compiler's report where it was built."""
    kernel = built.get(row.candidate.name)
    if kernel is None:
        return replace(row, estimate=estimate(problem, row.candidate, policy.spec))
    return replace(row, estimate=refine(problem, row.candidate, policy.spec, kernel.report))


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
