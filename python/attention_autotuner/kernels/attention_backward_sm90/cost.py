"""The time of an attention backward candidate of family ``sm90``: its passes, and what comes before and after them."""

from __future__ import annotations

from dataclasses import replace

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.modifications import WINDOW
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared.coefficients import Coefficients
from ..shared.engine import AuxiliaryWork, TileList, in_sequence
from ..shared.estimates import Estimate, Usage, Usages
from ..shared.kernel_cost import reductions
from ..shared.schedule import tiles_of
from ..shared.wgmma_cost import mma_clk, modified_softmax, once_bytes, predict_steps
from ..shared.workspace import ROW_VALUES
from .knobs import STORED, knobs_of
from .resources import (
    BackwardPassSm90Shape,
    dq_sum_bytes,
    has_tail,
    head_splits,
    shapes,
    streamed_bytes,
)

# Shares of the softmax that are exposed.
HIDDEN_SHARES = {
    "serial": 1.0,
    "scores_ahead": 0.5,
    "both_ahead": 0.25,
    "interleaved": 0.25,
    "by_turns": 0.5,
}


AT_ONCE_SHARE = 0.75  # of P and dS whose factors are made once, by the instructions of a step
SECTION_BYTES = 24e6  # kSectionBytes of the entry
TAIL_BYTES = 36e6  # kTailBytes of the entry
SHORT_BLOCKS, MANY_WAVES = 16, 12  # kShort, kManyWaves


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate: its passes, the preprocess of rows, and what adds sums up."""
    launches = [
        _pass_time(problem, shape, spec, usage, fit)
        for shape, usage in zip(shapes(candidate), usages, strict=True)
    ]
    beside = knobs_of(candidate).early_launches and not problem.packed
    auxiliary = _auxiliary(problem, candidate, spec, fit)
    return in_sequence(launches, auxiliary, spec, side_by_side=beside)


def step_clks(
    problem: Problem, shape: BackwardPassSm90Shape, spec: ArchSpec, fit: Coefficients
) -> tuple[float, float]:
    """Clocks of an SM for one step of a CTA: of its MMAs, and of what is exposed beside them."""
    scores = shape.block_rows * shape.knobs.block_columns
    mma = mma_clk(scores * shape.products, spec)
    hidden = HIDDEN_SHARES[shape.knobs.issue_order]
    exposed = fit.gradient_sm90_score_clk * scores * hidden * modified_softmax(problem)
    if shape.scores_at_once:
        exposed *= AT_ONCE_SHARE
    exposed += fit.gradient_sm90_step_clk + fit.gradient_sm90_load_clk * late_loads(shape)
    if shape.share is None:
        return mma, exposed
    exposed += fit.gradient_sm90_share_clk
    if is_ordered(shape):
        exposed += fit.gradient_sm90_semaphore_clk
        if problem.causal:  # a block of keys has fewer steps, but waits at them for those before it
            exposed = fit.gradient_sm90_causal_wait * (mma + exposed) - mma
    added = shape.knobs.block_columns * shape.candidate.padded_dim_qk * FP32_BYTES
    # Sums leave beside everything else, at the rate of additions in L2.
    return mma, max(exposed, added / fit.gradient_sm90_sum_bytes_per_clk - mma)


def is_ordered(shape: BackwardPassSm90Shape) -> bool:
    """True where CTAs add to dQ in the order of their keys."""
    return shape.share is not None and shape.share.dq_add == "ordered"


def late_loads(shape: BackwardPassSm90Shape) -> int:
    """Loads that every step waits for: those that begin only when what needs them is next; 0 to 2."""
    knobs = shape.knobs
    first = 2 + (knobs.issue_order not in ("serial", "by_turns"))
    second = 2 + (knobs.issue_order == "both_ahead")
    late = (knobs.first_stages < first) + (knobs.second_stages < second)
    return min(2, late + (shape.masked and knobs.mask_stages == 1))


def _pass_time(
    problem: Problem, shape: BackwardPassSm90Shape, spec: ArchSpec, usage: Usage, fit: Coefficients
) -> Estimate:
    knobs, whole = shape.knobs, knobs_of(shape.candidate)
    splits = 1 if shape.by_queries else head_splits(problem, shape.candidate)
    group = 1 if shape.by_queries else problem.heads_q // problem.heads_kv
    steps = tiles_of(
        problem, block=shape.block_rows, step=knobs.block_columns, by_queries=shape.by_queries
    )
    if problem.packed:
        steps = tuple(sorted(steps, reverse=True))  # as they are listed
    heads = problem.heads_q if shape.by_queries else problem.heads_kv * splits
    batch = problem.extents[0]
    neighbours = batch * heads  # of a packed block, all
    tail = 0
    if not problem.packed:
        neighbours = section_heads(problem, shape, batch * heads, group // splits, spec.num_sms)
        tail = tail_heads(problem, shape, batch * heads, neighbours, spec.num_sms)
    tiles = TileList(
        steps=tuple(round(group * count / splits) for count in steps),
        heads=batch * heads // neighbours,
        slices=neighbours,
        longest_first=False,
        # CTAs that wait for each other keep even, whatever their shares are, and so do those that claim blocks.
        persistent=whole.persistent and not whole.dynamic and not is_ordered(shape),
        tail_heads=tail,
    )
    mma, exposed = step_clks(problem, shape, spec, fit)
    block_clk = fit.gradient_sm90_tile_clk
    if whole.persistent:
        block_clk *= fit.gradient_sm90_next_share
    rows_of_mask = shape.block_rows if shape.masked else 0
    start_us = fit.attention_sm90_counter_us if problem.packed else 0.0  # of the list
    if shape.share is not None and shape.share.dq_add in STORED:
        start_us += fit.gradient_sm90_stored_us
    return predict_steps(
        tiles,
        spec,
        usage,
        fit,
        threads=shape.threads,
        mma_clk=mma,
        exposed_clk=exposed,
        block_clk=block_clk,
        moved_bytes=ELEMENT_BYTES
        * knobs.block_columns
        * (shape.depth + shape.columns + rows_of_mask),
        once=once_bytes(problem),
        overlap_loss=fit.gradient_sm90_overlap_loss,
        start_us=start_us,
    )


def section_heads(
    problem: Problem, shape: BackwardPassSm90Shape, heads: int, group: int, num_sms: int
) -> int:
    """Heads of the batch that are neighbours in the list for a block of rows: the entry's rule of the same name."""
    sharing = problem.batch if shape.masked else 1  # the mask of a head
    in_turn = knobs_of(shape.candidate).cta_order != "longest_first"
    waves = side_by_side(problem, shape) if in_turn else 0
    if in_turn and waves == 0:
        return sharing
    rows_q, blocks = problem.seqlen_q, -(-problem.seqlen_k // shape.block_rows)
    if shape.owns_dq and WINDOW in shape.candidate.modifications:
        left, right = (problem.seqlen_k if x < 0 else x for x in problem.window_size)
        seen = left + (0 if problem.causal else right) + 1 + shape.block_rows
        blocks = min(blocks, -(-seen // shape.block_rows))  # that share a tile of queries
        rows_q = min(rows_q, seen) if in_turn else rows_q
    streamed = problem.seqlen_k if shape.by_queries else rows_q * group
    fitting = max(1, int(SECTION_BYTES / (sharing * streamed_bytes(problem, shape, streamed))))
    if in_turn:
        wanted = waves * num_sms / blocks
        return nearest_divisor(heads, min(wanted, fitting) if problem.causal else wanted)
    sections = range(min(heads // sharing, fitting), 0, -1)
    return sharing * next(count for count in sections if heads // sharing % count == 0)


def side_by_side(problem: Problem, shape: BackwardPassSm90Shape) -> int:
    """Multiple of the SMs that blocks of neighbouring heads are, or 0: the entry's waves_side_by_side."""
    share = shape.share
    if share is None or share.dq_add not in STORED or shape.masked or shape.packed:
        return 0
    by_keys = share.dq_by == "keys"
    if share.dq_add == "queued":
        fewer = bool(shape.candidate.modifications) or (by_keys and problem.causal)
        return 2 - fewer if knobs_of(shape.candidate).dynamic else 0
    return int(by_keys and not problem.causal and not shape.candidate.modifications)


def tail_heads(
    problem: Problem, shape: BackwardPassSm90Shape, heads: int, section: int, num_sms: int
) -> int:
    """Heads of the tail of a list of claimed causal blocks, side by side: the entry's rule of the same name."""
    if not has_tail(shape) or not problem.causal or section != 1:
        return 0
    blocks = -(-problem.seqlen_k // shape.block_rows)
    if blocks <= SHORT_BLOCKS and heads * blocks > MANY_WAVES * num_sms:
        return 0
    last = min(heads, int(TAIL_BYTES / streamed_bytes(problem, shape, problem.seqlen_q)))
    return last if last > 1 else 0


def nearest_divisor(number: int, wanted: float) -> int:
    """The divisor of a number whose ratio to the wanted one is nearest to one; the entry has the same."""
    below = max(1, int(min(number, wanted)))
    while number % below != 0:
        below -= 1
    further = range(below + 1, min(number, int(wanted**2 / below)) + 1)
    above = next((count for count in further if number % count == 0), below)
    return above if above * below < wanted**2 else below


def _auxiliary(
    problem: Problem, candidate: Candidate, spec: ArchSpec, fit: Coefficients
) -> AuxiliaryWork:
    """The preprocess, which clears the sums of dQ, and kernels that end dQ, dK and dV. Early launches cost nothing."""
    batch, rows_q, _ = problem.extents
    rows, first = batch * problem.heads_q * rows_q, shapes(candidate)[0]
    sums = dq_sum_bytes(problem, first)
    cleared = 0 if first.share is None or first.share.dq_add in STORED else sums
    moved = [rows * 2 * (problem.dim_v * ELEMENT_BYTES + ROW_VALUES * FP32_BYTES) + cleared]
    moved += reductions(problem, head_splits(problem, candidate))
    if sums:
        moved.append(sums + rows * problem.dim_qk * ELEMENT_BYTES)
    moved = [round(num_bytes / fit.gradient_sm90_bandwidth) for num_bytes in moved]
    work = AuxiliaryWork.through_memory(moved, spec)
    return replace(work, kernels=0) if knobs_of(candidate).early_launches else work
