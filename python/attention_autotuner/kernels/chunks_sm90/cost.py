"""The time of chunkwise retention of family ``sm90``: chunks one after the other, memory, and states of stretches.

A chunk is a chain of MMAs that wait for each other: its clocks hardly hang on the tensor rate.
"""

from __future__ import annotations

from functools import partial
from math import ceil

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared import engine
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usage, Usages
from ..shared.super_chunks import pieces_of
from . import resources
from .resources import ChunkSm90Shape


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate's kernels; infinite where an SM does not hold them, or has no such MMAs."""
    (usage,) = usages
    shape = resources.shape_of(candidate)
    tokens, stretch = problem.seqlen_q, shape.knobs.super_chunk
    heads = problem.batch * problem.heads_q
    predict_pass = partial(_predict_pass, problem, shape, spec, usage, fit)
    if not 0 < stretch < tokens:
        return predict_pass(tokens, tokens)
    count = -(-tokens // stretch) - 1
    ctas = heads * shape.slices * count
    pieces = pieces_of(stretch, chunk=shape.knobs.chunk, ctas=ctas)
    states = FP32_BYTES * heads * problem.dim_qk * problem.dim_v
    moved = 4 * states * count * pieces  # of the backward: written, scanned, read
    auxiliary = engine.AuxiliaryWork().plus(moved, spec, fit)
    launches = [
        predict_pass(tokens, stretch),
        predict_pass(stretch * count, stretch // pieces, states_only=True),
    ]
    return engine.in_sequence(launches, auxiliary, spec)


def _predict_pass(
    problem: Problem,
    shape: ChunkSm90Shape,
    spec: ArchSpec,
    usage: Usage,
    fit: Coefficients,
    tokens: int,
    stretch: int,
    *,
    states_only: bool = False,
) -> Estimate:
    """The time of a launch over so many tokens of each head, of which a CTA takes a stretch.

    Where it only sums states, there are neither Q nor an output.
    """
    knobs = shape.knobs
    heads = problem.batch * problem.heads_q
    ctas = heads * shape.slices * -(-tokens // stretch)
    placed = engine.residency(spec, usage, threads=knobs.num_threads, ctas=ctas)
    if placed is None or not spec.wgmma_flops_per_clk_per_sm:
        return engine.infeasible()
    resident, rounds = placed.per_sm, placed.waves
    chunks = -(-min(stretch, tokens) // knobs.chunk)
    # Multiply-adds of a token: with K; and where there is an output, with the state, and scores with V.
    macs = shape.depth * shape.columns
    fill = shape.depth + shape.columns
    moved = problem.dim_qk + problem.dim_v  # of a token, through device memory
    if not states_only:
        macs += shape.depth * (shape.columns + knobs.chunk) + shape.columns * knobs.chunk
        fill += shape.depth
        moved *= 2
    tensor_clk = resident * 2 * knobs.chunk * macs / spec.wgmma_flops_per_clk_per_sm
    chain_clk = (
        fit.chunk_sm90_clk
        + fit.chunk_sm90_depth_clk * shape.depth
        + engine.spill_clk(usage, knobs.num_threads, fit)
    )
    chain_clk *= 1.0 + fit.chunk_sm90_next_group * (resident * knobs.warpgroups - 1)
    if states_only:
        chain_clk *= fit.chunk_sm90_states_share
    chunk_clk = max(tensor_clk, chain_clk)
    to_us = 1 / spec.sm_clock_mhz
    start_us = fit.chunk_sm90_start_clk * shape.depth * to_us
    two_stages = knobs.num_stages == 2
    bandwidth = fit.chunk_sm90_bandwidth_2_stages if two_stages else fit.chunk_sm90_bandwidth
    terms = {
        "tensor_us": rounds * chunks * tensor_clk * to_us,
        "chain_us": rounds * chunks * (chunk_clk - tensor_clk) * to_us,
        "l2_us": engine.l2_us(ctas * chunks * knobs.chunk * fill * ELEMENT_BYTES, spec),
        "hbm_us": engine.hbm_us(ELEMENT_BYTES * heads * tokens * moved, spec, bandwidth),
        "cta_us": start_us,
        "imbalance_us": (ceil(rounds) - rounds) * chunks * chunk_clk * to_us,
    }
    compute = ceil(rounds) * chunks * chunk_clk * to_us
    return engine.launch_estimate(
        terms, compute, placed, spec, overlap_loss=fit.chunk_sm90_overlap_loss, start_us=start_us
    )
