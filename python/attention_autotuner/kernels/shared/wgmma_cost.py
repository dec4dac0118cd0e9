"""The time of a kernel over scores of family ``sm90``: steps of WGMMAs, with what they leave exposed.

Forward is one such kernel; backward is several, each with its own tensors, and what comes before them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...arch.spec import ArchSpec
from ...core.problem import Problem
from . import engine
from .coefficients import Coefficients
from .estimates import Estimate, Usage
from .kernel_cost import mask_bytes
from .tile_costs import ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Sm90Work(engine.TileList):
    """A kernel's CTAs and what a step of each does.

    Attributes:
        threads: of one CTA.
        scores: of one step.
        columns: that the two MMAs of a step have together, each as many FLOPs a score.
        moved_rows: rows of so many columns that a step brings beside its mask.
        buffered: whether a step's tiles are asked for a step ahead.
        block_clk: clocks of a block of rows beside its steps. CTAs that stay for several share them about as evenly as
            if each took the next.
        once_bytes: through device memory, whatever the tiles.
    """

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


def predict_warpgroups(work: Sm90Work, spec: ArchSpec, usage: Usage, fit: Coefficients) -> Estimate:
    """The time of one kernel; infinite where an SM does not hold it, or has no WGMMA."""
    placed = engine.residency(spec, usage, threads=work.threads, ctas=work.ctas, filled=False)
    if placed is None or not spec.wgmma_flops_per_clk_per_sm:
        return engine.infeasible()
    flops = 2 * work.scores * work.columns
    mma_clk = flops / (spec.wgmma_flops_per_clk_per_sm * fit.wgmma_efficiency)
    exposed_clk = fit.wgmma_score_clk * work.scores + fit.wgmma_step_clk
    if not work.buffered:
        exposed_clk += fit.wgmma_load_clk
    spilled_clk = engine.spill_clk(usage, work.threads, fit)
    step_clk = mma_clk + exposed_clk + spilled_clk

    span = engine.span_of(work, placed.slots, step_clk=step_clk, cta_clk=work.block_clk)
    to_us = 1 / spec.sm_clock_mhz
    rounds = work.all_steps / placed.slots
    moved = ELEMENT_BYTES * (work.moved_rows * work.columns + work.scores)
    terms = {
        "tensor_us": rounds * mma_clk * to_us,
        "exposed_us": rounds * exposed_clk * to_us,
        "l2_us": engine.l2_us(work.all_steps * moved, spec),
        "hbm_us": engine.hbm_us(work.once_bytes, spec),
        "spill_us": rounds * spilled_clk * to_us,
        "cta_us": placed.waves * work.block_clk * to_us,
        "imbalance_us": span.idle_steps * step_clk * to_us,
    }
    compute = span.steps * step_clk * to_us
    return engine.launch_estimate(terms, compute, placed, spec, overlap_loss=fit.wgmma_overlap_loss)
