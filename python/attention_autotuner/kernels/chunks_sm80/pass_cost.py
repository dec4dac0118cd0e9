"""What a pass over chunks costs, counted for the cost model.

A CTA walks its chunks one after the other, and few warps share a scheduler, as each holds a part of the state. So what
a chunk costs is the chain of one warp's instructions, of which a second warp on the same scheduler hides a part; only
never less than the busiest unit of :mod:`.tile_costs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf

from ...arch import occupancy
from ...arch.spec import ArchSpec
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usage, limiter_of
from ..shared.tile_costs import (
    COPY_INSTRUCTIONS,
    ELEMENT_BYTES,
    LDMATRIX_BYTES,
    SCHEDULERS_PER_SM,
    WARP,
    StepCounts,
    TileCost,
    tile_cost,
)
from .knobs import ChunkPass

STATE_BYTES = 4
VECTOR_COPY = 16  # bytes
# Clocks of a warp that is alone on its scheduler, for a chunk: whatever it holds, for a product of two fragments, for a
# fragment read, for a thread's element of the output and of the scores, and for a register that it lacks. Fitted to 15
# times of forward passes of head dims 64 to 512 on an H200, which they give within 9 %.
CHUNK_CLK = 560.0
PRODUCT_CLK = 2.0
READ_CLK = 20.0
OUTPUT_CLK = 33.0
SCORE_CLK = 27.0
MISSING_CLK = 36.0
GRADIENT_CLK = 60.0  # more, for a pair of 16-token tiles of a chunk, where the pass gives a gradient: fitted to 5 times
REGISTERS_BESIDE = 50  # what a pass holds
INSTRUCTION_CLK = 2.5  # of any other instruction
SECOND_WARP = 0.7  # of a warp's clocks, that each further one on its scheduler adds
# Clocks by which a chunk arrives late: where its copies start once the last one is done with, and where they start
# within the last one's products.
LATE_CLK = {1: 800.0, 2: 140.0, 3: 0.0}
SCORES_ALU_SHARE = 0.5  # fp32 work for a decayed score, over that of a softmax


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One kernel that walks chunks.

    Attributes:
        knobs: of the pass.
        chunk: tokens of one step.
        depth: D, the inner dim class.
        width: the dim class that CTAs slice into columns.
        states_only: it only sums states: no X, no scores, no output.
        gradient: its result is a gradient.
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
    gradient: bool = False
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
            reads += c * d * ELEMENT_BYTES  # of Y; X is at hand for X S
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
    lone_clk = warp_clk(walk, spec)
    spill_clk = fit.spill_clk_per_byte * usage.spill_bytes * walk.knobs.num_threads / 4096

    def chunk_us(residents: int) -> float:
        sharing = max(1.0, residents * counts.warps / SCHEDULERS_PER_SM)
        chain = lone_clk * (1.0 + SECOND_WARP * (sharing - 1.0)) + residents * spill_clk
        return max(residents * _busiest_clk(tile), chain) * to_us

    whole, rest = divmod(ctas, slots)
    last = chunk_us(-(-rest // spec.num_sms)) if rest else 0.0
    full = whole * chunk_us(resident)
    start_us = fit.cta_clk * to_us * ceil(ctas / slots)
    compute = walk.chunks * (full + last) + start_us
    l2_us = ctas * walk.chunks * counts.fill_bytes / spec.l2_bytes_per_clk * to_us
    hbm_us = _walk_bytes(walk) * 1e6 / spec.hbm_bytes_per_second
    memory = max(l2_us, hbm_us)
    us = max(compute, memory)  # what they lose by each other is in the clocks of a warp
    rounds = walk.chunks * ctas / slots
    tiles = rounds * resident * to_us
    terms = {
        "tensor_us": tile.tensor_clk * tiles,
        "smem_us": tile.smem_clk * tiles,
        "alu_us": tile.alu_clk * tiles,
        "issue_us": tile.issue_clk * tiles,
        "chain_us": rounds * chunk_us(resident) - _busiest_clk(tile) * tiles,
        "l2_us": l2_us,
        "hbm_us": hbm_us,
        "spill_us": rounds * resident * spill_clk * to_us,
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


def _busiest_clk(tile: TileCost) -> float:
    """Clocks of the busiest unit for a chunk of one CTA."""
    return max(tile.tensor_clk, tile.smem_clk, tile.alu_clk, tile.issue_clk)


def warp_clk(walk: Walk, spec: ArchSpec) -> float:
    """Clocks of a warp for a chunk when it has its scheduler for itself."""
    knobs, c = walk.knobs, walk.chunk
    tokens, columns = (
        c // 16,
        knobs.columns // knobs.column_warps,
    )  # of a warp, in tiles of 16 and one by one
    depth = -(-walk.depth // (16 * knobs.depth_warps))  # tiles of 16
    inline = knobs.scores == "inline" and not walk.states_only
    products = tokens * depth * columns / 8  # Y^T Z
    reads = tokens * depth + tokens * columns / 16
    output = scores = 0.0
    if not walk.states_only:
        products += tokens * depth * columns / 8 + tokens * tokens * columns / 8 / knobs.depth_warps
        reads += tokens * depth + tokens * tokens / knobs.depth_warps
        output = c * columns / WARP
    if inline:
        score_tiles = c / 8 / knobs.column_warps
        products += tokens * score_tiles * depth
        reads += score_tiles / 2 * depth
        scores = c * c / knobs.column_warps / WARP
    state = columns * 16 * depth / WARP
    wanted = state + output + 1.5 * scores + REGISTERS_BESIDE
    fair = spec.registers_per_sm // (knobs.num_threads * knobs.ctas_per_sm)
    missing = max(0.0, wanted - min(fair, spec.max_registers_per_thread))
    fill = c * (2 * walk.depth + knobs.columns) * ELEMENT_BYTES
    copies = COPY_INSTRUCTIONS[walk.copy_bytes] - COPY_INSTRUCTIONS[VECTOR_COPY]
    narrow = copies * fill / LDMATRIX_BYTES / (knobs.column_warps * knobs.depth_warps)
    return (
        CHUNK_CLK
        + PRODUCT_CLK * products
        + READ_CLK * reads
        + OUTPUT_CLK * output
        + SCORE_CLK * scores
        + MISSING_CLK * missing
        + INSTRUCTION_CLK * narrow
        + GRADIENT_CLK * tokens * tokens * walk.gradient
        + LATE_CLK[knobs.num_stages]
    )


def _walk_bytes(walk: Walk) -> int:
    """Bytes through device memory: the slices of a stretch read it together, from L2."""
    rows = walk.heads * walk.tokens
    if walk.states_only:
        return rows * (walk.depth + walk.width) * ELEMENT_BYTES
    given = walk.chunk if walk.knobs.scores == "given" else 0
    return rows * (2 * walk.depth + 2 * walk.width + given) * ELEMENT_BYTES
