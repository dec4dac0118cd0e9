"""The candidate of attention's backward of family ``sm90`` that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...arch.spec import ArchSpec
from ...core.modifications import PACKED, SPANS, WINDOW
from ...core.problem import Problem
from ..shared.passes import first_legal
from . import suitability
from .knobs import AttentionBackwardSm90Knobs
from .resources import SWAPPED_BLOCK
from .rules import PRUNING_PREDICATES, passes_of
from .space import (
    AHEAD,
    FEEDS,
    SPACES,
    WITHOUT_TURNS,
    AttentionBackwardSm90Space,
    Feed,
    claimed_points,
    points_in,
    usual_feeds,
    with_launches,
)

Knobs = AttentionBackwardSm90Knobs
# Two passes whose blocks run side by side: their tiles, and limits up to which they are the fastest. Waves are blocks
# of keys an SM.
TILES: dict[str, Any] = {"key_blocks": (64,), "query_tiles": ((2, 64), (2, 128))}
MOST_KEYS = 2  # for each query: a CTA of the pass over queries takes them one after the other
SHORT = 512  # keys with which few blocks suffice, for head dims beyond 64
CAUSAL_WAVES = {False: 1.0, True: 1.6}  # by whether head dims are beyond 64
EVEN_WAVES = (
    0.5  # without a causal mask: blocks of queries find SMs that are idle from the beginning
)
SECOND_WAVE = (1.0, 1.52)  # or so many, as the second one is nearly empty
LEAST_SECOND_WAVE = (
    0.7  # in place of the first of these, beyond 64 and with up to twice as many keys
)
# Modifications with which defaults launch early and store gathered, as those of plain scores do.
GATHERED = frozenset({WINDOW, SPANS, PACKED, "sinks"})
LONG_ROWS = 1024  # of queries, beyond which orders by turns pay, and their longer steps
LONG_CAUSAL_ROWS = 4096  # beyond which those longer steps pay where blocks are uneven
LEAST_ROWS = 64  # of a warpgroup: with fewer queries or keys, most of its MMAs are wasted


def default(problem: Problem, spec: ArchSpec) -> Knobs | None:
    """The first legal point; None where there is none, or fewer queries or keys than a warpgroup has.

    None with an explicit mask as well, unless fused passes pay. Where the problem asks for determinism, shares of dQ
    are queued, or where they cannot be there is a pass over queries, so that no CTA waits for another: on an H200 two
    passes took 1.04 to 1.35 of the time without an order, and a queue 0.95 to 1.07. So they are in the usual mode where
    that is as fast. Few blocks have two passes, side by side. Many uneven blocks are claimed by CTAs that stay, by
    turns where registers allow it, and most even ones whose shares are queued.
    """
    few = min(problem.seqlen_q, problem.seqlen_k) < LEAST_ROWS and not problem.packed
    if few or (problem.mask == "explicit" and not suitability.pays_masked(problem, spec)):
        return None
    space = SPACES.get(spec.name, AttentionBackwardSm90Space())
    listed = replace(space, cta_orders=(suitability.usual_order(problem, spec),))
    if _pays_two_passes(problem, spec):
        passes = replace(listed, shares=(), early=(True,), **TILES)
        beside = _first(problem, spec, points_in(problem, passes, spec))
        if beside is not None:
            return beside
    if suitability.pays_dynamic(problem, spec):
        first_claimed = replace(space, claimed_adds=suitability.claimed_adds(problem, spec))
        claimed = _first(problem, spec, claimed_points(problem, first_claimed, spec))
        if claimed is not None:
            return claimed
    return _dispatched(problem, listed, spec)


def _pays_two_passes(problem: Problem, spec: ArchSpec) -> bool:
    """True where two passes are the fastest: their blocks run side by side, and one fused pass leaves SMs idle.

    On an H200, bf16, against one fused pass, d128: 41 us against 61 at 1 x 16 x 1024, 65 against 93 at 1 x 8 x 2048,
    56 against 64 at 1 x 24 x 1024, all causal, 22 against 30 at 1 x 16 x 512 without a mask, but 172 against 162 at
    1 x 4 x 4096. At d64 25 against 34 at 1 x 16 x 1024, but 69 against 60 at 1 x 16 x 2048, both causal. In a causal
    window of a quarter of the keys, 38 against 54 at 1 x 16 x 1024, d128. With 256 queries on 8192 keys 144 against 21,
    with 512 on 1024 44 against 56. Other modifications were not raced.
    """
    mods = set(problem.compiled_modifications)
    raced = mods <= {WINDOW} if problem.causal else not mods
    if not raced or not suitability.has_few_blocks(problem, spec):
        return False
    if problem.seqlen_k > MOST_KEYS * problem.seqlen_q:
        return False
    waves = suitability.ctas(problem) / spec.num_sms
    beyond = problem.widest_dim > suitability.HELD_DIM
    short = problem.seqlen_k <= SHORT
    if beyond and short:
        return True
    if problem.causal:
        return waves <= CAUSAL_WAVES[beyond]
    if waves <= EVEN_WAVES:
        return True
    least, most = SECOND_WAVE
    if beyond and problem.seqlen_k <= 2 * SHORT:
        least = LEAST_SECOND_WAVE
    return (beyond or short) and least < waves <= most


def _dispatched(
    problem: Problem, space: AttentionBackwardSm90Space, spec: ArchSpec
) -> Knobs | None:
    """The first point whose blocks nobody claims.

    Blocks of few steps take the shorter steps, and those that are uneven as well no turns: on an H200 they were 2 %
    slower there at 512 tokens. Where scores are changed there are none either, nor in packed sequences, where they gain
    nothing. Launches are early and stores gathered, but for such scores with slopes, a bias or a softcap: with ALiBi at
    d128 the loop spills then, and no GPU has run the others.
    """
    uneven, long = suitability.is_uneven(problem, spec), problem.seqlen_q > LONG_ROWS
    modified = not suitability.SINKS.issuperset(problem.compiled_modifications)
    swaps = not modified and problem.seqlen_q > (LONG_CAUSAL_ROWS if uneven else LONG_ROWS)
    if not swaps:
        shorter = tuple(share for share in space.shares if share[1] != SWAPPED_BLOCK)
        space = replace(space, shares=shorter)
    changed = not suitability.PLAIN.issuperset(problem.compiled_modifications)
    few_steps = (uneven or modified) and not long
    fused = WITHOUT_TURNS if changed or few_steps else FEEDS
    if suitability.takes_both(problem):
        fused = AHEAD
    if fused is FEEDS:
        fused = usual_feeds(problem)

    def first_of(
        space: AttentionBackwardSm90Space, fused: tuple[Feed, ...] = fused
    ) -> Knobs | None:
        return _first(problem, spec, points_in(problem, space, spec, fused))

    if problem.deterministic:
        if suitability.pays_queued(problem, spec) and not changed:
            queued = replace(space, cta_orders=("raster",), dq_adds=("queued",))
            first = first_of(queued, usual_feeds(problem))
            if first is not None and first.dq_share is not None:
                return first
        space = replace(space, shares=())
    first = first_of(space)
    if first is None or not GATHERED.issuperset(problem.compiled_modifications):
        return first
    # What a block of keys costs beside its steps counts most where these are few: on an H200, fp16, d128, 462 us
    # against 514 at 512 tokens, 381 against 423 where these are causal.
    better = with_launches(first, True)
    if better not in points_in(problem, space, spec, fused):
        return first
    if not suitability.pays_stored(problem, first, spec):
        return better
    # Sums that nobody clears: there 454 us against 467, and 369 against 392 causal.
    stored = first_of(replace(space, cta_orders=("raster",), dq_adds=("stored",)))
    if stored is None or stored.dq_share is None:
        return better
    alike = replace(stored, dq_share=better.dq_share, cta_order=better.cta_order) == better
    return stored if alike else better


def _first(problem: Problem, spec: ArchSpec, points: Iterable[Knobs]) -> Knobs | None:
    # Made one by one: the first legal one ends it.
    return first_legal(problem, spec, points, passes_of, PRUNING_PREDICATES)
