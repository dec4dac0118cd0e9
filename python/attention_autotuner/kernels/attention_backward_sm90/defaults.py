"""The candidate of attention's backward of family ``sm90`` that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...arch.spec import ArchSpec
from ...core.modifications import SPANS, WINDOW
from ...core.problem import Problem
from ..shared.passes import first_legal
from . import claims, suitability
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
# Keys beyond 64, by whether they are causal, with which few blocks suffice.
SHORT = {False: 256, True: 512}
CAUSAL_WAVES = {False: 1.0, True: 1.6}  # by whether head dims are beyond 64
SLOW = frozenset({"bias_table", "sinks"})  # beside which they pay up to a causal block an SM
# Without a causal mask: blocks of queries find SMs that are idle from the beginning, or a second wave is nearly empty.
EVEN_WAVES = 0.5
SECOND_WAVE = (1.0, 1.52)  # beyond 64
LEAST_SECOND_WAVE = 0.7  # in place of the first of these, with up to twice as many keys
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
    if claims.pays_dynamic(problem, spec):
        first_claimed = replace(space, claimed_adds=claims.claimed_adds(problem, spec))
        claimed = _first(problem, spec, claimed_points(problem, first_claimed, spec))
        if claimed is not None:
            return claimed
    return _dispatched(problem, listed, spec)


def _pays_two_passes(problem: Problem, spec: ArchSpec) -> bool:
    """True where two passes are the fastest: their blocks run side by side, and one fused pass leaves SMs idle.

    On an H200, bf16, against one fused pass, d128: 42 us against 52 at 2 x 8 x 1008 with sinks, 89 against 99 at
    1 x 11 x 2048, both causal, 76 against 103 at 2 x 2 x 2048 without a mask, but 58 against 53 at 5 x 2 x 1024. At d64
    24 against 28 at 5 x 2 x 1024, but 27 against 25 at 5 x 8 x 512, both causal. With 256 queries on 8192 keys 144
    against 21, with 512 on 1024 44 against 56. Packed sequences took 1.15 to 1.77 of the time with two.
    """
    if not suitability.has_few_blocks(problem, spec):
        return False
    if problem.seqlen_k > MOST_KEYS * problem.seqlen_q:
        return False
    mods = set(problem.compiled_modifications)
    waves = suitability.ctas(problem) / spec.num_sms
    beyond = problem.widest_dim > suitability.HELD_DIM
    short = beyond and problem.seqlen_k <= SHORT[problem.causal]
    raced_windows = problem.causal and "sinks" not in mods and (beyond or mods == {WINDOW})
    if WINDOW in mods and not raced_windows:
        return False
    if problem.causal and "attn_mask" not in mods:
        return (short and mods <= {SPANS, "sinks"}) or waves <= CAUSAL_WAVES[
            beyond and not SLOW & mods
        ]
    if waves <= EVEN_WAVES:
        return True
    if not beyond or {"attn_mask", "bias_table"} & mods:
        return False
    simple = mods <= {"sinks", "alibi_slopes"}
    if short and simple:
        return True
    least, most = SECOND_WAVE
    if simple and problem.seqlen_k <= 2 * SHORT[False]:
        least = LEAST_SECOND_WAVE
    return least < waves <= most


def _dispatched(
    problem: Problem, space: AttentionBackwardSm90Space, spec: ArchSpec
) -> Knobs | None:
    """The first point whose blocks nobody claims.

    Blocks of few steps take the shorter steps, and those that are uneven as well no turns: on an H200 they were 2 %
    slower there at 512 tokens. Where scores are changed there are none either, nor in packed sequences, where they gain
    nothing. Launches are early and stores gathered.
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
    if first is None:
        return None
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
