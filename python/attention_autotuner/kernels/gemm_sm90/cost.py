"""The time of a matrix product of family ``sm90``: rounds of tiles, whose steps the tensor cores or L2 bound."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES
from ..shared import engine
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usages
from ..shared.wgmma_cost import NEIGHBOURS_L2_GAIN
from .knobs import knobs_of
from .resources import BLOCK_K, splits_of, workspace_bytes

# Set by hand to the 80 times of eight problems on an H200 (benchmarks/results/nvidia-h200/records.jsonl.xz).
MMA_SHARE = 0.85  # of the spec's rate, that a dense stream of MMAs keeps
CLUSTER_LOSS = 1.35  # times the clocks of a step where two CTAs wait for each other's loads
TURNS_LOSS = 1.7  # more, where their warpgroups take tiles by turns
OVERLAP_LOSS = 0.05  # share of the lesser of computing and moving that adds to the greater
STORED_BYTES_PER_CLK = 32  # of a tile that leaves
DIRECT_SHARE = 1.5  # clocks of one that leaves from registers, over that
TILE_CLK = 1000  # of a tile beside its steps
PING_PONG_SHARE = 0.3  # of those, where the other warpgroup computes meanwhile


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate's kernels; infinite where an SM does not hold them, or has no such MMAs."""
    (usage,), knobs = usages, knobs_of(candidate)
    clusters = -(-problem.seqlen_q // (knobs.block_m * knobs.cluster))
    splits, columns = splits_of(problem, candidate), -(-problem.dim_v // knobs.block_n)
    items = clusters * columns * splits
    busy = min(items * knobs.cluster, spec.num_sms)
    placed = engine.residency(spec, usage, threads=knobs.num_threads, ctas=busy)
    if placed is None or not spec.wgmma_flops_per_clk_per_sm:
        return engine.infeasible()
    rounds = -(-items // (spec.num_sms // knobs.cluster))
    steps = -(-problem.dim_qk // BLOCK_K) / splits
    flops = 2 * knobs.block_m * knobs.block_n * BLOCK_K
    mma_clk = flops / (spec.wgmma_flops_per_clk_per_sm * MMA_SHARE)
    if knobs.cluster > 1:
        mma_clk *= CLUSTER_LOSS * (TURNS_LOSS if knobs.schedule == "ping_pong" else 1.0)
    loaded = (knobs.block_m + knobs.block_n / knobs.cluster) * BLOCK_K * ELEMENT_BYTES
    l2_clk = loaded * busy / (spec.l2_bytes_per_clk * NEIGHBOURS_L2_GAIN)
    tile_clk = TILE_CLK + ELEMENT_BYTES * knobs.block_m * knobs.block_n / STORED_BYTES_PER_CLK * (
        DIRECT_SHARE if knobs.output == "direct" or splits > 1 else 1
    )
    if knobs.schedule == "ping_pong":
        tile_clk *= PING_PONG_SHARE
    to_us = 1 / spec.sm_clock_mhz
    sums = workspace_bytes(problem, candidate)
    terms = {
        "tensor_us": rounds * steps * mma_clk * to_us,
        "cta_us": rounds * tile_clk * to_us,
        "l2_us": rounds * steps * l2_clk * to_us,
        "hbm_us": engine.hbm_us(problem.bytes_moved, spec),
    }
    compute = terms["tensor_us"] + terms["cta_us"]
    estimate = engine.launch_estimate(terms, compute, placed, spec, overlap_loss=OVERLAP_LOSS)
    added = engine.AuxiliaryWork(kernels=int(sums > 0), us=engine.l2_us(2 * sums, spec))
    return engine.in_sequence([estimate], added, spec)
