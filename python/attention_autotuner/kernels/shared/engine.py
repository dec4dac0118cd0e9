"""The engine under every kernel's cost: resident CTAs and slots, the schedule's span, memory, launches in a row.

A kernel's ``cost`` counts what its launches do; how many clocks a step takes is a matter of its family
(:mod:`.kernel_cost`, :mod:`.wgmma_cost` and the passes over chunks). What all have in common is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import inf

from ...arch import occupancy
from ...arch.spec import ArchSpec
from .coefficients import Coefficients
from .estimates import Estimate, Usage, limiter_of
from .schedule import makespan

COST_UNITS = 16  # of the schedule's integer costs, per step


@dataclass(frozen=True, kw_only=True)
class Residency:
    """The CTAs of a launch on a GPU.

    Attributes:
        ctas: of the launch.
        per_sm: CTAs that an SM holds at a time.
        slots: CTAs that the GPU holds at a time.
    """

    ctas: int
    per_sm: int
    slots: int

    @property
    def waves(self) -> float:
        """CTAs over slots."""
        return self.ctas / self.slots


def residency(
    spec: ArchSpec, usage: Usage, *, threads: int, ctas: int, filled: bool = True
) -> Residency | None:
    """The CTAs that are resident; None where an SM does not hold one.

    Args:
        spec: the GPU.
        usage: what a CTA takes from an SM.
        threads: of a CTA.
        ctas: of the launch.
        filled: no more per SM than the launch has for each.
    """
    per_sm = occupancy.occupancy(
        spec, threads=threads, registers=usage.registers, smem_bytes=usage.smem_bytes
    )
    if per_sm < 1:
        return None
    if filled:
        per_sm = min(per_sm, -(-ctas // spec.num_sms))
    return Residency(ctas=ctas, per_sm=per_sm, slots=per_sm * spec.num_sms)


def infeasible() -> Estimate:
    """The estimate of a launch that no SM holds, or that the GPU has no instructions for."""
    return Estimate(us=inf, limiter="residency", terms={}, occupancy=0, waves=inf)


def spill_clk(usage: Usage, threads: int, fit: Coefficients, residents: int = 1) -> float:
    """Clocks of an SM that spills of resident CTAs take in a step."""
    return residents * fit.spill_clk_per_byte * usage.spill_bytes * threads / 4096


@dataclass(frozen=True, kw_only=True)
class TileList:
    """The scheduler's list of a launch.

    Attributes:
        steps: how many steps each block of one head takes, in the order of the list.
        heads: how many times the blocks repeat, batch included.
        slices: CTAs that share one block.
        batches: of the heads, those whose CTAs for one block are neighbours in the list: they share a part of a mask.
        longest_first: the order of the list.
        persistent: one CTA per slot loops over tiles.
        tail_heads: of a list of heads in turn, those at its end whose blocks are side by side.
    """

    steps: tuple[int, ...]
    heads: int
    slices: int
    batches: int = 1
    longest_first: bool
    persistent: bool = False
    tail_heads: int = 0

    @property
    def ctas(self) -> int:
        """Tiles of CTAs in the list."""
        return len(self.steps) * self.heads * self.slices

    @property
    def all_steps(self) -> int:
        """Steps of all CTAs."""
        return sum(self.steps) * self.heads * self.slices


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time that a list takes on the slots, in steps.

    Attributes:
        steps: until the last slot is done.
        idle_steps: of them, those beyond what perfectly even slots would take.
    """

    steps: float
    idle_steps: float


def span_of(tiles: TileList, slots: int, *, step_clk: float, cta_clk: float) -> Span:
    """The span of a list whose CTAs take ``cta_clk`` beside their steps."""
    overhead = max(1, round(COST_UNITS * cta_clk / step_clk))
    units = makespan(
        tuple(COST_UNITS * count + overhead for count in tiles.steps),
        heads=tiles.heads // tiles.batches,
        value_slices=tiles.slices * tiles.batches,
        longest_first=tiles.longest_first,
        persistent=tiles.persistent,
        slots=slots,
        tail_heads=tiles.tail_heads,
    )
    even = (COST_UNITS * tiles.all_steps + overhead * tiles.ctas) / slots
    return Span(steps=units / COST_UNITS, idle_steps=max(0.0, units - even) / COST_UNITS)


def l2_us(num_bytes: float, spec: ArchSpec) -> float:
    """Microseconds that bytes take through L2."""
    return num_bytes / spec.l2_bytes_per_clk * (1 / spec.sm_clock_mhz)


def hbm_us(num_bytes: float, spec: ArchSpec, share: float = 1.0) -> float:
    """Microseconds that bytes take through device memory at a share of its peak."""
    return num_bytes * 1e6 / (share * spec.hbm_bytes_per_second)


def launch_estimate(
    terms: dict[str, float],
    compute_us: float,
    placed: Residency,
    spec: ArchSpec,
    *,
    overlap_loss: float,
    start_us: float = 0.0,
    launch_share: float = 1.0,
) -> Estimate:
    """The estimate of one launch: the greater of computing and moving, with a share of the lesser, and its start.

    Args:
        terms: microseconds by cause, without the launch; ``l2_us`` and ``hbm_us`` are those of moving.
        compute_us: of all steps on the SMs.
        placed: its CTAs.
        spec: the GPU.
        overlap_loss: share of the lesser that adds to the greater.
        start_us: before either begins.
        launch_share: of the spec's time of a launch, that this takes.
    """
    launch_us = launch_share * spec.launch_overhead_us
    memory_us = max(terms["l2_us"], terms["hbm_us"])
    us = max(compute_us, memory_us) + overlap_loss * min(compute_us, memory_us) + start_us
    terms = {**terms, "launch_us": launch_us}
    return Estimate(
        us=us + launch_us,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=placed.per_sm,
        waves=placed.waves,
    )


@dataclass(frozen=True, kw_only=True)
class AuxiliaryWork:
    """Kernels around the passes (preprocess, postprocess, scans of states), bound by memory or the tensor cores alone.

    Attributes:
        kernels: how many.
        us: their time without launches, microseconds.
    """

    kernels: int = 0
    us: float = 0.0

    @classmethod
    def through_memory(cls, kernel_bytes: Sequence[int], spec: ArchSpec) -> AuxiliaryWork:
        """Kernels that move bytes at the memory's peak."""
        return cls(kernels=len(kernel_bytes), us=hbm_us(sum(kernel_bytes), spec))

    def plus(
        self, num_bytes: float, spec: ArchSpec, fit: Coefficients, *, flops: float = 0.0
    ) -> AuxiliaryWork:
        """One kernel of retention more."""
        memory = hbm_us(num_bytes, spec, fit.chunk_auxiliary_bandwidth)
        rate = spec.mma_flops_per_clk_per_sm * spec.num_sms * spec.sm_clock_mhz
        return AuxiliaryWork(
            kernels=self.kernels + 1,
            us=self.us + max(memory, flops / (rate * fit.chunk_scores_efficiency)),
        )


def in_sequence(
    launches: Sequence[Estimate],
    auxiliary: AuxiliaryWork,
    spec: ArchSpec,
    *,
    side_by_side: bool = False,
) -> Estimate:
    """Launches one after the other, and the kernels around them; infinite where one is.

    Args:
        launches: in their order.
        auxiliary: the kernels around them.
        spec: the GPU.
        side_by_side: CTAs of a launch begin on SMs that those of the one ahead leave idle.
    """
    longest = max(launches, key=lambda launch: launch.us)
    if not longest.terms:
        return longest
    names = dict.fromkeys(name for launch in launches for name in launch.terms)
    terms = {name: sum(launch.terms.get(name, 0.0) for launch in launches) for name in names}
    auxiliary_launch_us = auxiliary.kernels * spec.launch_overhead_us
    terms["launch_us"] += auxiliary_launch_us
    terms["auxiliary_us"] = auxiliary.us
    us = sum(launch.us for launch in launches)
    if side_by_side:
        filled = min(us - longest.us, sum(starmap(_filled, pairwise(launches))))
        terms["imbalance_us"] = max(0.0, terms["imbalance_us"] - filled)
        us -= filled
    return Estimate(
        us=us + auxiliary.us + auxiliary_launch_us,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=longest.occupancy,
        waves=longest.waves,
    )


def _filled(ahead: Estimate, behind: Estimate) -> float:
    """The time of a launch that passes on SMs which the one ahead leaves idle."""
    busy = behind.us - behind.terms["imbalance_us"]
    return behind.us * min(1.0, ahead.terms["imbalance_us"] / busy)
