"""The stages that searches and sweeps put candidates through: build, the compiler's report, race, choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..arch.policy import Policy
from ..codegen.render import render
from ..core.candidate import Candidate
from ..core.outcome import Infeasible, Outcome, Serialized
from ..core.problem import Problem
from ..kernels.cost_model import refine
from .pipeline import Built, Pipeline, launched
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
    return {c: launched(result, c) for c, result in zip(wanted, results, strict=True)}


def examine(problem: Problem, row: Row, built: Built, policy: Policy, *, timed: bool) -> Row:
    """A row with its kernel: the estimate with the compiler's report, and whether that leaves it worth timing.

    Args:
        problem: what it computes.
        row: of the candidate.
        built: what was built of it.
        policy: whose candidate.
        timed: measured, or about to be; otherwise only the model ranks it.
    """
    estimate = refine(problem, row.candidate, policy.spec, built.report)
    outcome = check_spills(row.candidate, built.report, timed=timed)
    if outcome.ok and built.report.serialized:
        outcome = Serialized(reason=built.report.serialized)
    if outcome.ok and estimate.occupancy == 0:
        registers = built.report.registers
        outcome = Infeasible(reason=f"no CTA fits an SM with {registers} registers")
    return replace(
        row,
        estimate=estimate,
        outcome=outcome,
        artifact=built.path,
        code_digest=built.code_digest,
    )


def time_rows(
    problem: Problem,
    default: Candidate,
    rows: Sequence[Row],
    built: Mapping[str, Built],
    pipeline: Pipeline,
    seconds: float,
    on_round: Callable[[int, list[str]], None] = lambda rounds, running: None,
) -> tuple[list[Row], bool]:
    """Race the usable rows, the default first, then by their estimates.

    Args:
        problem: what is timed.
        default: the policy's own; timed in every round.
        rows: after build and verification.
        built: candidate name -> kernel.
        pipeline: measures.
        seconds: of timing rounds.
        on_round: called after each round with (rounds, names still in the race).

    Returns:
        The rows with their timings, the fastest first, those without one last; and whether Ctrl-C cut it short.
    """
    usable = sorted(
        (row for row in rows if row.outcome.ok),
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
    by_name = {row.candidate.name: row for row in rows}
    raced = [
        replace(by_name.pop(timing.name), outcome=timing.outcome, timing=timing)
        for timing in timings
    ]
    return [*raced, *by_name.values()], interrupted


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
