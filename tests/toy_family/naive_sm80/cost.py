"""The time of a toy candidate: a multiply-add at a time, or its bytes through L2."""

from __future__ import annotations

from math import inf

from attention_autotuner.arch import occupancy
from attention_autotuner.arch.spec import ArchSpec
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.shared.coefficients import Coefficients
from attention_autotuner.kernels.shared.estimates import Estimate, Usage, limiter_of

from .knobs import knobs_of
from .resources import LANES

ELEMENT_BYTES = 2
CONVERSIONS = 2  # instructions beside a multiply-add: both operands become fp32


def predict(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    usages: tuple[Usage, ...],
    fit: Coefficients,
) -> Estimate:
    """The time of a candidate; infinite where an SM does not hold its CTA."""
    knobs = knobs_of(candidate)
    (usage,) = usages
    resident = occupancy.occupancy(
        spec,
        threads=knobs.num_threads,
        registers=usage.registers,
        smem_bytes=usage.smem_bytes,
    )
    if resident < 1:
        return Estimate(us=inf, limiter="residency", terms={}, occupancy=0, waves=inf)
    heads = problem.batch * problem.heads_q
    ctas = heads * -(-problem.seqlen_q // knobs.warps)
    resident = min(resident, -(-ctas // spec.num_sms))
    waves = ctas / (resident * spec.num_sms)
    to_us = 1 / spec.sm_clock_mhz
    keys = -(-problem.seqlen_k // LANES) * LANES
    pairs = heads * problem.seqlen_q * keys // (2 if problem.causal else 1)
    width = problem.dim_qk + candidate.padded_dim_v
    lanes = spec.num_sms * spec.fp32_lanes_per_clk_per_sm
    terms = {
        "alu_us": (1 + CONVERSIONS) * pairs * width / lanes * to_us,
        "l2_us": ELEMENT_BYTES * pairs * width / knobs.warps / spec.l2_bytes_per_clk * to_us,
        "cta_us": waves * fit.cta_clk * to_us,
        "launch_us": spec.launch_overhead_us,
    }
    busy = max(terms["alu_us"], terms["l2_us"])
    return Estimate(
        us=busy + terms["cta_us"] + terms["launch_us"],
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=resident,
        waves=waves,
    )
