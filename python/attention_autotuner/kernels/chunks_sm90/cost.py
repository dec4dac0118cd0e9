"""How long chunkwise retention of family ``sm90`` takes: chunks one after the other, memory, and states of stretches.

Fitted to 15 times on one H200 (dims 64, 128, 256 and 256/512), which it meets within 10 % but for one. A chunk is a
chain of products that wait for each other: its clocks hardly hang on the tensor rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from ...arch import occupancy
from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..chunks_sm80.cost import Beside, total
from ..chunks_sm80.pass_cost import STATE_BYTES
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usage, limiter_of
from ..shared.tile_costs import ELEMENT_BYTES
from ..shared.workspace import pieces_of
from . import resources
from .resources import ChunkSm90Shape

# Clocks of a chunk of a warpgroup that has an SM for itself, and for each column of Q and K.
CHUNK_CLK = 1300.0
DEPTH_CLK = 8.2
NEXT_GROUP = 0.41  # of them, that each further warpgroup with a state adds
STATES_SHARE = 0.72  # of them, that a chunk takes of which only the state is wanted
START_CLK = 38.0  # for each column of Q and K: until all SMs are at work, and since some are not
BANDWIDTH = {2: 0.78, 3: 0.89, 4: 0.89}  # of the peak, by stages
OVERLAP_LOSS = 0.08  # of the lesser of computing and moving


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """One kernel that walks stretches of the sequences.

    Attributes:
        tokens: of one head, that are walked.
        stretch: of them, those that one CTA walks.
        states_only: there are neither Q nor an output.
    """

    tokens: int
    stretch: int
    states_only: bool = False


def predict(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    usages: tuple[Usage, ...],
    fit: Coefficients,
) -> Estimate:
    """The time of a candidate's kernels; infinite where an SM does not hold them, or has no such products."""
    (usage,) = usages
    shape = resources.shape_of(candidate)
    tokens, stretch = problem.seqlen_q, shape.knobs.super_chunk
    heads = problem.batch * problem.heads_q
    if not 0 < stretch < tokens:
        return _walk(problem, shape, Stretches(tokens=tokens, stretch=tokens), spec, usage)
    output = Stretches(tokens=tokens, stretch=stretch)
    count = -(-tokens // stretch) - 1
    pieces = pieces_of(stretch, shape.knobs.chunk, heads * shape.slices * count)
    before = replace(output, tokens=stretch * count, stretch=stretch // pieces, states_only=True)
    states = STATE_BYTES * heads * problem.dim_qk * problem.dim_v
    beside = Beside().plus(4 * states * count * pieces, spec)  # written, scanned, read
    return total(
        [_walk(problem, shape, one, spec, usage) for one in (output, before)], beside, spec
    )


def _walk(
    problem: Problem, shape: ChunkSm90Shape, walk: Stretches, spec: ArchSpec, usage: Usage
) -> Estimate:
    knobs = shape.knobs
    resident = occupancy.occupancy(
        spec, threads=knobs.num_threads, registers=usage.registers, smem_bytes=usage.smem_bytes
    )
    if resident < 1 or not spec.wgmma_flops_per_clk_per_sm:
        return Estimate(us=inf, limiter="residency", terms={}, occupancy=0, waves=inf)
    heads = problem.batch * problem.heads_q
    ctas = heads * shape.slices * -(-walk.tokens // walk.stretch)
    resident = min(resident, -(-ctas // spec.num_sms))
    slots = resident * spec.num_sms
    chunks = -(-min(walk.stretch, walk.tokens) // knobs.chunk)
    # Of a token: with K; and where there is an output, with the state, and scores with V.
    products = shape.depth * knobs.columns
    fill = shape.depth + knobs.columns
    moved = problem.dim_qk + problem.dim_v  # of a token, through device memory
    if not walk.states_only:
        products += shape.depth * (knobs.columns + knobs.chunk) + knobs.columns * knobs.chunk
        fill += shape.depth
        moved *= 2
    tensor_clk = resident * 2 * knobs.chunk * products / spec.wgmma_flops_per_clk_per_sm
    chain_clk = CHUNK_CLK + DEPTH_CLK * shape.depth + usage.spill_bytes * knobs.num_threads / 4096
    chain_clk *= 1.0 + NEXT_GROUP * (resident * knobs.warpgroups - 1)
    if walk.states_only:
        chain_clk *= STATES_SHARE
    chunk_clk = max(tensor_clk, chain_clk)
    to_us = 1 / spec.sm_clock_mhz
    rounds = ctas / slots
    compute = ceil(rounds) * chunks * chunk_clk * to_us
    l2_us = ctas * chunks * knobs.chunk * fill * ELEMENT_BYTES / spec.l2_bytes_per_clk * to_us
    bytes_moved = ELEMENT_BYTES * heads * walk.tokens * moved
    bandwidth = BANDWIDTH[knobs.num_stages] * spec.hbm_bytes_per_second
    hbm_us = bytes_moved * 1e6 / bandwidth
    start_us = START_CLK * shape.depth * to_us
    memory = max(l2_us, hbm_us)
    terms = {
        "tensor_us": rounds * chunks * tensor_clk * to_us,
        "chain_us": rounds * chunks * (chunk_clk - tensor_clk) * to_us,
        "l2_us": l2_us,
        "hbm_us": hbm_us,
        "cta_us": start_us,
        "imbalance_us": (ceil(rounds) - rounds) * chunks * chunk_clk * to_us,
        "launch_us": spec.launch_overhead_us,
    }
    us = max(compute, memory) + OVERLAP_LOSS * min(compute, memory) + start_us
    return Estimate(
        us=us + spec.launch_overhead_us,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=resident,
        waves=rounds,
    )
