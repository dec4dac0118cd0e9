"""The cost of one step of a main loop for each unit of an SM, and how much of it warps can overlap.

All figures are clocks of one SM for one CTA and one step (a K/V tile of the forward pass, a tile of queries or keys of
the backward ones); what a step holds is counted beside each kernel, in its ``cost``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...arch.spec import ArchSpec
from .coefficients import Coefficients

SCHEDULERS_PER_SM = 4
WARP = 32
MMA_FLOPS = 2 * 16 * 8 * 16  # one mma.sync m16n8k16
LDMATRIX_BYTES = 512  # one ldmatrix.x4 of a warp
STORE_BYTES = 128  # one 4-byte store of a warp
# Per warp and 512 bytes: one cp.async, or eight loads and a packed store.
COPY_INSTRUCTIONS = {16: 3.0, 2: 30.0}


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """The counted work of one CTA in one step.

    Attributes:
        flops: of the MMAs, with the padding of tiles and head dims in them.
        reads: bytes that warps read from shared memory.
        writes: bytes that they store there.
        fill_bytes: bytes read from L2.
        copy_bytes: width of those reads.
        sum_bytes: bytes of fp32 sums added in L2.
        scores: elements of S.
        exponentials: ex2 results for a score.
        alu_share: fp32 work for a score, over that of a softmax.
        mask_bytes: of an explicit mask, read from L2 and, once, from shared memory.
        warps: of the CTA.
        other_instructions: warp instructions beside MMAs, operand reads, copies and the work per score: stores,
            sums, row maxima.
        sharing_warps: warps that meet within a step because they share rows, and so count as one.
        barriers: CTA-wide barriers.
        waits: how often the step waits for loads.
        lookahead: the share of a step's time, over all waits, that a load has before it is awaited.
        softmax_exposure: factor of the part between the MMAs; other than 1 where it is issued out of order.
    """

    flops: float
    reads: float
    writes: float
    fill_bytes: int
    copy_bytes: int
    sum_bytes: int = 0
    scores: int
    exponentials: float = 1.0
    alu_share: float = 1.0
    mask_bytes: int = 0
    warps: int
    other_instructions: float = 0.0
    sharing_warps: int = 1
    barriers: int
    waits: int
    lookahead: float
    softmax_exposure: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TileCost:
    """Clocks of one CTA and step, by unit.

    Attributes:
        tensor_clk: mma.sync time.
        smem_clk: operand reads of every warp, what passes through shared memory, and fills.
        exp_clk: ex2.
        alu_clk: fp32 work between the MMAs.
        issue_clk: warp instructions over the schedulers' issue rate.
        counts: what they were taken from.
    """

    tensor_clk: float
    smem_clk: float
    exp_clk: float
    alu_clk: float
    issue_clk: float
    counts: StepCounts


def tile_cost(counts: StepCounts, spec: ArchSpec, fit: Coefficients) -> TileCost:
    """The cost of one step of a CTA."""
    alu_instructions = counts.scores * counts.alu_share * fit.scores_alu_instructions / WARP
    exponentials = counts.scores * counts.exponentials
    fill_bytes = counts.fill_bytes + counts.mask_bytes
    instructions = (
        counts.flops / MMA_FLOPS
        + counts.reads / LDMATRIX_BYTES
        + fill_bytes / LDMATRIX_BYTES * COPY_INSTRUCTIONS[counts.copy_bytes]
        + exponentials / WARP
        + alu_instructions
        + counts.warps * fit.warp_tile_instructions
        + counts.other_instructions
    )
    smem = counts.reads + counts.mask_bytes + counts.writes + fill_bytes
    return TileCost(
        tensor_clk=counts.flops / (spec.mma_flops_per_clk_per_sm * fit.tensor_efficiency),
        smem_clk=smem / (spec.smem_bytes_per_clk_per_sm * fit.smem_efficiency),
        exp_clk=exponentials / spec.exp_per_clk_per_sm,
        alu_clk=alu_instructions * WARP / spec.fp32_lanes_per_clk_per_sm,
        issue_clk=instructions / SCHEDULERS_PER_SM,
        counts=counts,
    )


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """One round: every one of ``residents`` CTAs of an SM does one step.

    Attributes:
        clk: how long the round takes.
        exposed_clk: what the design cannot overlap.
        latency_clk: barriers and loads that arrive late.
    """

    clk: float
    exposed_clk: float
    latency_clk: float


def _blend(first: float, second: float, sharpness: float) -> float:
    """Time of two units that feed each other: the greater when they are far apart, more when they compete."""
    greater, lesser = max(first, second), min(first, second)
    if not lesser:
        return greater
    return float(greater * (1.0 + (lesser / greater) ** sharpness) ** (1.0 / sharpness))


def round_cost(tile: TileCost, residents: int, fit: Coefficients) -> RoundCost:
    """The largest unit, plus the part that the resident warps cannot overlap with it.

    A lone warp per scheduler runs its MMAs and its softmax one after the other; with more warps (or the next
    Q K^T issued ahead) one's softmax runs under another's MMAs.
    """
    counts = tile.counts
    mmas = _blend(tile.tensor_clk, tile.smem_clk, fit.unit_sharpness)
    softmax = _blend(tile.exp_clk, tile.alu_clk, fit.unit_sharpness)
    busiest = max(mmas, softmax, tile.issue_clk)
    bottleneck = residents * busiest
    softmax *= counts.softmax_exposure
    chain = max(mmas + softmax, busiest)  # of a CTA whose warps overlap nothing
    per_scheduler = counts.warps / SCHEDULERS_PER_SM
    # Warps that share rows meet at barriers for the row maxima and for P, so they count as one.
    together = max(1.0, residents * per_scheduler / counts.sharing_warps)
    # What a warp does beyond its share of the bottleneck vanishes behind the others on its scheduler, more or less.
    exposed = residents * (chain - busiest) * together**-fit.warp_overlap_power
    busy = max(bottleneck + exposed, chain / per_scheduler)
    cover = counts.lookahead * busy / counts.waits
    late = counts.waits * max(0.0, fit.load_latency_clk - cover)
    latency = (counts.barriers * fit.barrier_clk + late) / residents
    return RoundCost(clk=busy + latency, exposed_clk=busy - bottleneck, latency_clk=latency)
