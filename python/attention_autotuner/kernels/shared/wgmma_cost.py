"""The time of a kernel over scores of family ``sm90``: steps of WGMMAs, with what they leave exposed.

Forward is one such kernel; backward is several, each with its own tensors, and what comes before them.
"""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES
from . import engine
from .coefficients import Coefficients
from .estimates import Estimate, Usage
from .kernel_cost import mask_bytes

# Rate of tiles of matrix products that neighbours load at the same time, over the spec's, by hand to products of
# matrices on an H200 (benchmarks/results/nvidia-h200/records.jsonl.xz).
NEIGHBOURS_L2_GAIN = 1.7


def once_bytes(problem: Problem) -> int:
    """Bytes through device memory, whatever the tiles: each tensor and the mask once."""
    rows = (
        problem.batch * problem.heads_q * problem.seqlen_q
        + problem.batch * problem.heads_kv * problem.seqlen_k
    )
    return ELEMENT_BYTES * rows * (problem.dim_qk + problem.dim_v) + mask_bytes(problem)


# What modifications add to the time of a softmax, by counting instructions: another result of the unit of exponentials,
# one FMA; a table is read near the diagonal alone; of a mask a word is found, read, converted and added.
SOFTMAX_SHARES = {"softcap": 0.6, "alibi_slopes": 0.2, "bias_table": 0.2, "attn_mask": 0.8}


def modified_softmax(problem: Problem) -> float:
    """The time of a softmax with a problem's modifications, over that of one without."""
    return 1.0 + sum(SOFTMAX_SHARES.get(name, 0.0) for name in problem.modifications)


def mma_clk(multiplications: int, spec: ArchSpec) -> float:
    """Clocks of an SM for so many multiplications by WGMMA; 0 where it has none."""
    rate = spec.wgmma_flops_per_clk_per_sm
    return 2 * multiplications / rate if rate else 0.0


def predict_steps(
    tiles: engine.TileList,
    spec: ArchSpec,
    usage: Usage,
    fit: Coefficients,
    *,
    threads: int,
    mma_clk: float,
    exposed_clk: float,
    block_clk: float,
    moved_bytes: int,
    once: int,
    overlap_loss: float,
    start_us: float = 0.0,
    streamed_share: float | None = None,
) -> Estimate:
    """The time of a list of tiles whose steps are WGMMAs and what these leave exposed.

    Args:
        tiles: the list.
        spec: the GPU.
        usage: what a CTA takes from an SM.
        fit: fitted constants.
        threads: of a CTA.
        mma_clk: of a step's MMAs, clocks of an SM.
        exposed_clk: of a step beside them.
        block_clk: of a block of rows beside its steps.
        moved_bytes: of a step, through L2.
        once: bytes through device memory, whatever the tiles.
        overlap_loss: share of the lesser of computing and moving that adds to the greater.
        start_us: before either begins.
        streamed_share: of the peak that device memory gives steps which little but memory takes the time of, and whose
            L2 gives SMs that have work no more for the others that have none; None where steps compute.
    """
    placed = engine.residency(spec, usage, threads=threads, ctas=tiles.ctas, filled=False)
    if placed is None or not spec.wgmma_flops_per_clk_per_sm:
        return engine.infeasible()
    spilled_clk = engine.spill_clk(usage, threads, fit)
    step_clk = mma_clk + exposed_clk + spilled_clk
    span = engine.span_of(tiles, placed.slots, step_clk=step_clk, cta_clk=block_clk)
    to_us = 1 / spec.sm_clock_mhz
    rounds = tiles.all_steps / placed.slots
    # What one SM can take is all that few CTAs get.
    through_l2 = engine.l2_us(tiles.all_steps * moved_bytes, spec)
    if streamed_share is not None:
        busiest = span.steps * placed.per_sm * moved_bytes
        through_l2 = max(through_l2, engine.l2_us(busiest * spec.num_sms, spec))
    terms = {
        "tensor_us": rounds * mma_clk * to_us,
        "exposed_us": rounds * exposed_clk * to_us,
        "l2_us": through_l2,
        "hbm_us": engine.hbm_us(once, spec, streamed_share or 1.0),
        "spill_us": rounds * spilled_clk * to_us,
        "cta_us": placed.waves * block_clk * to_us,
        "imbalance_us": span.idle_steps * step_clk * to_us,
        "auxiliary_us": start_us,
    }
    compute = span.steps * step_clk * to_us
    return engine.launch_estimate(
        terms, compute, placed, spec, overlap_loss=overlap_loss, start_us=start_us
    )
