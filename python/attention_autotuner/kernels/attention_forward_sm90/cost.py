"""The time of an attention forward candidate of family ``sm90``: steps in which MMAs and the softmax share an SM."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES
from ..shared.coefficients import Coefficients
from ..shared.engine import TileList, l2_us
from ..shared.estimates import Estimate, Usages
from ..shared.schedule import tiles_of
from ..shared.split_kv import HBM_SHARE, packed_heads, split_bytes, tiles_of_parts
from ..shared.wgmma_cost import mma_clk as clk_of_mmas
from ..shared.wgmma_cost import modified_softmax, predict_steps
from .resources import AttentionForwardSm90Shape, ctas_of_head, shape_of


def step_clks(
    problem: Problem, shape: AttentionForwardSm90Shape, spec: ArchSpec, fit: Coefficients
) -> tuple[float, float]:
    """Clocks of an SM for one key tile of all warpgroups: of its MMAs, and of what the softmax adds to them."""
    knobs = shape.knobs
    scores = knobs.block_m * knobs.score_keys
    products = scores * shape.candidate.padded_dim_qk
    products += knobs.block_m * knobs.block_n * shape.value_columns
    mma = clk_of_mmas(products, spec) / fit.attention_sm90_rate
    if shape.masked:
        softmax = fit.attention_sm90_mask_score_clk * scores
    else:
        softmax = scores / (spec.exp_per_clk_per_sm * fit.attention_sm90_rate)
        softmax *= fit.attention_sm90_softmax_share * modified_softmax(problem)
        if not knobs.optimistic:
            softmax *= fit.attention_sm90_exact_share
        if knobs.mainloop not in ("serial", "scores_first"):
            softmax *= fit.attention_sm90_overlap_share
    # The softmax of some warpgroups runs beside the MMAs of others.
    sharpness = fit.attention_sm90_sharpness
    both = (mma**sharpness + softmax**sharpness) ** (1 / sharpness)
    step = fit.attention_sm90_step_clk
    if knobs.mainloop in ("strict", "overlap_flat"):
        step *= 1.5
    exposed = both - mma + step
    if shape.masked:
        exposed += fit.attention_sm90_mask_clk * (2 if knobs.mask_stages == 1 else 1)
    return mma, exposed


def tile_clk(
    shape: AttentionForwardSm90Shape, mma_clk: float, exposed_clk: float, fit: Coefficients
) -> float:
    """Clocks of a tile of rows beside its steps: its first scores and last output alone, and the write of O."""
    knobs = shape.knobs
    written = fit.attention_sm90_output_clk * shape.columns / 128
    if knobs.output == "direct":
        written *= fit.attention_sm90_direct_share
    drained = 0.0 if knobs.mainloop == "overlap_flat" else mma_clk / 2 + exposed_clk
    waits = fit.attention_sm90_start_clk if knobs.schedule == "grid" or knobs.q_stages == 1 else 0.0
    return written + drained + waits


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate; infinite where an SM does not hold it, or has no WGMMA."""
    (usage,) = usages
    shape = shape_of(candidate)
    knobs = shape.knobs
    heads = packed_heads(problem, knobs)
    queries, step = knobs.block_m // heads, knobs.block_n
    seen = tiles_of(problem, block=queries, step=step, by_queries=True)
    steps = [-(-count // knobs.splits) for count in seen]
    if problem.packed:
        ctas = ctas_of_head(problem, knobs, spec)
        steps = sorted(tiles_of_parts(seen, knobs, ctas), reverse=True)  # as they are listed
    tiles = TileList(
        steps=tuple(steps),
        heads=problem.extents[0] * problem.heads_q // heads * knobs.v_slices,
        slices=1 if problem.packed else knobs.splits,
        longest_first=problem.causal or problem.packed,
        persistent=knobs.schedule == "static",
    )
    mma_clk, exposed_clk = step_clks(problem, shape, spec, fit)
    rows_of_mask = knobs.block_m if shape.masked else 0
    # A launch of its own clears the counter; those that list blocks or find spans do it beside.
    counts = knobs.schedule == "dynamic" or problem.packed or problem.spanned
    start_us = fit.attention_sm90_counter_us * counts
    if partial := sum(split_bytes(problem, candidate.padded_dim_v, knobs)):
        # Written and read again, and a second kernel that starts while the first one ends.
        start_us += fit.attention_sm90_combine_us + knobs.splits * fit.attention_sm90_split_us
        start_us += l2_us(2 * partial, spec)
    return predict_steps(
        tiles,
        spec,
        usage,
        fit,
        threads=knobs.num_threads,
        mma_clk=mma_clk,
        exposed_clk=exposed_clk,
        block_clk=tile_clk(shape, mma_clk, exposed_clk, fit),
        moved_bytes=ELEMENT_BYTES
        * (knobs.score_keys * (shape.depth + rows_of_mask) + knobs.block_n * shape.columns),
        once=problem.bytes_moved,
        overlap_loss=fit.attention_sm90_overlap_loss,
        start_us=start_us,
        streamed_share=HBM_SHARE if knobs.split_kv else None,
    )
