"""The suitable defaults of attention's backward of family ``sm90``, as races on an H200 have them."""

from __future__ import annotations

from collections.abc import Sequence

from ...arch.spec import ArchSpec
from ...core.modifications import PACKED, SPANS, WINDOW
from ...core.problem import Problem
from ..shared.knobs import CtaOrder
from .cost import nearest_divisor
from .knobs import STORED, AttentionBackwardSm90Knobs, DqBy, knobs_of
from .resources import BackwardPassSm90Shape, splits_of_block
from .rules import MAX_MASKED_DIM

Stages = tuple[int, int]  # of what streams for S, and of dS
Share = tuple[DqBy, int]  # of dQ: who computes it, and the queries of a step
DS_STAGES = (2, 1)
WIDE = 128  # of head dims, the widest of fused passes
BELOW_WIDE = 112  # the widest with registers for the interleaved order, which comes first below
HELD_DIM = 64  # up to which rows are held in registers
SMALL_DIM = 32  # of both head dims, up to which registers hold S and dP of 128 queries
LONG_STEPS: Share = ("own", 128)  # in the serial order alone
LEAST_WINDOW = 512  # of keys, below which windows were not raced with them
LONG_STEP_ROWS = {True: 1024, False: 512}
"""Queries, by whether blocks are causal, beyond which :data:`LONG_STEPS` pay at head dims up to 32.

Nothing of the next step is issued ahead then, but what a step costs beside its MMAs comes half as often. On an H200,
bf16, d32, against 64 queries in the interleaved order: 943 us against 1097 at 4 x 16 x 4096, 3403 against 4050 with
16384 tokens, 536 against 566 and 1743 against 1960 causal; sinks, ALiBi, bias and prefixes 0.88 to 0.90 of the time,
packed without a mask 0.94, in a window 0.96, with documents 0.985; but 1.09 causal with 512 tokens, 1.03 packed and
causal, 1.11 causal with a softcap (0.95 without a mask), and 1.11 to 1.13 with a mask.
"""
# Of queries, up to which sums pay that are stored before they are added to, by who computes shares, and whether blocks
# are causal. In windows they pay at any length.
STORED_ROWS: dict[tuple[DqBy, bool], int] = {
    ("keys", True): 1024,
    ("keys", False): 1024,
    ("own", True): 2048,
    ("own", False): 256,
}
STORED_WAVES = 12
"""Blocks of keys an SM, below which uneven ones want the longest first more than sums that nobody clears."""
# Of windows and changed scores. Below it was 50 us against 41 at 1 x 9 x 2048 in a window, d128.
LEAST_STORED_WAVES = 2
STORED_EVEN_WAVES = 5  # from which even ones pay where the warpgroups of the keys compute shares
MOST_APART = 4  # between the heads that are side by side and as many as had better be
NARROW = 8
"""How many windows of keys there are at least where blocks of keys are even enough for CTAs that stay."""
FEW_WAVES = 2.2
"""Blocks of keys an SM, up to which two passes that run side by side are offered in the usual mode."""
QUEUED_ROWS = 768
QUEUED_WAVES = 20
"""Queries up to which queued shares pay in the usual mode where a warpgroup of its own computes them, and blocks of
keys an SM from which they do at any length.

On an H200, without a mask, against bulk additions: d64, fp16, 504 us against 542 with 512 tokens, 887 against 917 with
1024, 1476 against 1487 with 2048, a tie with 4096, and 511 against 503 with 197; d32, bf16, 0.96 to 0.99 of the time.
Beyond d64 they pay at any length: d96, bf16, 0.95 to 0.97 from 512 to 8192 tokens, d80 0.93 to 0.94.
"""
QUEUED_CAUSAL_ROWS = 1024
"""Queries of causal blocks up to which they pay as well, with head dims up to 64.

On an H200 against sums that are stored: d64, fp16, 416 us against 428 with 512 tokens, 547 against 554 with 1024, a tie
with 2048; d32, bf16, 0.95 to 0.98, and 1.01 with 2048; d96 1.01 to 1.02.
"""
PACKED_ROWS = 4096
"""Rows of the longest of packed causal sequences, up to which they pay beyond d64, whatever the lengths of the others.

Equally long ones leave the longest blocks for last. On an H200, bf16, d128, causal, against sums that are stored, in
lists without a tail: 282 us against 304 with 64 of 256 tokens, 438 against 467 with 16 of 1024, 744 against 760 with 8
of 2048, 1335 against 1333 with 4 of 4096, 5093 against 5009 with 4 of 8192, 4950 against 4680 with one of 16384; but
1715 against 1805 with 6 of 512 to 8192. Without a mask and at d64 they pay at any length: 0.89 to 1.01 of the time.
"""
SINKS = frozenset({"sinks"})  # a modification that the pass does not know: what they take is in LSE
PLAIN = SINKS | {WINDOW, SPANS}  # those with which its loop is that of plain scores
# Those whose scores are not those of plain attention.
CHANGED = frozenset({"alibi_slopes", "bias_table", "softcap"})
QUEUED = SINKS | CHANGED | {WINDOW, PACKED}  # with which shares that are queued were raced
KEYS_OF_FUSED = 128  # of a block of fused passes
EMPLOYED_TENTHS = 7  # of the SMs, that their blocks employ at least where fused passes read a mask


def stages(shape: BackwardPassSm90Shape, first: int) -> tuple[Stages, ...]:
    """Stages for S and of dS, the fastest ones of an H200 first.

    A second stage of dS lets a warpgroup go ahead of the other, and what they load is then further apart.

    Args:
        shape: with the issue order; its stages do not matter.
        first: stages for S that the order asks for.
    """
    both = tuple((first, ds_stages) for ds_stages in DS_STAGES)
    if shape.share is None:
        return both[:1]
    if shape.share.dq_add not in ("bulk", *STORED):
        return both  # others were not raced
    mods, dynamic = set(shape.candidate.modifications), knobs_of(shape.candidate).dynamic
    order = shape.knobs.issue_order
    if order == "by_turns":
        # d128: a stage of dS is 1.0 to 1.6 % ahead at 512 to 3333 tokens, with documents and with a prefix, 0 to 2 in
        # packed sequences and 0 to 4 where shares are queued; two stages for S are 1.1 and 1.5 % ahead in a window,
        # elsewhere 0 to 1 behind.
        return ((2, 2), *both) if WINDOW in mods else (*both[::-1], (2, 2))
    if order == "interleaved" and shape.owns_dq:
        # d64: 1.2 to 3.8 % ahead without a mask, 1 to 6 with a softcap, ALiBi or a bias, 1.2 to 1.6 with documents or a
        # prefix; 0.1 to 0.4 % behind where blocks are claimed, 4.5 at d32, and 3 ahead at 64/128.
        wider = shape.candidate.padded_dim_v > shape.candidate.padded_dim_qk
        ahead = dynamic and not wider and mods <= SINKS | {WINDOW, PACKED}
        return both if ahead else both[::-1]
    # d128: 1 to 5 % ahead with a bias; with a softcap 0.2 to 1.2, and 0.8 to 1.2 behind where blocks are claimed.
    fewer = "bias_table" in mods or ("softcap" in mods and not dynamic)
    return both[::-1] if fewer and order == "scores_ahead" else both


def takes_both(problem: Problem) -> bool:
    """True where passes have registers for S and dP of retnet at once, so that factors of scores are made once.

    On an H200, fp16, 8 x 16 heads of 2048 tokens, d64, a mask: 733 us against 878 interleaved.
    """
    return problem.score != "softmax" and problem.widest_dim <= MAX_MASKED_DIM


def pays_masked(problem: Problem, spec: ArchSpec) -> bool:
    """True where a fused pass over keys, which reads an explicit mask once, is the fastest, and blocks employ the SMs.

    On an H200 against passes of their own, which give the same bits every time: 733 us to 855 at 8 x 16 x 2048, d64,
    46 to 48 at 8 x 8 x 512, where SMs have two blocks each, and 41 to 36 at 1 x 8 x 1024, where half of them have one.
    """
    employed = 10 * blocks(problem) >= EMPLOYED_TENTHS * spec.num_sms
    return takes_both(problem) and not problem.deterministic and employed


def has_few_blocks(problem: Problem, spec: ArchSpec) -> bool:
    """True where two passes that run side by side may be faster than one fused pass."""
    fused = problem.score == "softmax" and problem.widest_dim <= WIDE
    return fused and not problem.packed and ctas(problem) <= FEW_WAVES * spec.num_sms


def ctas(problem: Problem) -> int:
    """CTAs of a pass over keys that does not stay, those which share a group of heads included."""
    return blocks(problem) * splits_of_block(problem, KEYS_OF_FUSED)


def pays_stored(problem: Problem, knobs: AttentionBackwardSm90Knobs, spec: ArchSpec) -> bool:
    """True where blocks of keys have so few steps that clearing the sums of dQ counts.

    With an explicit mask it pays at any length, 1434 us against 1549 with 4096 tokens, d64; with a decay where the
    warpgroups of keys add dQ, 767 us against 796 with 2048 tokens, d128.
    """
    if knobs.dq_share is None:
        return False
    if problem.score != "softmax":
        pays = problem.mask == "explicit" or knobs.dq_share.dq_by == "keys"
        return pays and has_waves(problem, spec)
    mods = set(problem.compiled_modifications) - SINKS
    if mods and not has_waves(problem, spec, LEAST_STORED_WAVES):
        return False
    if {WINDOW, SPANS, PACKED} & mods:
        return is_window(problem)
    if problem.seqlen_q > STORED_ROWS.get((knobs.dq_share.dq_by, problem.causal), 0):
        return False
    # Raster order leaves the last wave of uneven blocks half idle: on an H200, bf16, 4 x 16 heads of 1000 tokens,
    # d128, 158 us against 144. Few even blocks are 6 to 8 % slower so with 512 and 1024 tokens, and with 256 at d64.
    by_keys = knobs.dq_share.dq_by == "keys" and not is_uneven(problem, spec)
    if by_keys and not finds_neighbours(problem, spec):
        return False
    short = problem.seqlen_k <= (2 if by_keys else 1) * KEYS_OF_FUSED
    return short or has_waves(problem, spec, STORED_EVEN_WAVES if by_keys else STORED_WAVES)


def is_long(problem: Problem, share: Share) -> bool:
    """True of the share with the longest steps where they are offered: registers hold all but what is ahead."""
    widest = max(problem.padded_dim_qk, problem.padded_dim_v)
    return share == LONG_STEPS and problem.score == "softmax" and widest <= SMALL_DIM


def in_order(problem: Problem, shares: Sequence[Share]) -> Sequence[Share]:
    """The same shares of dQ, that of the longest steps first where it is the fastest."""
    (left, right), (_, queries, _) = problem.window_size, problem.extents
    causal = problem.causal or (left < 0 and right == 0)
    slow = {"softcap", "attn_mask"} & set(problem.compiled_modifications)
    rows = problem.seqlen_q
    if problem.packed:  # most steps are of those longer than the mean
        rows = min(rows, 2 * queries // problem.batch)
    narrow = 0 <= left < LEAST_WINDOW
    if slow or narrow or rows <= LONG_STEP_ROWS[causal] or (problem.packed and causal):
        return shares
    return sorted(shares, key=lambda share: not is_long(problem, share))


def finds_neighbours(problem: Problem, spec: ArchSpec, waves: int = 1) -> bool:
    """True where heads can be side by side in the list, so that few CTAs ask for the same sums of dQ at once.

    All heads of a batch are a multiple of those, and 151 of them have no other divisors: on an H200 1258 us against 978
    at 151 x 8/2 x 512, d128, and 528 against 387 at 239 x 1 x 704, but 313 against 343 at 229 x 4 x 256. ``waves`` is
    the multiple of the SMs that their blocks had better be: ``side_by_side`` in ``cost.py``.
    """
    wanted = max(1.0, waves * spec.num_sms / blocks_of_head(problem))
    side_by_side = nearest_divisor(problem.heads_kv * problem.batch, wanted)
    return max(side_by_side, wanted) <= MOST_APART * min(side_by_side, wanted)


def has_waves(problem: Problem, spec: ArchSpec, waves: float = STORED_WAVES) -> bool:
    """True where SMs have so many blocks of keys of fused passes each that the last ones count little."""
    return blocks(problem) >= waves * spec.num_sms


def blocks(problem: Problem) -> int:
    """Blocks of keys of fused passes."""
    return blocks_of_head(problem) * problem.heads_kv * problem.extents[0]


def blocks_of_head(problem: Problem) -> int:
    """Blocks of keys of one head, or of all packed sequences."""
    return -(-problem.extents[2] // KEYS_OF_FUSED)


def may_queue(problem: Problem, spec: ArchSpec) -> bool:
    """True where shares of dQ in the order of their blocks are offered."""
    if problem.score != "softmax" or problem.widest_dim > WIDE:
        return False
    return problem.deterministic or _queues_as_fast(problem, spec)


def _queues_as_fast(problem: Problem, spec: ArchSpec) -> bool:
    """True where queued shares are as fast as those without an order, or faster."""
    widest, rows = problem.widest_dim, problem.seqlen_q
    if problem.packed:
        return _queues_packed(problem)
    if not SINKS.issuperset(problem.compiled_modifications) or widest >= BELOW_WIDE:
        return False
    if not finds_neighbours(problem, spec, waves=2):
        return False
    if problem.causal:
        return widest <= HELD_DIM and rows <= QUEUED_CAUSAL_ROWS
    if widest > HELD_DIM:
        return rows > STORED_ROWS["own", False]
    return rows <= QUEUED_ROWS or has_waves(problem, spec, QUEUED_WAVES)


def _queues_packed(problem: Problem) -> bool:
    """The same of packed sequences."""
    if not set(problem.compiled_modifications) <= SINKS | {PACKED, WINDOW}:
        return False
    short = problem.seqlen_q <= PACKED_ROWS
    return problem.widest_dim <= HELD_DIM or not problem.causal or is_unlike(problem) or short


def is_unlike(problem: Problem) -> bool:
    """True of packed sequences the longest of which is twice as long as the mean."""
    _, rows, _ = problem.extents
    return 2 * rows <= problem.batch * problem.seqlen_q


def pays_queued(problem: Problem, spec: ArchSpec) -> bool:
    """True where they were raced, and are the fastest that give the same bits every time.

    On an H200 against two passes, bf16: packed 0.66 to 0.84 of the time, sinks 0.66 to 0.85, ALiBi 0.63 to 0.82, a
    softcap 0.55 to 0.82, a bias that is not packed 0.63 to 0.70. Documents and prefixes have no order of blocks.
    """
    return may_queue(problem, spec) and QUEUED.issuperset(problem.compiled_modifications)


def usual_order(problem: Problem, spec: ArchSpec) -> CtaOrder:
    """The order of the list of CTAs that needs no tuning."""
    return "longest_first" if is_uneven(problem, spec) else "raster"


def is_uneven(problem: Problem, spec: ArchSpec) -> bool:
    """True where blocks of keys have unlike numbers of steps."""
    several = problem.seqlen_k > KEYS_OF_FUSED
    uneven = problem.causal and several and not is_narrow(problem, spec)
    return uneven or problem.packed or problem.spanned


def is_narrow(problem: Problem, spec: ArchSpec) -> bool:
    """True where a causal window leaves nearly all blocks of keys as many queries, so that CTAs may stay.

    On an H200 that is 1 to 8 % faster where SMs have 15 of them, and 1 % faster to 12 % slower where they have 8. Other
    modifications beside it, two passes and queued shares of dQ were not raced.
    """
    keys = problem.window_size[0] + 1
    if problem.deterministic or not 0 < NARROW * keys <= problem.seqlen_k:
        return False
    fused = problem.widest_dim <= WIDE
    return fused and is_window(problem) and has_waves(problem, spec)


def is_window(problem: Problem) -> bool:
    """True where the only modification that the pass knows is a window."""
    return set(problem.compiled_modifications) - SINKS == {WINDOW}
