"""How long a candidate should take, and what limits it: arithmetic only, no GPU, no torch.

A K/V tile costs the busiest unit of an SM plus the part that the design cannot overlap (:mod:`.tile_costs`); the grid
is the scheduler's list over the resident slots (:mod:`.schedule`); device memory and L2 bound the whole. Fitted
constants live in :mod:`.coefficients`. :func:`estimate` works before the build, :func:`refine` after it, with the
compiler's report.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from ..arch import resources
from ..arch.spec import ArchSpec
from ..codegen.candidate import Candidate
from ..codegen.problem import Problem
from .coefficients import FITTED, Coefficients
from .schedule import makespan, row_tiles
from .tile_costs import ELEMENT_BYTES, RoundCost, TileCost, round_cost, tile_cost

SPILL_OUTSIDE_LOOPS = 0.05  # weight of spills that happen once a CTA rather than once a K/V tile
COST_UNITS = 16  # of the schedule's integer costs, per K/V tile


class Report(Protocol):
    """What :func:`refine` reads of a compiler report (``codegen``'s CompilerReport has it)."""

    @property
    def registers(self) -> int:
        """32-bit registers per thread."""

    @property
    def spill_store_bytes(self) -> int:
        """Bytes of spill stores per thread."""

    @property
    def spill_load_bytes(self) -> int:
        """Bytes of spill loads per thread."""

    @property
    def static_smem_bytes(self) -> int:
        """Static shared memory of one CTA."""

    @property
    def loop_spills(self) -> bool | None:
        """Whether a main loop touches local memory; None where nobody looked."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one CTA takes from an SM.

    Attributes:
        registers: 32-bit registers per thread.
        smem_bytes: shared memory, static and dynamic.
        spill_bytes: spilled bytes per thread and K/V tile, loads and stores.
    """

    registers: int
    smem_bytes: int
    spill_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted time and where it goes.

    Attributes:
        us: kernel time in microseconds, launch included; infinite when no CTA fits an SM.
        limiter: the largest of ``terms``, without its unit: ``tensor``, ``smem``, ``exp``, ``alu``, ``issue``, ``l2``,
            ``hbm``, ``exposed``, ``latency``, ``spill``, ``cta``, ``imbalance``, ``launch``; or ``residency``.
        terms: microseconds by cause. The first seven are each unit's busy time, of which the largest counts; the others
            are added to it.
        occupancy: resident CTAs per SM, as far as the grid fills them.
        waves: CTA tiles over resident slots.
    """

    us: float
    limiter: str
    terms: dict[str, float]
    occupancy: int
    waves: float


def estimate(
    problem: Problem, candidate: Candidate, spec: ArchSpec, coefficients: Coefficients = FITTED
) -> Estimate:
    """Predict a candidate's time before it is built."""
    usage = Usage(
        registers=resources.registers_per_thread(candidate, spec),
        smem_bytes=resources.smem_bytes(candidate),
        spill_bytes=expected_spill_bytes(candidate, spec),
    )
    return predict(problem, candidate, spec, usage, coefficients)


def expected_spill_bytes(candidate: Candidate, spec: ArchSpec) -> float:
    """Bytes per thread and K/V tile: what finds no register under the launch bound is stored and loaded once a tile."""
    least = resources.fragment_registers(candidate) + resources.REGISTERS_BESIDE_FRAGMENTS_MIN
    return 8.0 * max(0, least - resources.register_cap(candidate, spec))


def refine(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    report: Report,
    coefficients: Coefficients = FITTED,
) -> Estimate:
    """Predict a built candidate's time with the compiler's registers, spills and static shared memory."""
    spilled = report.spill_store_bytes + report.spill_load_bytes
    usage = Usage(
        registers=report.registers,
        smem_bytes=resources.smem_bytes(candidate) + report.static_smem_bytes,
        spill_bytes=spilled * (SPILL_OUTSIDE_LOOPS if report.loop_spills is False else 1.0),
    )
    return predict(problem, candidate, spec, usage, coefficients)


def rank(
    problem: Problem,
    candidates: Iterable[Candidate],
    spec: ArchSpec,
    coefficients: Coefficients = FITTED,
) -> list[tuple[Candidate, Estimate]]:
    """All candidates with their estimates, fastest first; equal times in the order of their names."""
    pairs = [(c, estimate(problem, c, spec, coefficients)) for c in candidates]
    return sorted(pairs, key=lambda pair: (pair[1].us, pair[0].name))


def predict(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    usage: Usage,
    coefficients: Coefficients = FITTED,
) -> Estimate:
    """Predict a time under given resource usage; what :func:`estimate` and :func:`refine` share."""
    fit = coefficients
    resident = resources.occupancy(
        spec,
        threads=candidate.forward.num_threads,
        registers=usage.registers,
        smem_bytes=usage.smem_bytes,
    )
    if resident < 1:
        return Estimate(us=inf, limiter="residency", terms={}, occupancy=0, waves=inf)
    tiles = row_tiles(
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        block_m=candidate.forward.block_m,
        block_n=candidate.forward.block_n,
        causal=problem.causal,
        causal_offset=problem.causal_offset,
    )
    heads = problem.batch * problem.heads_q
    ctas = len(tiles) * heads * candidate.forward.v_slices
    resident = min(resident, -(-ctas // spec.num_sms))
    slots = resident * spec.num_sms
    tile = tile_cost(candidate, spec, fit)
    full = round_cost(candidate, tile, resident, fit)
    spill_clk = (
        resident * fit.spill_clk_per_byte * usage.spill_bytes * candidate.forward.num_threads / 4096
    )
    round_clk = full.clk + spill_clk
    cta_clk = _cta_clk(candidate, spec, resident, fit)
    if candidate.forward.persistent:
        round_clk *= 1.0 + fit.persistent_loss

    # The schedule's loss over perfectly even slots, at the speed of the half-empty SMs at the end.
    overhead = max(1, round(COST_UNITS * cta_clk / round_clk))
    span = makespan(
        tuple(COST_UNITS * count + overhead for count in tiles),
        heads=heads,
        value_slices=candidate.forward.v_slices,
        heads_first=candidate.forward.cta_order == "heads_first",
        persistent=candidate.forward.persistent,
        slots=slots,
    )
    even = (
        (COST_UNITS * sum(tiles) + overhead * len(tiles))
        * heads
        * candidate.forward.v_slices
        / slots
    )
    last = -(-(ctas % slots) // spec.num_sms) or resident
    if problem.causal:
        last = -(-resident // 2)
    tail = round_cost(candidate, tile, last, fit).clk / full.clk if last < resident else 1.0
    cta_tiles = sum(tiles) * heads * candidate.forward.v_slices
    rounds = cta_tiles / slots
    to_us = 1 / spec.sm_clock_mhz
    imbalance_us = max(0.0, span - even) / COST_UNITS * round_clk * tail * to_us

    fills = cta_tiles * tile.fill_bytes
    l2_us = fills / spec.l2_bytes_per_clk * to_us
    per_kv_head = ctas // (problem.batch * problem.heads_kv)
    hbm_bytes = _hbm_bytes(problem, candidate, fills, per_kv_head, slots, spec, fit)
    hbm_us = hbm_bytes * 1e6 / spec.hbm_bytes_per_second
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
        limiter=max(terms, key=lambda name: terms[name]).removesuffix("_us"),
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


def _cta_clk(candidate: Candidate, spec: ArchSpec, resident: int, fit: Coefficients) -> float:
    """Clocks of a CTA outside its main loop: Q in, first K/V, O out; co-resident CTAs hide each other's waits."""
    moved = (
        candidate.forward.block_m
        * (candidate.class_qk + resources.value_columns(candidate))
        * ELEMENT_BYTES
    )
    start = fit.cta_clk * (
        0.5 if candidate.forward.persistent else 1.0
    )  # no CTA launch between tiles
    waits = start + 2 * fit.load_latency_clk + moved * spec.num_sms / spec.l2_bytes_per_clk
    return waits / resident


def _hbm_bytes(
    problem: Problem,
    candidate: Candidate,
    fills: float,
    ctas_per_kv_head: int,
    slots: int,
    spec: ArchSpec,
    fit: Coefficients,
) -> float:
    """Bytes through device memory: Q and O once, K and V as often as the concurrent heads push them out of L2.

    CTAs of one head that run together walk the keys together and share what they read; what comes later finds the part
    of the concurrent heads' K and V that L2 can hold.
    """
    heads_kv = problem.batch * problem.heads_kv
    rows_q = problem.batch * problem.heads_q * problem.seqlen_q
    q_and_o = ELEMENT_BYTES * rows_q * (problem.dim_qk + problem.dim_v)
    head_bytes = ELEMENT_BYTES * problem.seqlen_k * (problem.dim_qk + problem.dim_v)
    heads_first = candidate.forward.cta_order == "heads_first"
    active = min(heads_kv, slots if heads_first else -(-slots // ctas_per_kv_head))
    together = max(1.0, min(ctas_per_kv_head, slots / active))
    once = heads_kv * head_bytes
    missed = max(0.0, 1.0 - fit.kv_cache_share * spec.l2_bytes / (active * head_bytes))
    return q_and_o + once + missed * max(0.0, fills / together - once)
