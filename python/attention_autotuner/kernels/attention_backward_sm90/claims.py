"""Which blocks of keys CTAs of attention's backward of family ``sm90`` claim, as races on an H200 have it."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.modifications import PACKED, SPANS, WINDOW
from ...core.problem import Problem
from .knobs import DqAdd
from .suitability import (
    BELOW_WIDE,
    CHANGED,
    FEW_WAVES,
    HELD_DIM,
    PLAIN,
    SINKS,
    WIDE,
    blocks,
    blocks_of_head,
    finds_neighbours,
    has_waves,
    is_narrow,
    is_uneven,
    is_unlike,
    may_queue,
    pays_masked,
    pays_queued,
)

CLAIMED_WAVES = 7
"""Blocks of keys an SM, from which they are claimed by CTAs that stay."""
CLAIMED_SOONER = 3.2  # from which long even blocks are, and masked ones of groups of heads
CLAIMED_LATER = 10  # from which masked ones are on long keys
SHORT_KEYS, LONG_KEYS = 512, 2048
"""Keys up to which and beyond which claims of masked and of tailed blocks pay sooner or later."""
TAILED = 1.4  # from which causal ones are in lists with a tail
TAILED_SHORT = 1.9  # the same with short keys
TAILED_HEADS = 0.8  # the same of plain scores where no heads share keys
TAILED_LONG = 0.3  # the same of plain scores with long keys
LONG_TAILED_KEYS = 2048
TAILED_PACKED = frozenset({PACKED, WINDOW, "alibi_slopes", "softcap"})
"""Modifications with which packed causal sequences were raced in lists with a tail, beyond d64.

On an H200, bf16, d128, against blocks by length: 562 us against 841 with ALiBi and 621 against 914 with a softcap, 8/1
heads of one sequence of 8192 tokens, but 649 against 626 and 702 against 685 with four of 4096; in a window of 1024
keys 897 against 938 with 18 of up to 2678 tokens and 28/4 heads, but 330 against 310 with 8/1.
"""
QUEUED_KEYS, QUEUED_CAUSAL_WAVES = 256, 8  # up to and from which shares of causal blocks are queued
MASKED = frozenset({"attn_mask"})
CLAIMED = PLAIN | CHANGED | MASKED | {PACKED}  # with which claims were raced
LONG_EVEN_ROWS = 1024  # queries, beyond which even ones are as well, in longer steps
LONG_CLAIMED_ROWS = 2048  # beyond which uneven ones take longer steps
LONG_MODIFIED_ROWS = 4096  # and with ALiBi or a prefix
QUEUED_BLOCKS = 7
"""Blocks of keys of a head, from which even ones are claimed where the warpgroups of the keys compute queued shares.

With a fixed share as many CTAs run as are whole heads of blocks, and begin a head together. On an H200, fp16, without a
mask, d128, against that: 438 us against 420 with 512 tokens, 832 against 849 with 896, 712 against 738 with 1000.
"""
QUEUED_START = {WIDE: 0.4, BELOW_WIDE: 1.2}
"""Blocks' time that CTAs which claim wait for each other at first, where those of a fixed share wait in a ring.

On an H200, without a mask, d128: 79 us against 66 with a block an SM, 2325 against 2159 with four, 2489 against 2534
with sixteen, and 1600 against 1890 with 3333 tokens, whose blocks of whole heads employ 108 SMs. At d112 with sixteen
2329 against 2248.
"""


def pays_dynamic(problem: Problem, spec: ArchSpec) -> bool:
    """True where CTAs that stay and claim the next block of keys are the fastest: of uneven blocks, and of long ones.

    On an H200 335 us against 359 at 32 x 16 x 512, d128, causal, 719 against 771 with 2048 tokens, 412 against 452 at
    32 x 32 x 512, d64, 735 against 756 in a window and 576 against 650 with 16 documents. With a mask 764 against 794
    in one race and 744 against 721 in another. Where shares are queued, the other list has the same order, and claims
    gain at any number of blocks: 324 us against 354 at 32 x 16 x 512, d128, causal, 142 against 145 at 4 x 16 x 1000,
    59 against 62 at 4 x 8 x 1000, d64.
    """
    if problem.deterministic:
        return pays_queued(problem, spec) and may_claim(problem, spec)
    raced = problem.score == "softmax" and CLAIMED.issuperset(problem.compiled_modifications)
    return (
        raced
        and has_waves(problem, spec, _claimed_waves(problem, spec))
        and may_claim(problem, spec)
    )


def _claimed_waves(problem: Problem, spec: ArchSpec) -> float:
    """Blocks of keys an SM, from which they are claimed.

    On an H200, bf16, without a causal mask: d128, 879 us against 966 at 3 x 80/20 x 1251. With an explicit mask 1198
    against 1277 at 1 x 16 x 8192, d64. For causal lists with a tail see :func:`_tailed_waves`, for those of packed
    sequences as well: 540 us against 813 by length with 8/1 heads of one of 8192 tokens, d128.
    """
    changed = set(problem.compiled_modifications) - SINKS
    if problem.packed and problem.widest_dim > HELD_DIM and changed <= TAILED_PACKED:
        if problem.causal:
            return _tailed_waves(problem, plain=WINDOW not in changed)
        return CLAIMED_SOONER if changed == {PACKED} else CLAIMED_WAVES
    if PACKED in changed or (changed - CHANGED - MASKED and not problem.causal):
        return CLAIMED_WAVES
    if not problem.causal:
        return CLAIMED_SOONER if _is_long(problem, spec) else CLAIMED_WAVES
    if not is_uneven(problem, spec):
        return CLAIMED_WAVES if changed - CHANGED - MASKED else CLAIMED_SOONER
    if not changed & MASKED:
        few_blocks = problem.seqlen_k <= QUEUED_KEYS and pays_queued(problem, spec)
        return CLAIMED_SOONER if few_blocks else _tailed_waves(problem, plain=not changed)
    if problem.seqlen_k > LONG_KEYS:
        return CLAIMED_LATER
    if problem.seqlen_k <= SHORT_KEYS:
        return FEW_WAVES
    return CLAIMED_SOONER if problem.heads_q > problem.heads_kv else CLAIMED_WAVES


def _tailed_waves(problem: Problem, *, plain: bool) -> float:
    """The same of causal blocks, whose list has a tail of heads side by side.

    On an H200, bf16, against lists by length, claims took 0.73 to 1.02 of the time of 118 random shapes with 1.9 blocks
    an SM and more, 0.91 in the mean: 309 us against 353 at 2 x 24/8 x 2176, d128, 482 against 528 at 3 x 16 x 3307,
    d96, 823 against 1130 at 3 x 48/6 x 1949, ALiBi. With fewer blocks: 51 against 55 at 1 x 16 x 808 and 223 against
    231 at 1 x 4/1 x 6144, but 67 against 42 at 3 x 32/16 x 265 and 169 against 153 at 8 x 6/2 x 1280, d112.
    """
    if plain and problem.heads_q == problem.heads_kv:
        return TAILED_HEADS
    if plain and problem.seqlen_k >= LONG_TAILED_KEYS:
        return TAILED_LONG
    return TAILED_SHORT if problem.seqlen_k <= SHORT_KEYS else TAILED


def claims_longer_steps(problem: Problem) -> bool:
    """True where steps of 80 queries pay by turns in blocks that are claimed, if they do not have few steps.

    On an H200, d128, causal, against 64: 904 us against 974 at 4 x 16 x 3333, bf16, 736 against 717 with 2048 tokens;
    with ALiBi 2333 against 2412 at 8192, a tie at 4096, packed 4406 against 4564 at 1 x 64/8 x 8192; with a prefix 2743
    against 2786 and 1567 against 1547; 794 against 762 in a window, 672 against 635 with documents. In packed sequences
    614 against 618 with 18 of up to 2678 tokens and 16 heads, 2524 against 2717 with 64/8, 18051 against 19738 with one
    of 16384.
    """
    mods = set(problem.modifications) | set(problem.compiled_modifications)
    if mods <= SINKS | {PACKED}:
        return problem.seqlen_q > (LONG_CLAIMED_ROWS if problem.causal else LONG_EVEN_ROWS)
    many_steps = mods <= SINKS | {"alibi_slopes", "prefix_lens", SPANS, PACKED}
    return many_steps and problem.seqlen_q > LONG_MODIFIED_ROWS


def _is_long(problem: Problem, spec: ArchSpec) -> bool:
    """True where even blocks of keys have so many steps of 80 queries that claims gain there, too.

    On an H200, fp16, d128, without a mask, against bulk additions and a fixed share: 1312 us against 1333 with 2048
    tokens, 2361 against 2426 with 4096, 4625 against 4724 with 8192, a tie with 16384, and 738 against 722 with 1024.
    """
    raced = (SINKS | {"softcap"}).issuperset(problem.compiled_modifications)
    dims = {problem.padded_dim_qk, problem.padded_dim_v}
    even = (
        problem.score == "softmax"
        and raced
        and dims == {WIDE}
        and problem.seqlen_q > LONG_EVEN_ROWS
    )
    return even and finds_neighbours(problem, spec)


def claimed_adds(problem: Problem, spec: ArchSpec) -> tuple[DqAdd, ...]:
    """Ways in which shares of dQ are added where blocks of keys are claimed, the fastest first.

    Sums that nobody clears pay, but for a softcap on long keys or without a causal mask: on an H200, fp16, causal, 1422
    us against 1525 without at d128 with 4096 tokens, 5074 against 5585 with 16384, and 1677 against 1712 at d64; bf16,
    d128, 896 against 981 at 6 x 12 x 2128 without a mask, but 466 against 431 at 92 x 8/4 x 455, causal.
    """
    if pays_queued(problem, spec) and not _pays_tail(problem, spec):
        return ("queued",)
    slow = not problem.causal or problem.seqlen_k > LONG_KEYS
    return ("bulk",) if slow and "softcap" in problem.compiled_modifications else ("stored",)


def _pays_tail(problem: Problem, spec: ArchSpec) -> bool:
    """True where a tail gains more than queued shares, whose list has none.

    On an H200 302 us against 332 at 2 x 224/32 x 810, d64, and 131 against 133 at 4 x 32 x 1024, but 246 against 244
    at 8 x 32 x 1024. In packed sequences, bf16, d128, 5432 against 5746 at 4 x 64/8 x 4096, 638 against 705 with one of
    6000 tokens beside seven short ones, 614 against 613 with 18 of up to 2678; at d64 1189 against 1260 at
    1 x 32 x 8192, but 706 against 689 where lengths are unlike. In a window of 1024 keys 1946 against 2032 with 18
    sequences and 64/8 heads, but 532 against 523 with 16.
    """
    if problem.deterministic or not problem.causal or not is_uneven(problem, spec):
        return False
    if problem.packed:
        plain = WINDOW not in problem.compiled_modifications
        return problem.widest_dim > HELD_DIM or (plain and not is_unlike(problem))
    return problem.seqlen_k > QUEUED_KEYS and not has_waves(problem, spec, QUEUED_CAUSAL_WAVES)


def may_claim(problem: Problem, spec: ArchSpec) -> bool:
    """True where blocks of keys that are claimed are offered."""
    if may_queue(problem, spec):
        return is_uneven(problem, spec) or not _pays_fixed_share(problem, spec)
    if problem.deterministic or problem.widest_dim > WIDE:
        return False
    uneven = is_uneven(problem, spec) or is_narrow(problem, spec)
    return uneven or _is_long(problem, spec) or pays_masked(problem, spec)


def _pays_fixed_share(problem: Problem, spec: ArchSpec) -> bool:
    """True where even blocks whose shares of dQ are queued need no claims."""
    if problem.widest_dim not in QUEUED_START:
        return False
    of_head, every = blocks_of_head(problem), blocks(problem)
    if of_head > spec.num_sms:
        return False
    if of_head < QUEUED_BLOCKS or every < CLAIMED_WAVES * spec.num_sms:
        return True
    employed = spec.num_sms // of_head * of_head
    return -(-every // employed) <= every / spec.num_sms + QUEUED_START[problem.widest_dim]
