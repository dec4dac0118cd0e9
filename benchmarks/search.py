"""Tuning a suite at once: problems of one head-dim class share their builds, and each races the whole class's pool.

A pool is the union of what the cost model would try for each problem of the class, and the policy's defaults. All pools
are built in one batch, each kernel is verified once, and every problem's race writes a tuning record like that of
``tune``; a problem of deterministic mode races the deterministic part of its pool. Picks that beat the default are left
unconfirmed: that is for a second process to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from attention_autotuner.arch import Policy
from attention_autotuner.codegen.build import Progress
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.class_pools import ClassKey, class_of
from attention_autotuner.tuning.pipeline import Pipeline
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.result import median_us
from attention_autotuner.tuning.stages import Engine, built_of, choose, source_digests

Say = Callable[[str], None]


def telling(say: Say) -> Progress:
    """A listener of builds that says every sixteenth, and the last."""

    def progress(done: int, total: int, name: str, _seconds: float) -> None:
        if done % 16 == 0 or done == total:
            say(f"built {done}/{total}: {name}")

    return progress


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
    defaults = {policy.untuned(problem) for problem in problems}
    engine = Engine(policy=policy, pipeline=pipeline, records=records, fresh=True)
    results = built_of((c for pool in pool_of.values() for c in pool), pipeline, telling(say))
    digests = source_digests(results)
    row_of = {
        candidate: engine.prepared(
            candidate, result, digests[candidate], default=candidate in defaults
        )
        for candidate, result in results.items()
    }
    for row in row_of.values():
        if not row.outcome.ok:
            say(f"{row.candidate.name}: {row.outcome.kind}: {row.outcome.reason}")
    tuned = []
    for number, problem in enumerate(problems, start=1):
        rows = [row_of[candidate] for candidate in pool_of[class_of(problem)]]
        if problem.deterministic:
            rows = [row for row in rows if row.candidate.deterministic]
        default = policy.untuned(problem)
        raced, interrupted = engine.race(problem, rows, seconds)
        if interrupted:
            raise KeyboardInterrupt
        pick, _ = choose(raced, default)
        confirmed = pick.candidate == default
        tuned.append(engine.remember(problem, raced, pick.candidate, confirmed=confirmed))
        us = median_us(pick) or inf
        say(
            f"[{number}/{len(problems)}] {problem.describe()}: {us:.1f} us "
            f"({problem.flops / us / 1e6:.0f} TFLOP/s) {pick.candidate.name}"
        )
    return tuned
