"""How long a forward kernel of family ``sm90`` takes: steps of warpgroup products, with what they do not hide.

Fitted to five kernels of the first version on one H200 (dims 64, 128, 256 and 256/512; docs/kernel_log.md), which it
meets within 11 %.
"""

from __future__ import annotations

from math import inf

from ..arch import occupancy, wgmma_resources
from ..arch.spec import ArchSpec
from ..codegen.candidate import Candidate
from ..codegen.problem import Problem
from .estimates import Estimate, Usage, limiter_of
from .retnet_costs import mask_bytes
from .schedule import makespan, tiles_of_queries
from .tile_costs import ELEMENT_BYTES

# Fitted together with the two below, at the spec's clock. Over 1, as those hold some of the products' own time.
PRODUCT_EFFICIENCY = 1.09
SCORE_CLK = 0.057  # for each score: its weight, on a scheduler that also issues products
STEP_CLK = 457.0  # barriers and the first words of products
LOAD_CLK = 1200.0  # until a tile arrives that was not asked for a step ahead
CTA_CLK = 4000.0  # start, first loads, and the output
COST_UNITS = 16  # of the schedule's integer costs, per step
OVERLAP_LOSS = 0.1  # of the lesser of computing and moving


def predict(problem: Problem, candidate: Candidate, spec: ArchSpec, usage: Usage) -> Estimate:
    """The time of a candidate's kernel; infinite where an SM does not hold it, or has no such products."""
    shape = wgmma_resources.shape_of(candidate)
    assert shape is not None
    knobs = shape.knobs
    resident = occupancy.occupancy(
        spec, threads=knobs.num_threads, registers=usage.registers, smem_bytes=usage.smem_bytes
    )
    if resident < 1 or not spec.wgmma_flops_per_clk_per_sm:
        return Estimate(us=inf, limiter="residency", terms={}, occupancy=0, waves=inf)
    steps = tiles_of_queries(
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        block=knobs.block_m,
        step=knobs.block_n,
        causal=problem.causal,
        causal_offset=problem.causal_offset,
    )
    scores = knobs.block_m * knobs.block_n
    flops = 2 * scores * (shape.depth + shape.columns)
    product_clk = flops / (spec.wgmma_flops_per_clk_per_sm * PRODUCT_EFFICIENCY)
    exposed_clk = SCORE_CLK * scores + STEP_CLK
    if knobs.num_stages == 1:
        exposed_clk += LOAD_CLK
    spill_clk = usage.spill_bytes * knobs.num_threads / 4096
    step_clk = product_clk + exposed_clk + spill_clk

    heads = problem.batch * problem.heads_q
    slots = spec.num_sms * resident
    overhead = max(1, round(COST_UNITS * CTA_CLK / step_clk))
    span = makespan(
        tuple(COST_UNITS * count + overhead for count in steps),
        heads=problem.heads_q,
        value_slices=knobs.v_slices * problem.batch,
        heads_first=knobs.cta_order == "heads_first",
        persistent=False,
        slots=slots,
    )
    to_us = 1 / spec.sm_clock_mhz
    all_steps = sum(steps) * heads * knobs.v_slices
    even = (COST_UNITS * all_steps + overhead * len(steps) * heads * knobs.v_slices) / slots
    moved = ELEMENT_BYTES * (knobs.block_n * (shape.depth + shape.columns) + scores)
    rows = heads * problem.seqlen_q + problem.batch * problem.heads_kv * problem.seqlen_k
    once = ELEMENT_BYTES * rows * (problem.dim_qk + problem.dim_v) + mask_bytes(problem)
    terms = {
        "tensor_us": all_steps / slots * product_clk * to_us,
        "exposed_us": all_steps / slots * exposed_clk * to_us,
        "l2_us": all_steps * moved / spec.l2_bytes_per_clk * to_us,
        "hbm_us": once * 1e6 / spec.hbm_bytes_per_second,
        "spill_us": all_steps / slots * spill_clk * to_us,
        "cta_us": len(steps) * heads * knobs.v_slices / slots * CTA_CLK * to_us,
        "imbalance_us": max(0.0, span - even) / COST_UNITS * step_clk * to_us,
        "launch_us": spec.launch_overhead_us,
    }
    compute = span / COST_UNITS * step_clk * to_us
    memory = max(terms["l2_us"], terms["hbm_us"])
    us = max(compute, memory) + OVERLAP_LOSS * min(compute, memory) + spec.launch_overhead_us
    return Estimate(
        us=us,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=resident,
        waves=len(steps) * heads * knobs.v_slices / slots,
    )
