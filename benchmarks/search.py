"""Tuning a suite at once: problems of one head-dim class share their builds, and each races the whole class's pool.

A pool is the union of what the cost model would try for each problem of the class, and the policy's defaults. All pools
are built in one batch, each kernel is verified once, and every problem's race writes a tuning record like that of
``tune``; a problem of deterministic mode races the deterministic part of its pool. Picks that beat the default are left
unconfirmed: that is for a second process to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf

from attention_autotuner.arch import Policy
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.tuning.class_pools import (
    ClassKey,
    choose,
    class_of,
    race,
    small_problem,
    usable,
)
from attention_autotuner.tuning.history import extended
from attention_autotuner.tuning.pipeline import Built, Pipeline
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.result import Row, median_us

Say = Callable[[str], None]


def search(
    problems: Sequence[Problem],
    policy: Policy,
    pipeline: Pipeline,
    records: RecordStore,
    *,
    pool_of: Mapping[ClassKey, Sequence[Candidate]],
    seconds: float,
    say: Say,
) -> list[TuningRecord]:
    """Tune every problem.

    Args:
        problems: what to tune for.
        policy: whose candidates.
        pipeline: builds, verifies and measures.
        records: where the picks are kept.
        pool_of: from :func:`pools` or :func:`known_pools`.
        seconds: of timing rounds a problem.
        say: takes one line at a time.

    Returns:
        A record per problem, in order.

    Raises:
        NoCandidateError: nothing of a class is usable.
        KeyboardInterrupt: timing was interrupted; what was recorded before stays.
    """
    say(f"{sum(map(len, pool_of.values()))} kernels for {len(problems)} problems")
    defaults = {policy.default(problem) for problem in problems}
    rows_of = {
        key: _prepare(pool, defaults, policy, pipeline, say)
        for key, pool in _build(pool_of, pipeline, say)
    }
    tuned = []
    for number, problem in enumerate(problems, start=1):
        rows, built = rows_of[class_of(problem)]
        if problem.deterministic:
            rows = [row for row in rows if row.candidate.deterministic]
        default = policy.default(problem)
        raced = race(problem, policy, default, rows, built, pipeline, seconds)
        pick = choose(raced, default)
        record = extended(
            None,
            raced,
            problem=problem,
            purpose=problem.direction,
            policy=policy,
            pick=pick.candidate,
            default=default,
            confirmed=pick.candidate == default,
            environment=pipeline.environment,
        )
        tuned.append(records.put(record))
        us = median_us(pick) or inf
        say(
            f"[{number}/{len(problems)}] {problem.describe()}: {us:.1f} us "
            f"({problem.flops / us / 1e6:.0f} TFLOP/s) {pick.candidate.name}"
        )
    return tuned


Prepared = tuple[list[Row], dict[str, Built]]


def _build(
    pool_of: Mapping[ClassKey, Sequence[Candidate]], pipeline: Pipeline, say: Say
) -> Iterable[tuple[ClassKey, list[tuple[Candidate, Built | Outcome]]]]:
    """Every pool's results, all built in one batch."""
    wanted = [candidate for pool in pool_of.values() for candidate in pool]

    def progress(done: int, total: int, message: str) -> None:
        if done % 16 == 0 or done == total:
            say(f"built {done}/{total}: {message}")

    results = dict(
        zip(
            wanted,
            pipeline.build([render(candidate) for candidate in wanted], progress),
            strict=True,
        )
    )
    for key, pool in pool_of.items():
        yield key, [(candidate, results[candidate]) for candidate in pool]


def _prepare(
    pool: Sequence[tuple[Candidate, Built | Outcome]],
    defaults: Collection[Candidate],
    policy: Policy,
    pipeline: Pipeline,
    say: Say,
) -> Prepared:
    """Rows of a class's pool after build and verification, and the built kernels."""
    rows: list[Row] = []
    built: dict[str, Built] = {}
    for candidate, result in pool:
        small = small_problem(candidate)
        if isinstance(result, Outcome):
            outcome = result
        else:
            built[candidate.name] = result
            outcome = usable(small, candidate, result, policy)
            # A default serves all who have not tuned: its time is what the others must beat.
            if outcome.ok or candidate in defaults:
                outcome = pipeline.verify(small, result, deterministic=candidate.deterministic)
        if not outcome.ok:
            say(f"{candidate.name}: {outcome.kind}: {outcome.reason}")
        rows.append(
            Row(
                candidate=candidate,
                estimate=estimate(small, candidate, policy.spec),
                outcome=outcome,
                artifact=None if isinstance(result, Outcome) else result.path,
                source_digest=source_digest(render(candidate)),
                code_digest=None if isinstance(result, Outcome) else result.code_digest,
            )
        )
    return rows, built
