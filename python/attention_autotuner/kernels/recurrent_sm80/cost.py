"""The work of retention's recurrent form, counted for the cost model: a state through device memory, tokens in turn."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared import engine
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usages
from .knobs import knobs_of


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate; infinite where an SM does not hold its CTA."""
    knobs = knobs_of(candidate)
    (usage,) = usages
    heads = problem.batch * problem.heads_q
    slices = -(-candidate.padded_dim_v // knobs.columns)
    ctas = heads * slices
    placed = engine.residency(spec, usage, threads=knobs.num_threads, ctas=ctas)
    if placed is None:
        return engine.infeasible()
    resident, to_us = placed.per_sm, 1 / spec.sm_clock_mhz
    lanes = spec.fp32_lanes_per_clk_per_sm
    busy = fit.recurrent_element_instructions * candidate.padded_dim_qk * knobs.columns / lanes
    spilled = engine.spill_clk(usage, knobs.num_threads, fit)
    token_clk = max(resident * (busy + spilled), busy + spilled + fit.recurrent_token_clk)
    waves = -(-ctas // placed.slots)
    chain_us = waves * (problem.seqlen_q * token_clk + fit.cta_clk) * to_us

    rows = heads * problem.seqlen_q * (problem.dim_qk + problem.dim_v) * 2 * ELEMENT_BYTES
    states = 2 * FP32_BYTES * heads * problem.dim_qk * problem.dim_v if problem.decodes else 0
    in_flight = ctas / (waves * spec.num_sms) * knobs.columns * candidate.padded_dim_qk * FP32_BYTES
    share = fit.recurrent_bandwidth * min(1.0, in_flight / fit.recurrent_bytes_to_fill)
    # Every slice reads all of q and k again, out of L2.
    again = slices * heads * problem.seqlen_q * problem.dim_qk * 2 * ELEMENT_BYTES
    terms = {
        "alu_us": waves * problem.seqlen_q * resident * busy * to_us,
        "chain_us": chain_us,
        "hbm_us": engine.hbm_us(rows + states, spec, share),
        "l2_us": engine.l2_us(again, spec),
    }
    return engine.launch_estimate(
        terms, chain_us, placed, spec, overlap_loss=fit.memory_overlap_loss
    )
