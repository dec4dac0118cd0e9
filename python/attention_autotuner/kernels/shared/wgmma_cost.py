"""How long a kernel over scores of family ``sm90`` takes: steps of warpgroup products, with what they do not hide.

Forward is one such kernel; backward is three, each with its own tensors (:mod:`..arch.wgmma_backward_resources`), and
what comes before them. Fitted to the kernels of docs/kernel_log.md on one H200 (dims 64, 128, 256 and 256/512, either
direction).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ...arch import occupancy
from ...arch.spec import ArchSpec
from ...core.problem import Problem
from .estimates import Estimate, Usage, limiter_of
from .schedule import makespan
from .score_costs import mask_bytes
from .tile_costs import ELEMENT_BYTES

# Fitted together, at the spec's clock; they meet those kernels within 14 %.
PRODUCT_EFFICIENCY = 1.0
SCORE_CLK = 0.035  # for each score: its weight, on a scheduler that also issues products
STEP_CLK = 200.0  # barriers and the first words of products
LOAD_CLK = 1200.0  # until a tile arrives that was not asked for a step ahead
CTA_CLK = 4000.0  # start, first loads, and the output
TILE_CLK = 2500.0  # the same where CTAs stay for further tiles, whose loads run ahead
COST_UNITS = 16  # of the schedule's integer costs, per step
OVERLAP_LOSS = 0.1  # of the lesser of computing and moving


@dataclass(frozen=True, kw_only=True)
class Sm90Work:
    """A kernel's CTAs and what a step of each does.

    Attributes:
        steps: of each block of rows of a head, in the order of the list.
        heads: whose blocks of rows are in the list, for each of the batch.
        slices: CTAs that share a block of rows.
        heads_first: the order of the list.
        threads: of one CTA.
        scores: of one step.
        columns: that the two products of a step have together, each as many FLOPs a score.
        moved_rows: rows of so many columns that a step brings beside its mask.
        buffered: whether a step's tiles are asked for a step ahead.
        block_clk: what a block of rows takes beside its steps. CTAs that stay for several share them about as evenly as
            if each took the next.
        once_bytes: through device memory, whatever the tiles.
    """

    steps: tuple[int, ...]
    heads: int
    slices: int
    heads_first: bool
    threads: int
    scores: int
    columns: int
    moved_rows: int
    buffered: bool
    block_clk: float
    once_bytes: int


def once_bytes(problem: Problem) -> int:
    """Bytes through device memory, whatever the tiles: each tensor and the mask once."""
    rows = (
        problem.batch * problem.heads_q * problem.seqlen_q
        + problem.batch * problem.heads_kv * problem.seqlen_k
    )
    return ELEMENT_BYTES * rows * (problem.dim_qk + problem.dim_v) + mask_bytes(problem)


def predict_warpgroups(problem: Problem, work: Sm90Work, spec: ArchSpec, usage: Usage) -> Estimate:
    """The time of one kernel; infinite where an SM does not hold it, or has no WGMMA."""
    resident = occupancy.occupancy(
        spec, threads=work.threads, registers=usage.registers, smem_bytes=usage.smem_bytes
    )
    if resident < 1 or not spec.wgmma_flops_per_clk_per_sm:
        return Estimate(us=inf, limiter="residency", terms={}, occupancy=0, waves=inf)
    flops = 2 * work.scores * work.columns
    product_clk = flops / (spec.wgmma_flops_per_clk_per_sm * PRODUCT_EFFICIENCY)
    exposed_clk = SCORE_CLK * work.scores + STEP_CLK
    if not work.buffered:
        exposed_clk += LOAD_CLK
    spill_clk = usage.spill_bytes * work.threads / 4096
    step_clk = product_clk + exposed_clk + spill_clk

    lists = work.heads * problem.batch * work.slices
    slots = spec.num_sms * resident
    overhead = max(1, round(COST_UNITS * work.block_clk / step_clk))
    span = makespan(
        tuple(COST_UNITS * count + overhead for count in work.steps),
        heads=work.heads,
        value_slices=work.slices * problem.batch,
        heads_first=work.heads_first,
        persistent=False,
        slots=slots,
    )
    to_us = 1 / spec.sm_clock_mhz
    all_steps = sum(work.steps) * lists
    ctas = len(work.steps) * lists
    even = (COST_UNITS * all_steps + overhead * ctas) / slots
    moved = ELEMENT_BYTES * (work.moved_rows * work.columns + work.scores)
    terms = {
        "tensor_us": all_steps / slots * product_clk * to_us,
        "exposed_us": all_steps / slots * exposed_clk * to_us,
        "l2_us": all_steps * moved / spec.l2_bytes_per_clk * to_us,
        "hbm_us": work.once_bytes * 1e6 / spec.hbm_bytes_per_second,
        "spill_us": all_steps / slots * spill_clk * to_us,
        "cta_us": ctas / slots * work.block_clk * to_us,
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
        waves=ctas / slots,
    )
