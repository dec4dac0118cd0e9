"""Which candidates may exist: twins of the ``static_assert``s in attention_forward_sm90/traits.cuh, and what pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.candidate import Candidate
from ..shared import sm90_rules
from ..shared.passes import Pass, single_pass
from ..shared.rules import Rule, multiple_of_16, within
from ..shared.sm90_tiles import MAX_COLUMNS, SWIZZLE_COLUMNS
from .knobs import knobs_of
from .resources import AttentionForwardSm90Shape, needs, shape_of

MAX_KEY_STAGES = 8
MAX_EXCHANGE_STAGES = 2
MMA_DEPTH = 16
LEAST_RING_STAGES = 3  # where scores are shared: K of the next step, V of both halves of this one
SOFTMAX_KNOBS = ("optimistic", "pack_gqa", "split_kv")  # which a mask's scores have no use for


def _value_columns_fit_mma(s: AttentionForwardSm90Shape) -> str | None:
    if s.knobs.v_slices < 1:
        return f"v_slices must be at least 1, got {s.knobs.v_slices}"
    if s.value_columns <= MAX_COLUMNS:
        return None
    return f"a CTA takes at most {MAX_COLUMNS} columns of V, got {s.value_columns}"


def _mask_fills_blocks(s: AttentionForwardSm90Shape) -> str | None:
    if not s.masked or s.knobs.score_keys % SWIZZLE_COLUMNS == 0:
        return None
    return f"tiles of a mask have whole blocks of {SWIZZLE_COLUMNS} keys, got {s.knobs.score_keys}"


def _two_slices_share_scores(s: AttentionForwardSm90Shape) -> str | None:
    if not s.knobs.exchange_stages or (s.masked and s.knobs.v_slices == 2):
        return None
    return f"two slices exchange scores that a mask modifies, got v_slices={s.knobs.v_slices}"


def _shared_scores_overlap(s: AttentionForwardSm90Shape) -> str | None:
    plan = (s.knobs.mainloop, s.knobs.ping_pong)
    if not s.knobs.exchange_stages or plan == ("overlap", False):
        return None
    return f"shared scores have the loop overlap without turns, got {plan}"


def _clusters_claim_nothing(s: AttentionForwardSm90Shape) -> str | None:
    if not s.knobs.exchange_stages or s.knobs.schedule != "dynamic":
        return None
    return "the CTAs of a cluster cannot claim tiles together, got schedule='dynamic'"


def _shared_ring_holds_step(s: AttentionForwardSm90Shape) -> str | None:
    stages = s.knobs.k_stages + s.knobs.v_stages
    if not s.knobs.exchange_stages or stages >= LEAST_RING_STAGES:
        return None
    return f"a step holds {LEAST_RING_STAGES} tiles of K and V, got {stages} stages"


def _kept_depth_range(s: AttentionForwardSm90Shape) -> str | None:
    kept, depth = s.knobs.kept_depth, s.candidate.padded_dim_qk
    if kept == 0 or (0 < kept <= depth and kept % MMA_DEPTH == 0 and not s.knobs.exchange_stages):
        return None
    return f"kept_depth must be steps of {MMA_DEPTH} up to {depth}, and 0 where scores are shared, got {kept}"


def _softmax_alone(s: AttentionForwardSm90Shape) -> str | None:
    knobs = [name for name in SOFTMAX_KNOBS if getattr(s.knobs, name)]
    return f"{' and '.join(knobs)} need a softmax" if s.masked and knobs else None


def _slices_fill_blocks(s: AttentionForwardSm90Shape) -> str | None:
    if s.knobs.v_slices == 1 or s.knobs.output == "direct" or s.value_columns == s.columns:
        return None
    return f"TMA stores whole blocks of columns, a slice has {s.value_columns}"


def _flat_needs_two_stages(s: AttentionForwardSm90Shape) -> str | None:
    stages = (s.knobs.q_stages, s.knobs.k_stages, s.knobs.v_stages)
    if s.knobs.mainloop != "overlap_flat" or min(stages) > 1:
        return None
    return f"overlap_flat holds two stages of Q, K and V at a time, got {stages}"


def _flat_takes_no_turns(s: AttentionForwardSm90Shape) -> str | None:
    if s.knobs.mainloop != "overlap_flat" or not s.knobs.ping_pong:
        return None
    return "warpgroups of overlap_flat skip keys at different times, so they cannot take turns"


def _turns_need_warpgroups(s: AttentionForwardSm90Shape) -> str | None:
    if s.knobs.warpgroups > 1 or not s.knobs.ping_pong:
        return None
    return "one warpgroup has none to take turns with"


def _output_leaves_directly(s: AttentionForwardSm90Shape) -> str | None:
    if s.knobs.output == "direct" or not (s.knobs.pack_gqa or s.knobs.split_kv):
        return None
    return "O of packed rows and of splits leaves from registers"


def _output_fits_q(s: AttentionForwardSm90Shape) -> str | None:
    if s.knobs.output == "direct" or s.columns <= s.depth:
        return None
    return f"O goes through Q's {s.depth} columns of shared memory, and has {s.columns}"


def _flat_holds_one_sequence(s: AttentionForwardSm90Shape) -> str | None:
    if not s.packed or s.knobs.mainloop != "overlap_flat":
        return None
    return "overlap_flat writes a tile of rows after the next has begun, which may be of another sequence"


ATTENTION_FORWARD_SM90_PREDICATES: dict[str, Rule[AttentionForwardSm90Shape]] = {
    "tma_needs_alignment": sm90_rules.tma_needs_alignment,
    "warpgroups_range": sm90_rules.warpgroups_range,
    "block_n_fits_mma": multiple_of_16("block_n", MAX_COLUMNS),
    "value_columns_fit_mma": _value_columns_fit_mma,
    "q_stages_range": within("q_stages", 1, 2),
    "k_stages_range": within("k_stages", 1, MAX_KEY_STAGES),
    "v_stages_range": within("v_stages", 1, MAX_KEY_STAGES),
    "mask_stages_range": sm90_rules.mask_stages_range,
    "mask_fills_blocks": _mask_fills_blocks,
    "exchange_stages_range": within("exchange_stages", 0, MAX_EXCHANGE_STAGES),
    "two_slices_share_scores": _two_slices_share_scores,
    "shared_scores_overlap": _shared_scores_overlap,
    "clusters_claim_nothing": _clusters_claim_nothing,
    "shared_ring_holds_step": _shared_ring_holds_step,
    "kept_depth_range": _kept_depth_range,
    "softmax_alone": _softmax_alone,
    "slices_fill_blocks": _slices_fill_blocks,
    "flat_needs_two_stages": _flat_needs_two_stages,
    "flat_takes_no_turns": _flat_takes_no_turns,
    "turns_need_warpgroups": _turns_need_warpgroups,
    "output_fits_q": _output_fits_q,
    "output_leaves_directly": _output_leaves_directly,
    "flat_holds_one_sequence": _flat_holds_one_sequence,
    "fragments_fit_warpgroup": sm90_rules.fragments_fit_warpgroup,
}


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The one launch of a candidate."""
    return single_pass(candidate, shape_of(candidate), ATTENTION_FORWARD_SM90_PREDICATES, needs)


MOST_SMEM_BYTES = 227 * 1024  # of a CTA, as the traits have it
DEEPEST_STAGES = 6  # where keys stream
STREAM_BYTES = 100 * 1024
"""Of K and V in flight where they stream: on an H200, one query of 16 x 8 heads on 8192 keys, d64, 64.3 us with 96 KB,
67.3 with 192, 66.1 with 64; sixteen queries at d128 126, 134 and 131."""
TALL_WARPGROUPS = 3  # from which on what a step waits for is its MMAs, and not keys that stream
LARGER_BLOCK, LARGEST_BLOCK = 48, 128  # keys
SMALLEST_BLOCK = 64  # that pays on few keys, and where causal tiles are few
DEEP_STAGES, SHALLOW_STAGES = 3, 2


def _holds(c: Candidate, **knobs: Any) -> bool:
    """True where a candidate with some other knobs can be compiled and launched."""
    (launch,) = passes_of(replace(c, knobs=replace(knobs_of(c), **knobs)))
    return launch.violation is None and launch.needs.smem_bytes <= MOST_SMEM_BYTES


def _stages_suit_the_stream(c: Candidate) -> str | None:
    knobs = knobs_of(c)
    if not knobs.split_kv or knobs.warpgroups >= TALL_WARPGROUPS:
        return None
    key_bytes = 2 * (c.padded_dim_qk + c.padded_dim_v)
    held = knobs.k_stages * knobs.block_n * key_bytes
    if held > STREAM_BYTES and knobs.k_stages > SHALLOW_STAGES:
        return f"{held >> 10} KB of keys in flight slow memory down, which {STREAM_BYTES >> 10} KB keep busy"
    if 2 * held <= STREAM_BYTES and knobs.k_stages < DEEPEST_STAGES:
        return (
            f"memory is all that keys wait for, and {held >> 10} KB in flight do not keep it busy"
        )
    return None


def _block_n_uses_registers(c: Candidate) -> str | None:
    knobs = knobs_of(c)
    larger = knobs.block_n + LARGER_BLOCK
    if larger > LARGEST_BLOCK or knobs.split_kv:
        return None
    if (knobs.mainloop, knobs.block_n) == ("overlap", SMALLEST_BLOCK) and not shape_of(c).masked:
        return None
    if not _holds(c, block_n=larger, k_stages=SHALLOW_STAGES, v_stages=SHALLOW_STAGES):
        return None
    return f"a step has fixed costs, and registers and shared memory hold {larger} keys"


def _stages_use_shared_memory(c: Candidate) -> str | None:
    if knobs_of(c).k_stages >= DEEP_STAGES or knobs_of(c).split_kv:
        return None
    if not _holds(c, k_stages=DEEP_STAGES, v_stages=DEEP_STAGES):
        return None
    return f"shared memory holds {DEEP_STAGES} stages of K and of V"


def _second_q_stage_pays(c: Candidate) -> str | None:
    knobs, stages = knobs_of(c), SHALLOW_STAGES
    if knobs.q_stages == 2 or knobs.split_kv:
        return None
    if not _holds(c, q_stages=2, k_stages=stages, v_stages=stages):
        return None
    return f"shared memory holds a second stage of Q beside {stages} of K and V"


def _direct_output_pays(c: Candidate) -> str | None:
    knobs = knobs_of(c)
    if knobs.output == "through_q" or knobs.q_stages == 1 or not _holds(c, output="through_q"):
        return None
    return "with two stages of Q, a store by TMA runs beside the next tile"


def _packed_tiles_are_dispatched(c: Candidate) -> str | None:
    if not shape_of(c).packed or knobs_of(c).schedule != "static":
        return None
    return "tiles of packed sequences differ too much for a fixed share of each CTA, got schedule='static'"


PRUNING_PREDICATES: dict[str, Rule[Candidate]] = {
    "packed_tiles_are_dispatched": _packed_tiles_are_dispatched,
    "stages_suit_the_stream": _stages_suit_the_stream,
    "block_n_uses_registers": _block_n_uses_registers,
    "stages_use_shared_memory": _stages_use_shared_memory,
    "second_q_stage_pays": _second_q_stage_pays,
    "direct_output_pays": _direct_output_pays,
}
