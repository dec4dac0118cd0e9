"""Pools: what problems of one head-dim class race on, so that they share their builds.

A pool is the union of what the cost model would try for each problem of the class, and the policy's defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

from ..arch.policy import Policy
from ..core.candidate import Candidate
from ..core.outcome import Infeasible, Outcome
from ..core.problem import Problem
from ..kernels.cost_model import estimate, rank, refine
from ..kernels.legality import check
from ..kernels.registry import kernel_of
from .failures import require_usable
from .pipeline import Built, Pipeline
from .result import Row, gain_over
from .search import MIN_GAIN
from .shortlist import Ranked, shortlist
from .spills import check_spills

ClassKey = tuple[str, str, str, str, str, int, int, int]
VERIFIED_SEQLEN = 515
MASKED_SEQLEN = 520  # rows of a mask that are read 16 bytes at a time begin at multiples of 8
COMPANIONS = 3


def class_of(problem: Problem) -> ClassKey:
    """What problems share that can run the same kernels."""
    p = problem
    kind = (p.op, p.mask, p.direction, p.form, p.dtype)
    return (*kind, p.padded_dim_qk, p.padded_dim_v, p.alignment_bytes)


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
        dims = (one.dtype, one.padded_dim_qk, one.padded_dim_v, one.copy_bytes)
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
    best: dict[object, Candidate] = {}
    for one, _ in ranked:
        companion = kernel_of(one).describe(one).companion
        if companion is not None:
            best.setdefault(companion, one)
    return list(islice(best.values(), 1, 1 + COMPANIONS))


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


def small_problem(one: Candidate) -> Problem:
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
        dim_qk=one.padded_dim_qk,
        dim_v=one.padded_dim_v,
        causal=one.score == "decayed",
        alignment_bytes=one.copy_bytes,
        mask=one.mask,
        form=one.form,
    )


def usable(problem: Problem, one: Candidate, result: Built, policy: Policy) -> Outcome:
    """Whether the compiler's report leaves a kernel worth timing, as a search judges it."""
    report = result.report
    outcome = check_spills(one, report, timed=True)
    if outcome.ok and refine(problem, one, policy.spec, report).occupancy == 0:
        return Infeasible(reason=f"no CTA fits an SM with {report.registers} registers")
    return outcome


def race(
    problem: Problem,
    policy: Policy,
    default: Candidate,
    rows: Sequence[Row],
    built: dict[str, Built],
    pipeline: Pipeline,
    seconds: float,
) -> list[Row]:
    """The pool's rows with their timings on a problem, the fastest first, failures last.

    Args:
        problem: what is timed.
        policy: whose candidates.
        default: the policy's own for this problem.
        rows: the pool, after build and verification.
        built: candidate name -> kernel.
        pipeline: measures.
        seconds: of timing rounds.

    Raises:
        NoCandidateError: no row is usable.
        KeyboardInterrupt: timing was interrupted.
    """
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
