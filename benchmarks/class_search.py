"""Tuning a grid at once: problems of one head-dim class share their builds, and each races the whole class's pool.

A pool is the union of what the cost model would try for each problem of the class, and the policy's defaults. All pools
are built in one batch, each kernel is verified once, and every problem's race writes a tuning record like that of
``tune``; a problem of deterministic mode races the deterministic part of its pool. Picks that beat the default are left
unconfirmed: that is for a second process to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from math import inf

from attention_autotuner.arch import Policy
from attention_autotuner.arch.legality import check
from attention_autotuner.codegen.candidate import Candidate
from attention_autotuner.codegen.knobs import RowPass
from attention_autotuner.codegen.outcome import Infeasible, Ok, Outcome, Spilled
from attention_autotuner.codegen.problem import Problem
from attention_autotuner.codegen.render import kernel_digest, render
from attention_autotuner.tuning.cost_model import estimate, rank, refine
from attention_autotuner.tuning.failures import require_usable
from attention_autotuner.tuning.history import extended
from attention_autotuner.tuning.pipeline import Built, Pipeline
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.result import Row, gain_over, median_us
from attention_autotuner.tuning.search import MIN_GAIN, SPILL_WORTH_TIMING
from attention_autotuner.tuning.shortlist import Ranked, shortlist

Say = Callable[[str], None]
ClassKey = tuple[str, str, str, str, str, int, int, int]
VERIFIED_SEQLEN = 515
MASKED_SEQLEN = 520  # rows of a mask that are read 16 bytes at a time begin at multiples of 8
COMPANIONS = 3


def class_of(problem: Problem) -> ClassKey:
    """What problems share that can run the same kernels."""
    p = problem
    kind = (p.op, p.mask, p.direction, p.form, p.dtype)
    return (*kind, p.class_qk, p.class_v, p.alignment_bytes)


def pools(
    problems: Iterable[Problem], policy: Policy, *, top_k: int, class_limit: int | None = None
) -> dict[ClassKey, list[Candidate]]:
    """What is raced in each class, without repeats.

    Args:
        problems: of any classes.
        policy: whose candidates.
        top_k: how many each problem contributes beside its default; one of deterministic mode adds
            one of :func:`other_companions`.
        class_limit: how many the problems of a class contribute beside their defaults, those of deterministic mode by
            themselves; every problem's best go before any problem's second. None is no limit.
    """
    found: dict[ClassKey, dict[Candidate, None]] = {}
    wanted: dict[tuple[ClassKey, bool], list[list[Candidate]]] = {}
    for problem in problems:
        default = policy.default(problem)
        ranked = rank(problem, policy.legal(problem), policy.spec)
        own = [one for one, _ in shortlist(ranked, default, top_k) if one != default]
        if problem.deterministic:
            # Each problem tries another one, after its own two best.
            place = len(wanted.get((class_of(problem), True), ())) % COMPANIONS
            own[2:2] = other_companions(ranked)[place : place + 1]
        found.setdefault(class_of(problem), {}).setdefault(default)
        wanted.setdefault((class_of(problem), problem.deterministic), []).append(own)
    for (key, _), lists in wanted.items():
        in_turn = (one for place in zip_longest(*lists) for one in place if one is not None)
        found[key] |= dict.fromkeys(islice(dict.fromkeys(in_turn), class_limit))
    return {key: list(pool) for key, pool in found.items()}


def known_pools(
    problems: Iterable[Problem], policy: Policy, known: Iterable[Candidate]
) -> dict[ClassKey, list[Candidate]]:
    """The defaults of each class, and what is known to do well on it: to time again what was searched before.

    Args:
        problems: of any classes.
        policy: whose candidates; what it does not allow is left out.
        known: candidates of any classes.
    """
    found: dict[ClassKey, dict[Candidate, None]] = {}
    for problem in problems:
        found.setdefault(class_of(problem), {}).setdefault(policy.default(problem))
    for one in known:
        dims = (one.dtype, one.class_qk, one.class_v, one.copy_bytes)
        for form in dict.fromkeys(("auto", one.form)):
            key = (one.op, one.mask, one.direction, form, *dims)
            if key in found and check(one, policy.spec) is None:
                found[key].setdefault(one)
    return {key: list(pool) for key, pool in found.items()}


def other_companions(ranked: Sequence[Ranked]) -> list[Candidate]:
    """The best candidates of other dQ passes beside a key pass than the best of all, up to :data:`COMPANIONS`.

    A shortlist looks for variety in the main pass. In deterministic mode the other one is a third of the work.

    Args:
        ranked: all legal candidates, best first.
    """
    best: dict[RowPass, Candidate] = {}
    for one, _ in ranked:
        knobs = one.backward
        if knobs.plan == "pair" and knobs.dq is not None:
            best.setdefault(knobs.dq, one)
    return list(islice(best.values(), 1, 1 + COMPANIONS))


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
        say: told one line at a time.

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
    found = []
    for number, problem in enumerate(problems, start=1):
        rows, built = rows_of[class_of(problem)]
        if problem.deterministic:
            rows = [row for row in rows if row.candidate.deterministic]
        default = policy.default(problem)
        raced = _race(problem, policy, default, rows, built, pipeline, seconds)
        pick = choose(raced, default)
        record = _record(problem, policy, default, pick, raced, pipeline)
        found.append(records.put(record))
        us = median_us(pick) or inf
        say(
            f"[{number}/{len(problems)}] {problem.describe()}: {us:.1f} us "
            f"({problem.flops / us / 1e6:.0f} TFLOP/s) {pick.candidate.name}"
        )
    return found


def choose(raced: Sequence[Row], default: Candidate) -> Row:
    """The fastest, or the default where nothing is at least :data:`MIN_GAIN` faster.

    Args:
        raced: usable rows first, the fastest first.
        default: the policy's own.
    """
    best = raced[0]
    base = next((row for row in raced if row.candidate == default and row.outcome.ok), None)
    if base is None or base is best:
        return best
    return best if gain_over(best, base) >= MIN_GAIN else base


Prepared = tuple[list[Row], dict[str, Built]]


def _build(
    pool_of: Mapping[ClassKey, Sequence[Candidate]], pipeline: Pipeline, say: Say
) -> Iterable[tuple[ClassKey, list[tuple[Candidate, Built | Outcome]]]]:
    """Every pool's results, all built in one batch."""
    wanted = [one for pool in pool_of.values() for one in pool]

    def progress(done: int, total: int, message: str) -> None:
        if done % 16 == 0 or done == total:
            say(f"built {done}/{total}: {message}")

    results = dict(
        zip(wanted, pipeline.build([render(one) for one in wanted], progress), strict=True)
    )
    for key, pool in pool_of.items():
        yield key, [(one, results[one]) for one in pool]


def _prepare(
    pool: Sequence[tuple[Candidate, Built | Outcome]],
    defaults: Collection[Candidate],
    policy: Policy,
    pipeline: Pipeline,
    say: Say,
) -> Prepared:
    """Rows of a class's pool after build and verification, and what was built."""
    rows: list[Row] = []
    built: dict[str, Built] = {}
    for one, result in pool:
        small = _small(one)
        if isinstance(result, Outcome):
            outcome = result
        else:
            built[one.name] = result
            outcome = _usable(small, one, result, policy)
            # A default serves whoever has not tuned: its time is what the others must beat.
            if outcome.ok or one in defaults:
                outcome = pipeline.verify(small, result, deterministic=one.deterministic)
        if not outcome.ok:
            say(f"{one.name}: {outcome.kind}: {outcome.reason}")
        rows.append(
            Row(
                candidate=one,
                estimate=estimate(small, one, policy.spec),
                outcome=outcome,
                artifact=None if isinstance(result, Outcome) else result.path,
                kernel_digest=kernel_digest(render(one)),
            )
        )
    return rows, built


def _small(one: Candidate) -> Problem:
    """A problem that a candidate is verified on: of odd length where its copies allow that."""
    seqlen = MASKED_SEQLEN if one.mask == "explicit" else VERIFIED_SEQLEN
    return Problem(
        op=one.op,
        direction=one.direction,
        dtype=one.dtype,
        batch=1,
        heads_q=2,
        heads_kv=2,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        dim_qk=one.class_qk,
        dim_v=one.class_v,
        causal=one.op == "retention" or one.mask == "decay",
        alignment_bytes=one.copy_bytes,
        mask=one.mask,
        form=one.form,
    )


def _usable(problem: Problem, one: Candidate, result: Built, policy: Policy) -> Outcome:
    """Whether the compiler's report leaves a kernel worth timing, as a search judges it."""
    report = result.report
    spilled = report.spill_store_bytes + report.spill_load_bytes
    if report.loop_spills and spilled > SPILL_WORTH_TIMING:
        return Spilled(reason=f"the main loop spills; {spilled} bytes a thread in all")
    if refine(problem, one, policy.spec, report).occupancy == 0:
        return Infeasible(reason=f"no CTA fits an SM with {report.registers} registers")
    return Ok()


def _race(
    problem: Problem,
    policy: Policy,
    default: Candidate,
    rows: Sequence[Row],
    built: dict[str, Built],
    pipeline: Pipeline,
    seconds: float,
) -> list[Row]:
    """The pool's rows with their timings on a problem, the fastest first, failures last."""
    estimated = []
    for row in rows:
        one = row.candidate
        found = estimate(problem, one, policy.spec)
        if one.name in built:
            found = refine(problem, one, policy.spec, built[one.name].report)
        estimated.append(replace(row, estimate=found))
    require_usable(problem, policy.name, estimated)
    running = sorted(
        (row for row in estimated if row.outcome.ok),
        key=lambda row: (row.candidate != default, row.estimate.us),
    )
    names = [row.candidate.name for row in running]
    timings, interrupted = pipeline.measure(
        problem,
        {name: built[name] for name in names},
        budget_seconds=seconds,
        keep=[default.name] if default.name in names else [],
        on_round=lambda rounds, still: None,
    )
    if interrupted:
        raise KeyboardInterrupt
    by_name = {row.candidate.name: row for row in estimated}
    raced = [
        replace(by_name.pop(timing.name), outcome=timing.outcome, timing=timing)
        for timing in timings
    ]
    raced += by_name.values()
    require_usable(problem, policy.name, raced)
    return raced


def _record(
    problem: Problem,
    policy: Policy,
    default: Candidate,
    pick: Row,
    raced: Sequence[Row],
    pipeline: Pipeline,
) -> TuningRecord:
    return extended(
        None,
        raced,
        problem=problem,
        purpose=problem.direction,
        policy=policy,
        legal=policy.legal(problem),
        pick=pick.candidate,
        default=default,
        confirmed=pick.candidate == default,
        environment=pipeline.environment,
    )
