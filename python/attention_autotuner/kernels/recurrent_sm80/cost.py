"""The work of retention's recurrent form, counted for the cost model: a state through device memory, tokens in turn."""

from __future__ import annotations

from math import inf

from ...arch import occupancy
from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usage, limiter_of
from ..shared.tile_costs import ELEMENT_BYTES
from .knobs import knobs_of

STATE_BYTES = 4
TOKEN_INSTRUCTIONS = (
    3.0  # fp32 instructions for an element of the state: decayed, added to, summed up
)
TOKEN_CLK = (
    500.0  # of a token beside these: k, q and v from shared memory, the sum over warps, a barrier
)
BANDWIDTH_SHARE = 0.9  # of the peak, that states read and written once reach
BYTES_TO_FILL = 49152  # of states in flight on an SM, that keep its share of the memory busy


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
    slices = -(-candidate.class_v // knobs.columns)
    ctas = heads * slices
    resident = min(resident, -(-ctas // spec.num_sms))
    slots, to_us = resident * spec.num_sms, 1 / spec.sm_clock_mhz
    lanes = spec.fp32_lanes_per_clk_per_sm
    busy = TOKEN_INSTRUCTIONS * candidate.class_qk * knobs.columns / lanes
    spill = fit.spill_clk_per_byte * usage.spill_bytes * knobs.num_threads / 4096
    token_clk = max(resident * (busy + spill), busy + spill + TOKEN_CLK)
    waves = -(-ctas // slots)
    chain_us = waves * (problem.seqlen_q * token_clk + fit.cta_clk) * to_us

    rows = heads * problem.seqlen_q * (problem.dim_qk + problem.dim_v) * 2 * ELEMENT_BYTES
    states = 2 * STATE_BYTES * heads * problem.dim_qk * problem.dim_v if problem.decodes else 0
    in_flight = ctas / (waves * spec.num_sms) * knobs.columns * candidate.class_qk * STATE_BYTES
    share = BANDWIDTH_SHARE * min(1.0, in_flight / BYTES_TO_FILL)
    hbm_us = (rows + states) * 1e6 / (spec.hbm_bytes_per_second * share)
    # Every slice reads all of q and k again, out of L2.
    again = slices * heads * problem.seqlen_q * problem.dim_qk * 2 * ELEMENT_BYTES
    l2_us = again / spec.l2_bytes_per_clk * to_us
    memory = max(hbm_us, l2_us)
    us = max(chain_us, memory) + fit.memory_overlap_loss * min(chain_us, memory)
    terms = {
        "alu_us": waves * problem.seqlen_q * resident * busy * to_us,
        "chain_us": chain_us,
        "hbm_us": hbm_us,
        "l2_us": l2_us,
        "launch_us": spec.launch_overhead_us,
    }
    return Estimate(
        us=us + spec.launch_overhead_us,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=resident,
        waves=ctas / slots,
    )
