"""How long one kernel takes: its steps on the SMs, its list of CTAs on the slots, its bytes through L2 and memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ...arch import occupancy
from ...arch.spec import ArchSpec
from .coefficients import Coefficients
from .estimates import Estimate, Usage, limiter_of
from .schedule import makespan
from .tile_costs import WARP, RoundCost, StepCounts, TileCost, round_cost, tile_cost

COST_UNITS = 16  # of the schedule's integer costs, per step


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """What a kernel has to do for one problem.

    Attributes:
        counts: one step of a CTA.
        steps: how many steps each block of one head takes, in the order of the scheduler's list.
        heads: how many times the blocks repeat, batch included.
        slices: CTAs that share one block.
        batches: of the heads, those whose CTAs for one block are neighbours in the list: they share a part of a mask.
        heads_first: the order of the list.
        persistent: one CTA per slot loops over tiles.
        causal: whether the last CTAs of the list are shorter than the rest.
        edge_bytes: bytes that a CTA moves before and after its steps.
        once_bytes: bytes of device memory that are moved once whatever happens.
        streams: heads whose data CTAs stream, batch included.
        stream_bytes: bytes of one such head.
    """

    counts: StepCounts
    steps: tuple[int, ...]
    heads: int
    slices: int
    batches: int = 1
    heads_first: bool
    persistent: bool = False
    causal: bool
    edge_bytes: int
    once_bytes: int
    streams: int
    stream_bytes: int


def predict_kernel(work: KernelWork, spec: ArchSpec, usage: Usage, fit: Coefficients) -> Estimate:
    """The time of one kernel under given resource usage."""
    resident = occupancy.occupancy(
        spec,
        threads=WARP * work.counts.warps,
        registers=usage.registers,
        smem_bytes=usage.smem_bytes,
    )
    if resident < 1:
        return Estimate(us=inf, limiter="residency", terms={}, occupancy=0, waves=inf)
    ctas = len(work.steps) * work.heads * work.slices
    resident = min(resident, -(-ctas // spec.num_sms))
    slots = resident * spec.num_sms
    tile = tile_cost(work.counts, spec, fit)
    full = round_cost(tile, resident, fit)
    threads = WARP * work.counts.warps
    spill_clk = resident * fit.spill_clk_per_byte * usage.spill_bytes * threads / 4096
    round_clk = full.clk + spill_clk
    cta_clk = _cta_clk(work, spec, resident, fit)
    if work.persistent:
        round_clk *= 1.0 + fit.persistent_loss

    # The schedule's loss over perfectly even slots, at the speed of the half-empty SMs at the end.
    overhead = max(1, round(COST_UNITS * cta_clk / round_clk))
    span = makespan(
        tuple(COST_UNITS * count + overhead for count in work.steps),
        heads=work.heads // work.batches,
        value_slices=work.slices * work.batches,
        heads_first=work.heads_first,
        persistent=work.persistent,
        slots=slots,
    )
    list_cost = COST_UNITS * sum(work.steps) + overhead * len(work.steps)
    even = list_cost * work.heads * work.slices / slots
    last = -(-(ctas % slots) // spec.num_sms) or resident
    if work.causal:
        last = -(-resident // 2)
    tail = round_cost(tile, last, fit).clk / full.clk if last < resident else 1.0
    all_steps = sum(work.steps) * work.heads * work.slices
    rounds = all_steps / slots
    to_us = 1 / spec.sm_clock_mhz
    imbalance_us = max(0.0, span - even) / COST_UNITS * round_clk * tail * to_us

    fills = all_steps * work.counts.fill_bytes
    through_l2 = fills + all_steps * (work.counts.sum_bytes + work.counts.mask_bytes)
    l2_us = through_l2 / spec.l2_bytes_per_clk * to_us
    hbm_us = _hbm_bytes(work, fills, ctas, slots, spec, fit) * 1e6 / spec.hbm_bytes_per_second
    terms = _terms(tile, full, rounds * resident * to_us, rounds * to_us)
    terms |= {
        "l2_us": l2_us,
        "hbm_us": hbm_us,
        "spill_us": rounds * spill_clk * to_us,
        "cta_us": ctas / slots * cta_clk * to_us,
        "imbalance_us": imbalance_us,
        "launch_us": spec.launch_overhead_us,
    }
    compute = rounds * round_clk * to_us + terms["cta_us"] + imbalance_us
    memory = max(l2_us, hbm_us)
    us = max(compute, memory) + fit.memory_overlap_loss * min(compute, memory)
    us += spec.launch_overhead_us
    return Estimate(
        us=us,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=resident,
        waves=ctas / slots,
    )


def _terms(
    tile: TileCost, full: RoundCost, us_per_tile: float, us_per_round: float
) -> dict[str, float]:
    """The in-loop terms, microseconds."""
    return {
        "tensor_us": tile.tensor_clk * us_per_tile,
        "smem_us": tile.smem_clk * us_per_tile,
        "exp_us": tile.exp_clk * us_per_tile,
        "alu_us": tile.alu_clk * us_per_tile,
        "issue_us": tile.issue_clk * us_per_tile,
        "exposed_us": full.exposed_clk * us_per_round,
        "latency_us": full.latency_clk * us_per_round,
    }


def _cta_clk(work: KernelWork, spec: ArchSpec, resident: int, fit: Coefficients) -> float:
    """Clocks of a CTA outside its main loop: resident tiles and the first step's in, results out.

    Co-resident CTAs hide each other's waits.
    """
    start = fit.cta_clk * (0.5 if work.persistent else 1.0)  # no CTA launch between tiles
    moved = work.edge_bytes * spec.num_sms / spec.l2_bytes_per_clk
    return (start + 2 * fit.load_latency_clk + moved) / resident


def _hbm_bytes(
    work: KernelWork, fills: float, ctas: int, slots: int, spec: ArchSpec, fit: Coefficients
) -> float:
    """Bytes through device memory: some once, streamed ones as often as the concurrent heads push them out of L2.

    CTAs of one head that run together walk its stream together and share what they read; what comes later finds the
    part of the concurrent heads' streams that L2 can hold.
    """
    per_stream = ctas // work.streams
    in_turn = work.batches * -(-slots // (per_stream * work.batches))
    active = min(work.streams, slots if work.heads_first else in_turn)
    together = max(1.0, min(per_stream, slots / active))
    once = work.streams * work.stream_bytes
    held = fit.kv_cache_share * spec.l2_bytes / (active * work.stream_bytes)
    return work.once_bytes + once + max(0.0, 1.0 - held) * max(0.0, fills / together - once)
