"""Pools: what problems of one head-dim class race on, so that they share their builds.

A pool is the union of what the cost model would try for each problem of the class, and the policy's defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest

from ..arch.policy import Policy
from ..core.candidate import Candidate
from ..core.modifications import DOCUMENT_IDS, PACKED, SPANS, WINDOW
from ..core.problem import NO_WINDOW, NOT_PACKED, Problem, of_shape
from ..kernels.legality import check
from ..kernels.registry import kernel_of
from ..operations.registry import OPERATIONS
from .ranking import ranked
from .shortlist import Ranked, shortlist

ClassKey = tuple[str, str, str, str, str, bool, tuple[str, ...], int, int, int, str]
MATRIX_SHAPE = (1, 1, 2056, 264, 4168)  # of one product: several tiles a CTA, and none divides it
VERIFIED_SEQLEN = 515
MASKED_SEQLEN = 520  # rows of a mask that are read 16 bytes at a time begin at multiples of 8
COMPANIONS = 3
SMALL_WINDOW = (200, 77)


def class_of(problem: Problem) -> ClassKey:
    """The fields that problems share which can run the same kernels."""
    p = problem
    kind = (p.op, p.mask, p.direction, p.form, p.dtype, p.key_bounds)
    dims = (p.padded_dim_qk, p.padded_dim_v, p.alignment_bytes)
    return (*kind, p.compiled_modifications, *dims, p.operands)


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
        default = policy.untuned(problem)
        offered = ranked(problem, policy)
        preferred = [
            candidate for candidate, _ in shortlist(offered, default, top_k) if candidate != default
        ]
        if problem.deterministic:
            # Each problem tries another one, after its own two best.
            place = len(wanted.get((class_of(problem), True), ())) % COMPANIONS
            preferred[2:2] = other_companions(offered)[place : place + 1]
        pool_of.setdefault(class_of(problem), {}).setdefault(default)
        wanted.setdefault((class_of(problem), problem.deterministic), []).append(preferred)
    for (key, _), lists in wanted.items():
        in_turn = dict.fromkeys(chain.from_iterable(zip_longest(*lists)))
        in_turn.pop(None, None)  # in the place of what a shorter list lacks
        pool_of[key] |= dict.fromkeys(islice(in_turn, class_limit))
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
        pool_of.setdefault(class_of(problem), {}).setdefault(policy.untuned(problem))
    for c in known:
        dims = (c.padded_dim_qk, c.padded_dim_v, c.copy_bytes)
        for form in dict.fromkeys(("auto", c.form)):
            kind = (c.op, c.mask, c.direction, form, c.dtype, c.key_bounds)
            key = (*kind, c.modifications, *dims, c.operands)
            if key in pool_of and check(c, policy.spec) is None:
                pool_of[key].setdefault(c)
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
    shape = (1, 2, seqlen, candidate.padded_dim_qk, candidate.padded_dim_v)
    return of_shape(
        shape if OPERATIONS[candidate.op].semantics.batched else MATRIX_SHAPE,
        op=candidate.op,
        direction=candidate.direction,
        dtype=candidate.dtype,
        causal=candidate.score == "decayed",
        alignment_bytes=candidate.copy_bytes,
        mask=candidate.mask,
        form=candidate.form,
        operands=candidate.operands,
        key_bounds=candidate.key_bounds,
        modifications=tuple(
            DOCUMENT_IDS if x == SPANS else x
            for x in candidate.modifications
            if x not in (WINDOW, PACKED)
        ),
        packed_rows=(seqlen, seqlen) if PACKED in candidate.modifications else NOT_PACKED,
        window_size=SMALL_WINDOW if WINDOW in candidate.modifications else NO_WINDOW,
    )
