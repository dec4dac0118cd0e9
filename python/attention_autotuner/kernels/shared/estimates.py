"""The two sides of a prediction: the resources that a kernel takes from an SM, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...arch.occupancy import KernelNeeds, least_registers, register_cap, registers_per_thread
from ...arch.spec import ArchSpec
from ...core.report import Counts
from .coefficients import Coefficients


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources that one CTA takes from an SM.

    Attributes:
        registers: 32-bit registers per thread.
        smem_bytes: shared memory, static and dynamic.
        spill_bytes: spilled bytes per thread and step, loads and stores.
    """

    registers: int
    smem_bytes: int
    spill_bytes: float = 0.0


Usages = Sequence[Usage]
"""Of each pass of a candidate."""


def expected_usage(needs: KernelNeeds, spec: ArchSpec) -> Usage:
    """The resources that a kernel should take, before it is built.

    A value that finds no register under the launch bound is stored and loaded once a step.
    """
    missing = max(0, least_registers(needs) - register_cap(needs, spec))
    return Usage(
        registers=registers_per_thread(needs, spec),
        smem_bytes=needs.smem_bytes,
        spill_bytes=8.0 * missing,
    )


def reported_usage(needs: KernelNeeds, report: Counts, fit: Coefficients) -> Usage:
    """The resources that a kernel takes by its compiler's report."""
    spilled = report.spill_store_bytes + report.spill_load_bytes
    share = fit.spill_share_outside_loops if report.loop_spills is False else 1.0
    return Usage(
        registers=report.registers,
        smem_bytes=needs.smem_bytes + report.static_smem_bytes,
        spill_bytes=spilled * share,
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted time and where it goes.

    Attributes:
        us: time of all kernels in microseconds, launches included; infinite when no CTA of one fits an SM.
        limiter: the largest of ``terms``, without its unit: ``tensor``, ``smem``, ``exp``, ``alu``, ``issue``, ``l2``,
            ``hbm``, ``exposed``, ``latency``, ``chain``, ``spill``, ``cta``, ``imbalance``, ``auxiliary``, ``launch``;
            or ``residency``.
        terms: microseconds by cause. The first seven are each unit's busy time, of which the largest counts; the others
            are added to it. Of several kernels, the sums.
        occupancy: resident CTAs per SM, as far as the grid fills them; of several kernels, the longest one's.
        waves: CTA tiles over resident slots; likewise.
    """

    us: float
    limiter: str
    terms: dict[str, float]
    occupancy: int
    waves: float


def limiter_of(terms: dict[str, float]) -> str:
    """The largest term's name, without its unit."""
    return max(terms, key=lambda name: terms[name]).removesuffix("_us")
