"""Pools: what problems of one head-dim class race on, so that they share their builds.

A pool is the union of what the cost model would try for each problem of the class, and the policy's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

from ..arch.policy import Policy
from ..core.candidate import Candidate
from ..core.outcome import Ok, Outcome
from ..core.problem import Problem
from ..kernels.cost_model import estimate, rank, refine
from ..kernels.legality import check
from ..kernels.registry import kernel_of
from .failures import require_usable
from .pipeline import Built, Pipeline
from .result import Row
from .shortlist import Ranked, shortlist
from .stages import examine, time_rows

ClassKey = tuple[str, str, str, str, str, bool, int, int, int]
VERIFIED_SEQLEN = 515
MASKED_SEQLEN = 520  # rows of a mask that are read 16 bytes at a time begin at multiples of 8
COMPANIONS = 3


def class_of(problem: Problem) -> ClassKey:
    """The fields that problems share which can run the same kernels."""
    p = problem
    kind = (p.op, p.mask, p.direction, p.form, p.dtype, p.key_bounds)
    return (*kind, p.padded_dim_qk, p.padded_dim_v, p.alignment_bytes)


def pools(
    problems: Iterable[Problem], policy: Policy, *, top_k: int, class_limit: int | None = None
) -> dict[ClassKey, list[Candidate]]:
    """The candidates that each class races, without repeats.

    Args:
        problems: of any classes.
        policy: whose candidates.
        top_k: how many each problem contributes beside its default; one of deterministic mode adds
            one of :func:`other_companions`.
        class_limit: how many the problems of a class contribute beside their defaults, those of deterministic mode by
            themselves; every problem's best go before any problem's second. None is no limit.
    """
    pool_of: dict[ClassKey, dict[Candidate, None]] = {}
    wanted: dict[tuple[ClassKey, bool], list[list[Candidate]]] = {}
    for problem in problems:
        default = policy.default(problem)
        ranked = rank(problem, policy.legal(problem), policy.spec)
        preferred = [
            candidate for candidate, _ in shortlist(ranked, default, top_k) if candidate != default
        ]
        if problem.deterministic:
            # Each problem tries another one, after its own two best.
            place = len(wanted.get((class_of(problem), True), ())) % COMPANIONS
            preferred[2:2] = other_companions(ranked)[place : place + 1]
        pool_of.setdefault(class_of(problem), {}).setdefault(default)
        wanted.setdefault((class_of(problem), problem.deterministic), []).append(preferred)
    for (key, _), lists in wanted.items():
        in_turn = (
            candidate
            for place in zip_longest(*lists)
            for candidate in place
            if candidate is not None
        )
        pool_of[key] |= dict.fromkeys(islice(dict.fromkeys(in_turn), class_limit))
    return {key: list(pool) for key, pool in pool_of.items()}


def known_pools(
    problems: Iterable[Problem], policy: Policy, known: Iterable[Candidate]
) -> dict[ClassKey, list[Candidate]]:
    """The defaults of each class, and what is known to do well on it: to time again what was searched before.

    Args:
        problems: of any classes.
        policy: whose candidates; what it does not allow is left out.
        known: candidates of any classes.
    """
    pool_of: dict[ClassKey, dict[Candidate, None]] = {}
    for problem in problems:
        pool_of.setdefault(class_of(problem), {}).setdefault(policy.default(problem))
    for candidate in known:
        dims = (
            candidate.dtype,
            candidate.key_bounds,
            candidate.padded_dim_qk,
            candidate.padded_dim_v,
            candidate.copy_bytes,
        )
        for form in dict.fromkeys(("auto", candidate.form)):
            key = (candidate.op, candidate.mask, candidate.direction, form, *dims)
            if key in pool_of and check(candidate, policy.spec) is None:
                pool_of[key].setdefault(candidate)
    return {key: list(pool) for key, pool in pool_of.items()}


def other_companions(ranked: Sequence[Ranked]) -> list[Candidate]:
    """The best candidates of other dQ passes beside a key pass than the best of all, up to :data:`COMPANIONS`.

    A shortlist looks for variety in the main pass. In deterministic mode the other one is a third of the work.

    Args:
        ranked: all legal candidates, best first.
    """
    best: dict[object, Candidate] = {}
    for candidate, _ in ranked:
        companion = kernel_of(candidate).describe(candidate).companion
        if companion is not None:
            best.setdefault(companion, candidate)
    return list(islice(best.values(), 1, 1 + COMPANIONS))


def small_problem(candidate: Candidate) -> Problem:
    """A problem that a candidate is verified on: of odd length where its copies allow that."""
    seqlen = MASKED_SEQLEN if candidate.mask == "explicit" else VERIFIED_SEQLEN
    return Problem(
        op=candidate.op,
        direction=candidate.direction,
        dtype=candidate.dtype,
        batch=1,
        heads_q=2,
        heads_kv=2,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        dim_qk=candidate.padded_dim_qk,
        dim_v=candidate.padded_dim_v,
        causal=candidate.score == "decayed",
        alignment_bytes=candidate.copy_bytes,
        mask=candidate.mask,
        form=candidate.form,
        key_bounds=candidate.key_bounds,
    )


def prepared(
    candidate: Candidate,
    result: Built | Outcome,
    policy: Policy,
    defaults: Collection[Candidate],
    source_digest: str,
    verify: Callable[[Problem, Candidate, Built], Outcome],
) -> Row:
    """A row of a pool after build and verification.

    Args:
        candidate: the kernel.
        result: what became of its build.
        policy: whose candidate.
        defaults: are verified even if they spill: they serve untuned callers, their time is what others must beat.
        source_digest: what its source says.
        verify: the verifier.
    """
    small = small_problem(candidate)
    row = Row(
        candidate=candidate,
        estimate=estimate(small, candidate, policy.spec),
        outcome=result if isinstance(result, Outcome) else Ok(),
        source_digest=source_digest,
    )
    if isinstance(result, Outcome):
        return row
    row = examine(small, row, result, policy, timed=True)
    if row.outcome.ok or candidate in defaults:
        row = replace(row, outcome=verify(small, candidate, result))
    return row


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
        candidate = row.candidate
        expected = estimate(problem, candidate, policy.spec)
        if candidate.name in built:
            expected = refine(problem, candidate, policy.spec, built[candidate.name].report)
        estimated.append(replace(row, estimate=expected))
    require_usable(problem, policy.name, estimated)
    raced, interrupted = time_rows(problem, default, estimated, built, pipeline, seconds)
    if interrupted:
        raise KeyboardInterrupt
    require_usable(problem, policy.name, raced)
    return raced
