"""The time of one kernel of family ``sm80`` over scores: steps on the SMs, bytes through L2 and device memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...arch.spec import ArchSpec
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from . import engine
from .coefficients import Coefficients
from .estimates import Estimate, Usage
from .tile_costs import WARP, StepCounts, round_cost, tile_cost
from .workspace import span_bytes

# What modifications add to a score, by counting instructions: results of ex2 and rcp, and fp32 work over that of a
# softmax.
EXPONENTIALS = {"softcap": 2.0}
ALU_SHARES = {"softcap": 1.0, "alibi_slopes": 0.5, "bias_table": 1.0}


@dataclass(frozen=True, kw_only=True)
class KernelWork(engine.TileList):
    """The work of a kernel for one problem.

    Attributes:
        counts: one step of a CTA.
        causal: whether the last CTAs of the list are shorter than the rest.
        outer_bytes: bytes that a CTA moves before and after its steps.
        once_bytes: bytes of device memory that are moved once whatever happens.
        streams: heads whose data CTAs stream, batch included.
        stream_bytes: bytes of one such head.
        hbm_share: of the peak of device memory, that a kernel gets which little but memory takes the time of.
    """

    counts: StepCounts
    causal: bool
    outer_bytes: int
    once_bytes: int
    streams: int
    stream_bytes: int
    hbm_share: float = 1.0


def predict_kernel(work: KernelWork, spec: ArchSpec, usage: Usage, fit: Coefficients) -> Estimate:
    """The time of one kernel under given resource usage."""
    threads = WARP * work.counts.warps
    placed = engine.residency(spec, usage, threads=threads, ctas=work.ctas)
    if placed is None:
        return engine.infeasible()
    resident, slots = placed.per_sm, placed.slots
    tile = tile_cost(work.counts, spec, fit)
    full = round_cost(tile, resident, fit)
    spilled_clk = engine.spill_clk(usage, threads, fit, resident)
    round_clk = full.clk + spilled_clk
    cta_clk = _cta_clk(work, spec, resident, fit)
    if work.persistent:
        round_clk *= 1.0 + fit.persistent_loss

    # The schedule's loss over perfectly even slots, at the speed of the half-empty SMs at the end.
    span = engine.span_of(work, slots, step_clk=round_clk, cta_clk=cta_clk)
    last = -(-(work.ctas % slots) // spec.num_sms) or resident
    if work.causal:
        last = -(-resident // 2)
    tail = round_cost(tile, last, fit).clk / full.clk if last < resident else 1.0
    rounds = work.all_steps / slots
    to_us = 1 / spec.sm_clock_mhz

    fills = work.all_steps * work.counts.fill_bytes
    through_l2 = fills + work.all_steps * (work.counts.sum_bytes + work.counts.mask_bytes)
    units = ("tensor", "smem", "exp", "alu", "issue")
    terms = {f"{u}_us": getattr(tile, f"{u}_clk") * (rounds * resident * to_us) for u in units}
    terms |= {
        "exposed_us": full.exposed_clk * (rounds * to_us),
        "latency_us": full.latency_clk * (rounds * to_us),
        "l2_us": engine.l2_us(through_l2, spec),
        "hbm_us": engine.hbm_us(_hbm_bytes(work, fills, placed, spec, fit), spec, work.hbm_share),
        "spill_us": rounds * spilled_clk * to_us,
        "cta_us": placed.waves * cta_clk * to_us,
        "imbalance_us": span.idle_steps * round_clk * tail * to_us,
    }
    compute = rounds * round_clk * to_us + terms["cta_us"] + terms["imbalance_us"]
    return engine.launch_estimate(
        terms, compute, placed, spec, overlap_loss=fit.memory_overlap_loss
    )


def _cta_clk(work: KernelWork, spec: ArchSpec, resident: int, fit: Coefficients) -> float:
    """Clocks of a CTA outside its main loop: resident tiles and the first step's in, results out.

    Co-resident CTAs cover each other's waits.
    """
    # No CTA launch between tiles.
    start = fit.cta_clk * (fit.persistent_start_share if work.persistent else 1.0)
    moved = work.outer_bytes * spec.num_sms / spec.l2_bytes_per_clk
    return (start + 2 * fit.load_latency_clk + moved) / resident


def _hbm_bytes(
    work: KernelWork, fills: float, placed: engine.Residency, spec: ArchSpec, fit: Coefficients
) -> float:
    """Bytes through device memory: some once, streamed ones as often as the concurrent heads push them out of L2.

    CTAs of one head that run together read its stream together, once for all; those that come later find the part of
    the concurrent heads' streams that L2 can hold.
    """
    slots, per_stream = placed.slots, placed.ctas // work.streams
    in_turn = work.batches * -(-slots // (per_stream * work.batches))
    active = min(work.streams, slots if work.longest_first else in_turn)
    together = max(1.0, min(per_stream, slots / active))
    once = work.streams * work.stream_bytes
    held = fit.kv_cache_share * spec.l2_bytes / (active * work.stream_bytes)
    return work.once_bytes + once + max(0.0, 1.0 - held) * max(0.0, fills / together - once)


def with_score_mod(work: KernelWork, problem: Problem, fit: Coefficients) -> KernelWork:
    """A kernel's work with the score modification of its problem: attention's softmax, a mask or a decay.

    CTAs of the batch that share a part of an explicit mask run together, so that it comes from device memory once.
    """
    counts = work.counts
    if problem.score == "softmax":
        names = problem.modifications
        if not names:
            return work
        exponentials = counts.exponentials + sum(EXPONENTIALS.get(name, 0.0) for name in names)
        alu_share = counts.alu_share + sum(ALU_SHARES.get(name, 0.0) for name in names)
        return replace(work, counts=replace(counts, exponentials=exponentials, alu_share=alu_share))
    if problem.score == "decayed":
        exponentials, alu_share = fit.score_decayed_exponentials, fit.score_decayed_alu_share
        return replace(work, counts=replace(counts, exponentials=exponentials, alu_share=alu_share))
    masked = replace(
        counts,
        exponentials=0.0,
        alu_share=fit.score_masked_alu_share,
        mask_bytes=counts.scores * ELEMENT_BYTES,
    )
    once_bytes = work.once_bytes + mask_bytes(problem)
    return replace(work, counts=masked, batches=problem.batch, once_bytes=once_bytes)


def reductions(problem: Problem, splits: int) -> list[int]:
    """Bytes through device memory of each kernel that a backward may need: what finds spans, what adds dK and dV up.

    The latter where so many CTAs, more than one, share a block of keys.
    """
    moved = [span_bytes(problem)] if problem.spanned else []
    if splits > 1:
        batch, _, keys = problem.extents
        rows = batch * problem.heads_kv * keys
        once = rows * (problem.padded_dim_qk + problem.padded_dim_v)
        moved.append(once * (2 * splits * FP32_BYTES + ELEMENT_BYTES))  # written, read, added up
    return moved


def mask_bytes(problem: Problem) -> int:
    """Bytes of an explicit mask that a kernel reads: that of every head, half of it when causal; 0 without one."""
    if problem.score != "masked":
        return 0
    whole = ELEMENT_BYTES * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return whole // 2 if problem.causal else whole
