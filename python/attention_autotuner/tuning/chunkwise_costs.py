"""The work of retention's passes over chunks, counted for the cost model.

A CTA walks its chunks one after the other; what a chunk costs is :mod:`.tile_costs` over the products, reads and copies
of one step, but never less than the chain of waits from a chunk's arrival to the state that the next one needs. Before
the pass come, where the plan has them, the states of super-chunks and the scores of all chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf

from ..arch import occupancy
from ..arch.spec import ArchSpec
from ..codegen.candidate import Candidate
from ..codegen.problem import Problem
from ..codegen.retention_knobs import ChunkPass, ChunkwiseKnobs, RetentionBackwardKnobs
from .coefficients import Coefficients
from .decoding import decodes
from .estimates import Estimate, Usage, limiter_of
from .tile_costs import ELEMENT_BYTES, WARP, RoundCost, StepCounts, TileCost, round_cost, tile_cost

STATE_BYTES = 4
CHAIN_US = (
    1.0  # from a chunk's arrival to the next state, of a CTA alone on its SM, beside the busy time
)
SCORES_ALU_SHARE = 0.5  # fp32 work for a decayed score, over that of a softmax
STATE_INSTRUCTIONS = 1.5  # for an element of the state: its decay, and half a conversion of two
SCORES_EFFICIENCY = 0.5  # of the tensor rate, in the kernel that only computes scores


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One kernel that walks chunks.

    Attributes:
        knobs: of the pass.
        chunk: tokens of one step.
        depth: D, the inner dim class.
        width: the dim class that CTAs slice into columns.
        states_only: it only sums states: no X, no scores, no output.
        heads: query heads, batch included.
        tokens: of one head.
        stretch: tokens that one CTA walks.
        copy_bytes: width of global reads.
    """

    knobs: ChunkPass
    chunk: int
    depth: int
    width: int
    states_only: bool = False
    heads: int
    tokens: int
    stretch: int
    copy_bytes: int

    @property
    def slices(self) -> int:
        """CTAs that share a stretch."""
        return -(-self.width // self.knobs.columns)

    @property
    def stretches(self) -> int:
        """Stretches of one head."""
        return -(-self.tokens // self.stretch)

    @property
    def chunks(self) -> int:
        """Chunks that a CTA walks, one after the other."""
        return -(-min(self.stretch, self.tokens) // self.chunk)


def counts_of(walk: Walk) -> StepCounts:
    """One chunk of a CTA."""
    knobs, c, d, w = walk.knobs, walk.chunk, walk.depth, walk.knobs.columns
    along, deep = knobs.column_warps, knobs.depth_warps
    inline = knobs.scores == "inline" and not walk.states_only
    # Every warp along the columns reads all of Y for Y^T Z, and those that share columns all of Z.
    flops = 2 * c * d * w
    reads = (along * c * d + deep * c * w) * ELEMENT_BYTES
    writes, fill, barriers = 0, (c * d + c * w) * ELEMENT_BYTES, 1
    instructions = STATE_INSTRUCTIONS * d * w / WARP
    if not walk.states_only:
        # X for X S; the scores and Z again for their product.
        flops += 2 * c * d * w + 2 * c * c * w
        reads += (along * c * d + along * deep * c * c + deep * c * w) * ELEMENT_BYTES
        writes += c * w * ELEMENT_BYTES + c * w * STATE_BYTES * (deep - 1)
        reads += c * w * ELEMENT_BYTES + c * w * STATE_BYTES * (deep - 1)
        fill += c * d * ELEMENT_BYTES
        barriers += 1 + (deep > 1)
        if inline:
            flops += 2 * c * c * d
            reads += (along + 1) * c * d * ELEMENT_BYTES
            writes += c * c * ELEMENT_BYTES
            barriers += 1
        else:
            fill += c * c * ELEMENT_BYTES
    staged = knobs.num_stages > 1
    return StepCounts(
        flops=flops,
        reads=reads,
        writes=writes,
        fill_bytes=fill,
        copy_bytes=walk.copy_bytes,
        scores=c * c if inline else 0,
        exponentials=0.0,
        alu_share=SCORES_ALU_SHARE,
        warps=along * deep,
        other_instructions=instructions,
        barriers=barriers,
        waits=1,
        lookahead=1.0 if staged else 0.0,
    )


@lru_cache(maxsize=8192)
def walk_time(walk: Walk, spec: ArchSpec, usage: Usage, fit: Coefficients) -> Estimate:
    """The time of one kernel that walks chunks, its launch included."""
    counts = counts_of(walk)
    resident = occupancy.occupancy(
        spec,
        threads=walk.knobs.num_threads,
        registers=usage.registers,
        smem_bytes=usage.smem_bytes,
    )
    if resident < 1:
        return Estimate(us=inf, limiter="residency", terms={}, occupancy=0, waves=inf)
    ctas = walk.heads * walk.stretches * walk.slices
    resident = min(resident, -(-ctas // spec.num_sms))
    slots = resident * spec.num_sms
    tile, to_us = tile_cost(counts, spec, fit), 1 / spec.sm_clock_mhz
    spill_clk = fit.spill_clk_per_byte * usage.spill_bytes * walk.knobs.num_threads / 4096

    def chunk_us(residents: int) -> float:
        found = round_cost(tile, residents, fit)
        alone = round_cost(tile, 1, fit).bottleneck_clk * to_us + CHAIN_US
        return max((found.clk + residents * spill_clk) * to_us, alone)

    whole, rest = divmod(ctas, slots)
    last = chunk_us(-(-rest // spec.num_sms)) if rest else 0.0
    full = whole * chunk_us(resident)
    start_us = fit.cta_clk * to_us * ceil(ctas / slots)
    compute = walk.chunks * (full + last) + start_us
    l2_us = ctas * walk.chunks * counts.fill_bytes / spec.l2_bytes_per_clk * to_us
    hbm_us = _walk_bytes(walk) * 1e6 / spec.hbm_bytes_per_second
    memory = max(l2_us, hbm_us)
    us = max(compute, memory) + fit.memory_overlap_loss * min(compute, memory)
    rounds = walk.chunks * ctas / slots
    shown = round_cost(tile, resident, fit)
    terms = _terms(tile, shown, rounds, resident, to_us) | {
        "l2_us": l2_us,
        "hbm_us": hbm_us,
        "spill_us": rounds * resident * spill_clk * to_us,
        "chain_us": max(0.0, chunk_us(resident) - shown.clk * to_us) * rounds,
        "cta_us": start_us,
        "imbalance_us": max(0.0, walk.chunks * (full + last) - rounds * chunk_us(resident)),
        "launch_us": spec.launch_overhead_us,
    }
    return Estimate(
        us=us + spec.launch_overhead_us,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=resident,
        waves=ctas / slots,
    )


def _terms(
    tile: TileCost, shown: RoundCost, rounds: float, resident: int, to_us: float
) -> dict[str, float]:
    """Each unit's busy time, and what is added to the busiest, microseconds."""
    tiles = rounds * resident * to_us
    return {
        "tensor_us": tile.tensor_clk * tiles,
        "smem_us": tile.smem_clk * tiles,
        "exp_us": tile.exp_clk * tiles,
        "alu_us": tile.alu_clk * tiles,
        "issue_us": tile.issue_clk * tiles,
        "exposed_us": shown.exposed_clk * rounds * to_us,
        "latency_us": shown.latency_clk * rounds * to_us,
    }


def _walk_bytes(walk: Walk) -> int:
    """Bytes through device memory: the slices of a stretch read it together, from L2."""
    rows = walk.heads * walk.tokens
    if walk.states_only:
        return rows * (walk.depth + walk.width) * ELEMENT_BYTES
    given = walk.chunk if walk.knobs.scores == "given" else 0
    return rows * (2 * walk.depth + 2 * walk.width + given) * ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What runs beside the passes and is bound by device memory or the tensor cores alone.

    Attributes:
        kernels: how many kernels.
        us: their time without launches, microseconds.
    """

    kernels: int = 0
    us: float = 0.0

    def plus(self, num_bytes: float, spec: ArchSpec, *, flops: float = 0.0) -> Beside:
        """One kernel more."""
        memory = num_bytes * 1e6 / spec.hbm_bytes_per_second
        rate = spec.mma_flops_per_clk_per_sm * spec.num_sms * spec.sm_clock_mhz
        return Beside(
            kernels=self.kernels + 1,
            us=self.us + max(memory, flops / (rate * SCORES_EFFICIENCY)),
        )


def forward(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usage: Usage, fit: Coefficients
) -> Estimate:
    """The time of the chunkwise form.

    Raises:
        TypeError: the candidate is of another form.
    """
    knobs = candidate.knobs
    if not isinstance(knobs, ChunkwiseKnobs):
        raise TypeError(f"{candidate.name} is not chunkwise")
    passes = {"output": (knobs.output, usage)}
    return _plan(problem, candidate, knobs.chunk, knobs.super_chunk, passes, spec, fit)


def backward(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    usages: Sequence[Usage],
    fit: Coefficients,
) -> Estimate:
    """The time of the gradients; ``usages`` of dq, dk and dv.

    Raises:
        TypeError: the candidate has other knobs.
    """
    knobs = candidate.knobs
    if not isinstance(knobs, RetentionBackwardKnobs):
        raise TypeError(f"{candidate.name} is not retention's backward")
    passes = {
        name: (one, usage) for (name, one), usage in zip(knobs.passes.items(), usages, strict=True)
    }
    return _plan(problem, candidate, knobs.chunk, knobs.super_chunk, passes, spec, fit)


def _plan(
    problem: Problem,
    candidate: Candidate,
    chunk: int,
    super_chunk: int,
    passes: dict[str, tuple[ChunkPass, Usage]],
    spec: ArchSpec,
    fit: Coefficients,
) -> Estimate:
    """All kernels of a plan, one after the other."""
    heads, tokens = problem.batch * problem.heads_q, problem.seqlen_q
    split = 0 < super_chunk < tokens
    states = STATE_BYTES * heads * problem.dim_qk * problem.dim_v
    walks: list[tuple[Walk, Usage]] = []
    beside = Beside()
    scored: set[int] = set()
    for name, (knobs, usage) in passes.items():
        over_values = name in ("output", "dv")  # its CTAs slice dim_v, else dim_qk
        qk, v = candidate.class_qk, candidate.class_v
        walk = Walk(
            knobs=knobs,
            chunk=chunk,
            depth=qk if over_values else v,
            width=v if over_values else qk,
            heads=heads,
            tokens=tokens,
            stretch=super_chunk if split else tokens,
            copy_bytes=candidate.copy_bytes,
        )
        walks.append((walk, usage))
        if split and name != "dk":  # dk starts from the states that dv does
            walks.append((_summing(walk), usage))
            beside = beside.plus(4 * states * walk.stretches, spec)  # written, scanned, read
        if knobs.scores == "given" and walk.depth not in scored:
            scored.add(walk.depth)
            rows = heads * tokens
            beside = beside.plus(
                ELEMENT_BYTES * rows * (2 * walk.depth + chunk),
                spec,
                flops=2.0 * rows * chunk * walk.depth,
            )
        if name in ("dk", "dv") and problem.heads_q > problem.heads_kv:
            beside = beside.plus(2 * STATE_BYTES * heads * tokens * walk.width, spec)
    if decodes(problem):
        beside = Beside(kernels=beside.kernels, us=beside.us).plus(2 * states, spec)
    return total([walk_time(walk, spec, usage, fit) for walk, usage in walks], beside, spec)


def _summing(walk: Walk) -> Walk:
    """The walk that only sums the states of the same stretches."""
    return Walk(
        knobs=walk.knobs,
        chunk=walk.chunk,
        depth=walk.depth,
        width=walk.width,
        states_only=True,
        heads=walk.heads,
        tokens=walk.tokens,
        stretch=walk.stretch,
        copy_bytes=walk.copy_bytes,
    )


def total(parts: Sequence[Estimate], beside: Beside, spec: ArchSpec) -> Estimate:
    """Kernels one after the other, and what runs beside them."""
    longest = max(parts, key=lambda found: found.us)
    if not longest.terms:
        return longest
    names = dict.fromkeys(name for part in parts for name in part.terms)
    terms = {name: sum(part.terms.get(name, 0.0) for part in parts) for name in names}
    launches = beside.kernels * spec.launch_overhead_us
    terms["launch_us"] += launches
    terms["edges_us"] = beside.us
    return Estimate(
        us=sum(part.us for part in parts) + beside.us + launches,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=longest.occupancy,
        waves=longest.waves,
    )
