"""The time of chunkwise retention of family ``sm90``: chunks one after the other, memory, and states of stretches.

A chunk is a chain of MMAs that wait for each other: its clocks hardly hang on the tensor rate. Passes of the backward
direction that wait for no states run side by side (:func:`together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

# Columns of Q and K of a forward pass beyond which its loads are late, and two CTAs on an SM lack registers in bf16.
DEEP, CROWDED_DEPTH = 128, 64


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The work of a launch's CTAs.

    Attributes:
        placed: the CTAs, and how many an SM holds.
        chunks: of a CTA.
        start_clk: clocks before the first chunk.
        tensor_clk: clocks of the tensor cores for a chunk.
        chain_clk: clocks of a chunk of a CTA that has an SM for itself.
        next_cta: share of these that each further CTA on the SM adds.
        fill_bytes: that all CTAs load.
        moved_bytes: of all tensors, in device memory.
        bandwidth: share of the memory's peak.
    """

    placed: engine.Residency
    chunks: int
    start_clk: float
    tensor_clk: float
    chain_clk: float
    next_cta: float
    fill_bytes: int
    moved_bytes: int
    bandwidth: float

    def clk(self, residents: int) -> float:
        """Clocks of a CTA, where so many are on each SM."""
        residents = min(residents, self.placed.per_sm)
        chain_clk = self.chain_clk * (1.0 + self.next_cta * (residents - 1))
        return self.chunks * max(residents * self.tensor_clk, chain_clk)


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate's kernels; infinite where an SM does not hold them, or has no such MMAs."""
    (usage,) = usages
    shape = resources.shape_of(candidate)
    tokens, stretch = problem.seqlen_q, shape.knobs.super_chunk
    launch = partial(launch_of, problem, shape, spec, usage, fit)
    if not 0 < stretch < tokens:
        return together([launch(tokens, tokens)], spec, fit)
    count, pieces = cut_of(problem, candidate, shape.slices)
    states = FP32_BYTES * problem.batch * problem.heads_q * problem.dim_qk * problem.dim_v
    moved = 2 * states * count * pieces  # written, read
    # A CTA of the last super-chunk sums all of them before it begins.
    sums = FP32_BYTES * shape.depth * shape.columns * count * pieces
    sums_us = sums / (fit.chunk_sm90_sum_bytes_per_clk * spec.sm_clock_mhz)
    launches = [
        together([launch(stretch * count, stretch // pieces, states_only=True)], spec, fit),
        together([launch(tokens, stretch)], spec, fit),
    ]
    us = engine.hbm_us(moved, spec, fit.chunk_auxiliary_bandwidth)
    return engine.in_sequence(launches, engine.AuxiliaryWork(us=us + sums_us), spec)


def cut_of(problem: Problem, candidate: Candidate, slices: int) -> tuple[int, int]:
    """Super-chunks before the last one, and pieces of each, where so many CTAs share a stretch."""
    knobs = resources.shape_of(candidate).knobs
    count = -(-problem.seqlen_q // knobs.super_chunk) - 1
    ctas = problem.batch * problem.heads_q * slices * count
    return count, pieces_of(knobs.super_chunk, chunk=knobs.chunk, ctas=ctas)


def launch_of(
    problem: Problem,
    shape: ChunkSm90Shape,
    spec: ArchSpec,
    usage: Usage,
    fit: Coefficients,
    tokens: int,
    stretch: int,
    *,
    states_only: bool = False,
) -> Launch | None:
    """A launch over so many tokens of each head, of which a CTA takes a stretch; None where no SM can run it.

    Where it only sums states, there are neither Q nor an output.
    """
    knobs = shape.knobs
    heads = problem.batch * problem.heads_q
    ctas = heads * shape.slices * -(-tokens // stretch)
    placed = engine.residency(spec, usage, threads=knobs.num_threads, ctas=ctas, filled=False)
    if placed is None or not spec.wgmma_flops_per_clk_per_sm:
        return None
    chunks = -(-min(stretch, tokens) // knobs.chunk)
    # Multiply-adds of a token: with K; and where there is an output, with the state, and scores with V.
    macs = shape.depth * shape.columns
    fill = shape.depth + shape.columns
    moved = problem.dim_qk + problem.dim_v  # of a token, through device memory
    if not states_only:
        macs += shape.depth * (shape.columns + knobs.chunk) + shape.columns * knobs.chunk
        fill += shape.depth
        moved *= 2
    forward = problem.direction == "forward"
    chain_clk = (
        fit.chunk_sm90_clk
        + fit.chunk_sm90_depth_clk * shape.depth
        + (0.0 if forward else fit.chunk_sm90_gradient_clk)
        + engine.spill_clk(usage, knobs.num_threads, fit)
    )
    chain_clk *= 1.0 + fit.chunk_sm90_next_group * (knobs.warpgroups - 1)
    if forward:  # late loads, which warpgroups wait for together
        chain_clk += fit.chunk_sm90_deep_clk * max(0, shape.depth - DEEP)
    if states_only:
        chain_clk *= fit.chunk_sm90_states_share
    crowded = knobs.ctas_per_sm > 1 and shape.depth > CROWDED_DEPTH
    if forward and crowded and problem.dtype == "bf16":
        chain_clk *= fit.chunk_sm90_crowded
    two_stages = knobs.num_stages == 2
    return Launch(
        placed=placed,
        chunks=chunks,
        start_clk=0.0 if forward else fit.chunk_sm90_start_clk * shape.depth,
        tensor_clk=2 * knobs.chunk * macs / spec.wgmma_flops_per_clk_per_sm,
        chain_clk=chain_clk,
        next_cta=fit.chunk_sm90_next_cta,
        fill_bytes=ctas * chunks * knobs.chunk * fill * ELEMENT_BYTES,
        moved_bytes=ELEMENT_BYTES * heads * tokens * moved,
        bandwidth=fit.chunk_sm90_bandwidth_2_stages if two_stages else fit.chunk_sm90_bandwidth,
    )


def together(
    launches: Sequence[Launch | None],
    spec: ArchSpec,
    fit: Coefficients,
    *,
    behind: bool = False,
) -> Estimate:
    """The time of launches whose CTAs share the GPU; infinite where an SM does not hold one.

    Where all fit at once, it is that of the longest. Else rounds of CTAs follow each other, the last of which may have
    fewer on each SM.

    Args:
        launches: in their order, each beginning as soon as there is a place.
        spec: the GPU.
        fit: the fitted constants.
        behind: their CTAs take places beside those of the launch ahead, for which they wait, two on an SM where others
            are left without.
    """
    running = [launch for launch in launches if launch is not None]
    if len(running) < len(launches):
        return engine.infeasible()
    ctas = sum(launch.placed.ctas for launch in running)
    waves = sum(launch.placed.waves for launch in running)
    per_sm = ctas / (waves * spec.num_sms)
    first = ceil(ctas / spec.num_sms)  # CTAs of an SM, as far as it holds them

    def mean_clk(residents: int) -> float:
        return sum(launch.placed.ctas * launch.clk(residents) for launch in running) / ctas

    span_clk = max(launch.clk(first) for launch in running)
    if behind:
        crowded_clk = max(launch.clk(first + 1) for launch in running)
        span_clk += fit.chunk_sm90_uneven_share * (crowded_clk - span_clk)
    rounds = int(waves)
    if rounds:
        last = ceil((waves - rounds) * per_sm)
        rest_clk = mean_clk(last) if last else 0.0
        span_clk = max(span_clk, rounds * mean_clk(round(per_sm)) + rest_clk)
    to_us = 1 / spec.sm_clock_mhz
    start_us = max(launch.start_clk for launch in running) * to_us
    work = [launch.placed.ctas * launch.chunks / spec.num_sms for launch in running]
    tensor_clk = sum(share * x.tensor_clk for share, x in zip(work, running, strict=True))
    busy_clk = min(span_clk, mean_clk(min(first, round(per_sm))) * waves)
    terms = {
        "tensor_us": tensor_clk * to_us,
        "chain_us": max(0.0, busy_clk - tensor_clk) * to_us,
        "l2_us": engine.l2_us(sum(launch.fill_bytes for launch in running), spec),
        "hbm_us": sum(engine.hbm_us(x.moved_bytes, spec, x.bandwidth) for x in running),
        "cta_us": start_us,
        "imbalance_us": (span_clk - busy_clk) * to_us,
    }
    per_sm_held = min(first, max(launch.placed.per_sm for launch in running))
    return engine.launch_estimate(
        terms,
        span_clk * to_us,
        engine.Residency(ctas=ctas, per_sm=per_sm_held, slots=per_sm_held * spec.num_sms),
        spec,
        overlap_loss=fit.chunk_sm90_overlap_loss,
        start_us=start_us,
        launch_share=fit.chunk_sm90_launch_share,
    )
