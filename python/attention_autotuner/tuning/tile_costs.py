"""What one K/V tile costs each unit of an SM, and how much of it warps can overlap.

All figures are clocks of one SM for one CTA and one K/V tile, from the candidate's tile arithmetic alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arch import resources
from ..arch.spec import ArchSpec
from ..codegen.candidate import Candidate
from .coefficients import Coefficients

ELEMENT_BYTES = 2
SCORE_BYTES = 2  # P is stored in the input dtype
SCHEDULERS_PER_SM = 4
WARP = 32
MMA_FLOPS = 2 * 16 * 8 * 16  # one mma.sync m16n8k16
LDMATRIX_BYTES = 512  # one ldmatrix.x4 of a warp
P_STORE_BYTES = 128  # one 4-byte store of a warp
COPY_INSTRUCTIONS = {
    16: 3.0,
    2: 30.0,
}  # per warp and 512 bytes: one cp.async, or eight loads and a packed store


@dataclass(frozen=True, kw_only=True)
class TileCost:
    """Clocks of one CTA and K/V tile, by unit.

    Attributes:
        tensor_clk: mma.sync time, with the padding of tile and head dims in it.
        smem_clk: operand reads of every warp, P where it passes through shared memory, and fills.
        exp_clk: ex2.
        alu_clk: fp32 work of the softmax.
        issue_clk: warp instructions over the schedulers' issue rate.
        barriers: CTA-wide barriers.
        lookahead: how many barriers ahead a load is issued.
        fill_bytes: bytes read from L2.
    """

    tensor_clk: float
    smem_clk: float
    exp_clk: float
    alu_clk: float
    issue_clk: float
    barriers: int
    lookahead: int
    fill_bytes: int


def tile_cost(candidate: Candidate, spec: ArchSpec, fit: Coefficients) -> TileCost:
    """The cost of one K/V tile of a CTA."""
    m, n, dim = candidate.forward.block_m, candidate.forward.block_n, candidate.class_qk
    columns = resources.value_columns(candidate)
    flops = 2 * m * n * (dim + columns)

    # Every warp along the rows reads all of K and V; warps along the keys share them but each reads all of P.
    reads = candidate.forward.warps_m * n * (dim + columns) * ELEMENT_BYTES
    if not candidate.forward.q_in_registers:
        reads += candidate.forward.warps_n * m * dim * ELEMENT_BYTES
    writes = 0
    if candidate.forward.warps_n > 1:
        reads += candidate.forward.warps_n * m * n * SCORE_BYTES
        writes += m * n * SCORE_BYTES
    fill = n * (dim + columns) * ELEMENT_BYTES

    scores = m * n
    warps = candidate.forward.warps_m * candidate.forward.warps_n
    row_tiles = m // candidate.forward.warps_m // 16
    alu_instructions = scores * fit.scores_alu_instructions / WARP
    instructions = (
        flops / MMA_FLOPS
        + reads / LDMATRIX_BYTES
        + writes / P_STORE_BYTES
        + fill / LDMATRIX_BYTES * COPY_INSTRUCTIONS[candidate.copy_bytes]
        + scores / WARP
        + alu_instructions
        + warps * fit.warp_tile_instructions
        + warps * row_tiles * fit.row_tile_instructions
    )

    slices = resources.k_slices(candidate)
    if slices > 1:
        barriers, lookahead = slices + 1, min(candidate.forward.num_stages - 1, slices)
    elif candidate.forward.num_stages == 1:
        barriers, lookahead = 2, 1
    else:
        barriers, lookahead = 1, candidate.forward.num_stages - 1
    if candidate.forward.warps_n > 1:
        barriers += 2  # row maxima, then P
    return TileCost(
        tensor_clk=flops / (spec.mma_flops_per_clk_per_sm * fit.tensor_efficiency),
        smem_clk=(reads + writes + fill) / (spec.smem_bytes_per_clk_per_sm * fit.smem_efficiency),
        exp_clk=scores / spec.exp_per_clk_per_sm,
        alu_clk=alu_instructions * WARP / spec.fp32_lanes_per_clk_per_sm,
        issue_clk=instructions / SCHEDULERS_PER_SM,
        barriers=barriers,
        lookahead=lookahead,
        fill_bytes=fill,
    )


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """One round: every one of ``residents`` CTAs of an SM does one K/V tile.

    Attributes:
        clk: how long the round takes.
        bottleneck_clk: the busiest units' share of it.
        exposed_clk: what the design cannot overlap.
        latency_clk: barriers and loads that arrive late.
    """

    clk: float
    bottleneck_clk: float
    exposed_clk: float
    latency_clk: float


def _blend(first: float, second: float, sharpness: float) -> float:
    """Time of two units that feed each other: the greater when they are far apart, more when they compete."""
    greater, lesser = max(first, second), min(first, second)
    return float(greater * (1.0 + (lesser / greater) ** sharpness) ** (1.0 / sharpness))


def round_cost(
    candidate: Candidate, tile: TileCost, residents: int, fit: Coefficients
) -> RoundCost:
    """The largest unit, plus the part that the resident warps cannot hide behind it.

    A lone warp per scheduler runs its products and its softmax one after the other; with more warps (or the next
    Q K^T issued ahead) one's softmax runs under another's products.
    """
    products = _blend(tile.tensor_clk, tile.smem_clk, fit.unit_sharpness)
    softmax = _blend(tile.exp_clk, tile.alu_clk, fit.unit_sharpness)
    busiest = max(products, softmax, tile.issue_clk)
    bottleneck = residents * busiest
    if candidate.forward.qk_ahead:
        softmax *= fit.ahead_exposure
    chain = max(products + softmax, busiest)  # of a CTA whose warps overlap nothing
    per_scheduler = candidate.forward.warps_m * candidate.forward.warps_n / SCHEDULERS_PER_SM
    # Warps that share rows meet at barriers for the row maxima and for P, so they count as one.
    together = max(1.0, residents * per_scheduler / candidate.forward.warps_n)
    # What a warp does beyond its share of the bottleneck vanishes behind the others on its scheduler, more or less.
    exposed = residents * (chain - busiest) * together**-fit.warp_overlap_power
    busy = max(bottleneck + exposed, chain / per_scheduler)
    cover = tile.lookahead * busy / tile.barriers
    late = tile.barriers * max(0.0, fit.load_latency_clk - cover)
    latency = (tile.barriers * fit.barrier_clk + late) / residents
    return RoundCost(
        clk=busy + latency,
        bottleneck_clk=bottleneck,
        exposed_clk=busy - bottleneck,
        latency_clk=latency,
    )
