"""Which passes may exist: twins of the ``static_assert``s in attention_backward_sm90/traits.cuh."""

from __future__ import annotations

from dataclasses import replace

from ...core.candidate import Candidate
from ...core.modifications import SPANS
from ..shared.passes import Pass
from ..shared.rules import Rule, multiple_of_16, within
from ..shared.sm90_rules import fragments_fit_warpgroup, mask_stages_range, tma_needs_alignment
from ..shared.sm90_tiles import MAX_COLUMNS, SWIZZLE_COLUMNS
from .knobs import STORED, AttentionBackwardSm90Knobs, knobs_of
from .resources import CONSUMER_REGISTERS, SWAPPED_BLOCK, BackwardPassSm90Shape, needs, shapes

MAX_STAGES = 4
MAX_DS_STAGES = 2
MAX_BLOCK = 128
MAX_MASKED_DIM = 64  # head dims up to which explicit masks pay
SHARING_ORDERS = ("serial", "both_ahead")
LEAST_BLOCK = 64  # queries of a step: with fewer, MMAs wait for shared memory


def _warpgroups_range(s: BackwardPassSm90Shape) -> str | None:
    if s.consumer_registers is not None:
        return None
    known = sorted({groups for groups, _ in CONSUMER_REGISTERS})
    return f"warpgroups must be one of {known}, and 2 with a share of dQ, got {s.knobs.warpgroups}"


def _value_columns_fit_mma(s: BackwardPassSm90Shape) -> str | None:
    columns = s.candidate.padded_dim_v
    if columns <= MAX_COLUMNS:
        return None
    return f"a CTA takes at most {MAX_COLUMNS} columns of V, got {columns}"


def _mask_fills_blocks(s: BackwardPassSm90Shape) -> str | None:
    if not (s.masked and s.by_queries) or s.knobs.block_columns % SWIZZLE_COLUMNS == 0:
        return None
    columns = s.knobs.block_columns
    return f"tiles of a mask have whole blocks of {SWIZZLE_COLUMNS} keys, got {columns}"


def _ahead_needs_two_stages(s: BackwardPassSm90Shape) -> str | None:
    order, stages = s.knobs.issue_order, (s.knobs.first_stages, s.knobs.second_stages)
    if order == "serial" or (stages[0] > 1 and (order != "both_ahead" or stages[1] > 1)):
        return None
    return f"{order} holds two stages of a step ahead, got {stages}"


def _values_have_one_score(s: BackwardPassSm90Shape) -> str | None:
    if s.has_ds or s.knobs.issue_order != "both_ahead":
        return None
    return "a pass for dV alone has no dP to issue ahead"


def _scores_ahead_takes_scores(s: BackwardPassSm90Shape) -> str | None:
    if s.takes_scores or s.knobs.issue_order != "scores_ahead":
        return None
    return f"the pass {s.name} of retnet has no scores to issue ahead but those for signs"


def _interleaving_needs_all_products(s: BackwardPassSm90Shape) -> str | None:
    if s.name == "keys" or s.knobs.issue_order != "interleaved":
        return None
    return "interleaving takes a pass for dK and dV"


def _dq_share_fits_warpgroups(s: BackwardPassSm90Shape) -> str | None:
    if s.share is None:
        return None
    block, depth = s.knobs.block_columns, s.candidate.padded_dim_qk
    if not 1 <= s.share.ds_stages <= MAX_DS_STAGES:
        return f"ds_stages must be in 1..{MAX_DS_STAGES}, got {s.share.ds_stages}"
    if s.owns_dq:
        return (
            None if block % 64 == 0 else f"dQ takes whole blocks of 64 queries a step, got {block}"
        )
    split = block == 64 and SWIZZLE_COLUMNS < depth <= 2 * SWIZZLE_COLUMNS
    shared = s.knobs.issue_order == "by_turns"
    swapped = shared and block == SWAPPED_BLOCK and depth == 2 * SWIZZLE_COLUMNS
    if block == 64 * s.knobs.warpgroups or split or swapped:
        return None
    return f"two warpgroups cannot split {block} queries of {depth} columns of dQ"


def _shared_rows_split_results(s: BackwardPassSm90Shape) -> str | None:
    if not s.knobs.shared_rows:
        return None
    if s.name != "keys" or s.share is not None or s.knobs.warpgroups != 2 or s.knobs.held_rows:
        return "rows are shared by the two warpgroups of a pass for dK and dV, one for each"
    if s.candidate.score != "softmax":
        return f"warpgroups that share rows have P of a softmax in common, got {s.candidate.score}"
    return None


def _shared_rows_need_two_stages(s: BackwardPassSm90Shape) -> str | None:
    order, stages = s.knobs.issue_order, (s.knobs.first_stages, s.knobs.second_stages)
    if not s.knobs.shared_rows or (order in SHARING_ORDERS and min(stages) > 1):
        return None
    return f"warpgroups that share rows take two stages and {SHARING_ORDERS}, got {order}, {stages}"


def _turns_share_registers(s: BackwardPassSm90Shape) -> str | None:
    if s.knobs.issue_order != "by_turns":
        return None
    if s.share is None or s.owns_dq or s.dq_columns != s.knobs.block_columns:
        return (
            "S and the share of dQ take turns in registers of a warpgroup of keys: they are as many"
        )
    read = not {"softcap", "bias_table", "attn_mask"}.isdisjoint(s.candidate.modifications)
    if s.candidate.score != "softmax" or read or s.knobs.held_rows:
        return "by turns, dS takes P as its operand, for no sums of it, and rows have no registers"
    return None


def _mask_tensors_take_exponents(s: BackwardPassSm90Shape) -> str | None:
    if not {"attn_mask", "softcap"} <= set(s.candidate.modifications):
        return None
    return "attn_mask is added to exponents, of which the derivative of a softcap is not made: family sm80 takes both"


def _packed_tiles_are_dispatched(s: BackwardPassSm90Shape) -> str | None:
    knobs = knobs_of(s.candidate)
    if not s.packed or not knobs.persistent or knobs.dynamic:
        return None
    return "tiles of packed sequences differ too much for a fixed share of each CTA, got persistent=True"


def _claims_take_turns(s: BackwardPassSm90Shape) -> str | None:
    knobs = knobs_of(s.candidate)
    adds = s.share is not None and s.share.dq_add in ("bulk", *STORED)
    in_turn = knobs.persistent and knobs.cta_order == "raster"
    if not knobs.dynamic or (adds and in_turn and knobs.early_launches and knobs.gathered_stores):
        return None
    return (
        "blocks are claimed by CTAs that stay, a head's in turn, where launches are early and stores gathered and "
        "bulk copies add to dQ"
    )


def _spans_add_in_no_order(s: BackwardPassSm90Shape) -> str | None:
    if s.share is None or s.share.dq_add != "ordered" or SPANS not in s.candidate.modifications:
        return None
    return (
        "CTAs would wait for ever where ids of documents decrease, which nobody looks at on a GPU"
    )


def _queue_has_the_order_of_blocks(s: BackwardPassSm90Shape) -> str | None:
    if s.share is None or s.share.dq_add != "queued":
        return None
    knobs = knobs_of(s.candidate)
    unordered = s.masked or SPANS in s.candidate.modifications
    if knobs.cta_order == "raster" and not unordered and (knobs.dynamic or not s.packed):
        return None
    return (
        "shares wait for CTAs that started before: for a head's blocks in turn, claimed if packed, without a mask or "
        f"documents, got {knobs.cta_order}, dynamic={knobs.dynamic}"
    )


BACKWARD_PASS_SM90_PREDICATES: dict[str, Rule[BackwardPassSm90Shape]] = {
    "tma_needs_alignment": tma_needs_alignment,
    "warpgroups_range": _warpgroups_range,
    "block_columns_fit_mma": multiple_of_16("block_columns", MAX_BLOCK),
    "value_columns_fit_mma": _value_columns_fit_mma,
    "first_stages_range": within("first_stages", 1, MAX_STAGES),
    "second_stages_range": within("second_stages", 1, MAX_STAGES),
    "mask_stages_range": mask_stages_range,
    "mask_fills_blocks": _mask_fills_blocks,
    "ahead_needs_two_stages": _ahead_needs_two_stages,
    "values_have_one_score": _values_have_one_score,
    "scores_ahead_takes_scores": _scores_ahead_takes_scores,
    "interleaving_needs_all_products": _interleaving_needs_all_products,
    "dq_share_fits_warpgroups": _dq_share_fits_warpgroups,
    "shared_rows_split_results": _shared_rows_split_results,
    "shared_rows_need_two_stages": _shared_rows_need_two_stages,
    "turns_share_registers": _turns_share_registers,
    "mask_tensors_take_exponents": _mask_tensors_take_exponents,
    "packed_tiles_are_dispatched": _packed_tiles_are_dispatched,
    "claims_take_turns": _claims_take_turns,
    "spans_add_in_no_order": _spans_add_in_no_order,
    "queue_has_the_order_of_blocks": _queue_has_the_order_of_blocks,
    "fragments_fit_warpgroup": fragments_fit_warpgroup,
}

# The number is a value of attention_autotuner::GradientPass, whose order is that of the names of passes.
SYMBOL = r"23attention_backward_sm90I.*12GradientPassE{}E"


def pass_of(shape: BackwardPassSm90Shape) -> Pass:
    """The launch of a pass."""
    return Pass(
        kernel=AttentionBackwardSm90Knobs.kernel,
        subject=shape,
        rules=BACKWARD_PASS_SM90_PREDICATES,
        needs_of=needs,
        symbol=SYMBOL.format(AttentionBackwardSm90Knobs.pass_names.index(shape.name)),
    )


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate, in the order they run."""
    return tuple(map(pass_of, shapes(candidate)))


def _three_passes_pay(c: Candidate) -> str | None:
    dk = knobs_of(c).dk
    if dk is None:
        return None
    least = replace(dk, block_columns=LEAST_BLOCK, issue_order="serial")
    keys = BackwardPassSm90Shape(candidate=c, name="keys", knobs=least, share=None)
    if pass_of(keys).violation is not None:
        return None
    return "a warpgroup holds dK and dV together, and their passes share S and dP"


def _three_passes_of_modified_scores(c: Candidate) -> str | None:
    if knobs_of(c).decomposition != "three_pass" or not c.modifications:
        return None
    return "three passes with score modifications failed a check on an H200: warpgroups that share rows serve them"


def _explicit_masks_pay(c: Candidate) -> str | None:
    # The fastest on an H200, fp16, against `scores_backward_sm90`: 733 us to 855 at 64/64 and 1309 to 1262 at 128/128,
    # both 8 x 16 x 2k, and 1984 to 1294 at 256/256, 8 x 8 x 2k.
    widest = max(c.padded_dim_qk, c.padded_dim_v)
    if c.score != "masked" or widest <= MAX_MASKED_DIM:
        return None
    return f"explicit masks pay for head dims up to {MAX_MASKED_DIM} alone, got {widest}"


PRUNING_PREDICATES: dict[str, Rule[Candidate]] = {
    "three_passes_pay": _three_passes_pay,
    "explicit_masks_pay": _explicit_masks_pay,
    "three_passes_of_modified_scores": _three_passes_of_modified_scores,
}
