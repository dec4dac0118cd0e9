"""The cost of a pass over chunks, counted for the cost model.

A CTA takes its chunks one after the other, and few warps share a scheduler, as each holds a part of the state. So a
chunk costs the chain of one warp's instructions, of which a second warp on the same scheduler covers a part; only never
less than the busiest unit of :mod:`..shared.tile_costs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ...arch.spec import ArchSpec
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared import engine, tile_costs
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usage
from ..shared.tile_costs import COPY_INSTRUCTIONS, WARP, StepCounts, TileCost
from .knobs import ChunkPass

VECTOR_COPY = 16  # bytes
SCORE_REGISTERS = 1.5  # of a score: in fp32, and packed to 16 bits


@dataclass(frozen=True, kw_only=True)
class ChunkPassWork:
    """One launch of a pass over chunks.

    Attributes:
        knobs: of the pass.
        chunk: tokens of one step.
        depth: D, the padded inner dim.
        width: the padded dim that CTAs slice into columns.
        states_only: it only sums states: no X, no scores, no output.
        gradient: its result is a gradient.
        heads: query heads, batch included.
        tokens: of one head; of packed sequences, of all.
        stretch: tokens that one CTA takes.
        copy_bytes: width of global reads.
        lengths: of packed sequences; empty where there are none.
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
    lengths: tuple[int, ...] = ()

    @property
    def slices(self) -> int:
        """CTAs that share a stretch."""
        return -(-self.width // self.knobs.columns)

    @property
    def stretches(self) -> int:
        """Stretches of one head."""
        if self.lengths:
            return sum(max(1, -(-length // self.stretch)) for length in self.lengths)
        return -(-self.tokens // self.stretch)

    @property
    def chunks(self) -> float:
        """Chunks that a CTA takes, one after the other; of packed sequences, on average."""
        if self.lengths:
            return sum(-(-length // self.chunk) for length in self.lengths) / self.stretches
        return self.most_chunks

    @property
    def most_chunks(self) -> int:
        """Chunks of the CTA that takes most."""
        longest = max(self.lengths, default=self.tokens)
        return -(-min(self.stretch, longest) // self.chunk)


def counts_of(work: ChunkPassWork, fit: Coefficients) -> StepCounts:
    """One chunk of a CTA."""
    knobs, c, d, w = work.knobs, work.chunk, work.depth, work.knobs.columns
    along, deep = knobs.column_warps, knobs.depth_warps
    inline = knobs.scores == "inline" and not work.states_only
    # Every warp along the columns reads all of Y for Y^T Z, and those that share columns all of Z.
    flops = 2 * c * d * w
    reads = (along * c * d + deep * c * w) * ELEMENT_BYTES
    writes, fill, barriers = 0, (c * d + c * w) * ELEMENT_BYTES, 1
    if not work.states_only:
        # X for X S; the scores and Z again for their MMAs.
        flops += 2 * c * d * w + 2 * c * c * w
        reads += (along * c * d + along * deep * c * c + deep * c * w) * ELEMENT_BYTES
        writes += c * w * ELEMENT_BYTES + c * w * FP32_BYTES * (deep - 1)
        reads += c * w * ELEMENT_BYTES + c * w * FP32_BYTES * (deep - 1)
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
        copy_bytes=work.copy_bytes,
        scores=c * c if inline else 0,
        exponentials=0.0,
        alu_share=fit.chunk_alu_share,
        warps=along * deep,
        barriers=barriers,
        waits=1,
        lookahead=1.0 if staged else 0.0,
    )


@lru_cache(maxsize=8192)
def predict_pass(work: ChunkPassWork, spec: ArchSpec, usage: Usage, fit: Coefficients) -> Estimate:
    """The time of one pass over chunks, its launch included."""
    counts = counts_of(work, fit)
    threads = work.knobs.num_threads
    ctas = work.heads * work.stretches * work.slices
    placed = engine.residency(spec, usage, threads=threads, ctas=ctas)
    if placed is None:
        return engine.infeasible()
    resident, slots = placed.per_sm, placed.slots
    tile, to_us = tile_costs.tile_cost(counts, spec, fit), 1 / spec.sm_clock_mhz
    lone_clk = warp_clk(work, spec, fit)
    spilled_clk = engine.spill_clk(usage, threads, fit)

    def chunk_us(residents: int) -> float:
        sharing = max(1.0, residents * counts.warps / tile_costs.SCHEDULERS_PER_SM)
        chain = lone_clk * (1.0 + fit.chunk_second_warp * (sharing - 1.0)) + residents * spilled_clk
        return max(residents * _busiest_clk(tile), chain) * to_us

    whole, rest = divmod(ctas, slots)
    last = chunk_us(-(-rest // spec.num_sms)) if rest else 0.0
    full = whole * chunk_us(resident)
    start_us = fit.cta_clk * to_us * ceil(ctas / slots)
    rounds = work.chunks * ctas / slots
    tiles = rounds * resident * to_us
    terms = {
        "tensor_us": tile.tensor_clk * tiles,
        "smem_us": tile.smem_clk * tiles,
        "alu_us": tile.alu_clk * tiles,
        "issue_us": tile.issue_clk * tiles,
        "chain_us": rounds * chunk_us(resident) - _busiest_clk(tile) * tiles,
        "l2_us": engine.l2_us(ctas * work.chunks * counts.fill_bytes, spec),
        "hbm_us": engine.hbm_us(_hbm_bytes(work), spec),
        "spill_us": rounds * resident * spilled_clk * to_us,
        "cta_us": start_us,
        "imbalance_us": max(0.0, work.chunks * (full + last) - rounds * chunk_us(resident)),
    }
    compute = work.chunks * (full + last) + start_us
    if work.lengths:  # the longest stretch may be what all wait for
        shared = min(resident, -(-ctas // spec.num_sms))
        compute = max(compute, work.most_chunks * chunk_us(shared) + start_us)
    # What computing and moving lose by each other is in the clocks of a warp.
    return engine.launch_estimate(terms, compute, placed, spec, overlap_loss=0.0)


def _busiest_clk(tile: TileCost) -> float:
    """Clocks of the busiest unit for a chunk of one CTA."""
    return max(tile.tensor_clk, tile.smem_clk, tile.alu_clk, tile.issue_clk)


def warp_clk(work: ChunkPassWork, spec: ArchSpec, fit: Coefficients) -> float:
    """Clocks of a warp for a chunk when it has its scheduler for itself."""
    knobs, c = work.knobs, work.chunk
    tokens = c // 16  # in tiles of 16
    columns = knobs.columns // knobs.column_warps  # of a warp
    depth = -(-work.depth // (16 * knobs.depth_warps))  # tiles of 16
    inline = knobs.scores == "inline" and not work.states_only
    mmas = tokens * depth * columns / 8  # Y^T Z
    reads = tokens * depth + tokens * columns / 16
    output = scores = 0.0
    if not work.states_only:
        mmas += tokens * depth * columns / 8 + tokens * tokens * columns / 8 / knobs.depth_warps
        reads += tokens * depth + tokens * tokens / knobs.depth_warps
        output = c * columns / WARP
    if inline:
        score_tiles = c / 8 / knobs.column_warps
        mmas += tokens * score_tiles * depth
        reads += score_tiles / 2 * depth
        scores = c * c / knobs.column_warps / WARP
    state = columns * 16 * depth / WARP
    wanted = state + output + SCORE_REGISTERS * scores + fit.chunk_other_registers
    share_of_sm = spec.registers_per_sm // (knobs.num_threads * knobs.ctas_per_sm)
    missing = max(0.0, wanted - min(share_of_sm, spec.max_registers_per_thread))
    fill = c * (2 * work.depth + knobs.columns) * ELEMENT_BYTES
    copies = COPY_INSTRUCTIONS[work.copy_bytes] - COPY_INSTRUCTIONS[VECTOR_COPY]
    narrow = copies * fill / tile_costs.LDMATRIX_BYTES / (knobs.column_warps * knobs.depth_warps)
    late_clk = {1: fit.chunk_late_clk_1_stage, 2: fit.chunk_late_clk_2_stages, 3: 0.0}
    return (
        fit.chunk_clk
        + fit.chunk_mma_clk * mmas
        + fit.chunk_read_clk * reads
        + fit.chunk_output_clk * output
        + fit.chunk_score_clk * scores
        + fit.chunk_missing_register_clk * missing
        + fit.chunk_instruction_clk * narrow
        + fit.chunk_gradient_clk * tokens * tokens * work.gradient
        + late_clk[knobs.num_stages]
    )


def _hbm_bytes(work: ChunkPassWork) -> int:
    """Bytes through device memory: the slices of a stretch read it together, from L2."""
    rows = work.heads * work.tokens
    if work.states_only:
        return rows * (work.depth + work.width) * ELEMENT_BYTES
    score_columns = work.chunk if work.knobs.scores == "precomputed" else 0
    return rows * (2 * work.depth + 2 * work.width + score_columns) * ELEMENT_BYTES
