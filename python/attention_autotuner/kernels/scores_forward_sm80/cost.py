"""The work of a forward candidate, counted for the cost model."""

from __future__ import annotations

from dataclasses import replace

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..chunks_sm80.pass_cost import ChunkPassWork, predict_pass
from ..shared.coefficients import Coefficients
from ..shared.engine import AuxiliaryWork, in_sequence, l2_us
from ..shared.estimates import Estimate, Usages
from ..shared.kernel_cost import KernelWork, predict_kernel, with_score_mod
from ..shared.schedule import tiles_of
from ..shared.split_kv import HBM_SHARE, packed_heads, split_bytes
from ..shared.tile_costs import STORE_BYTES, StepCounts
from ..shared.workspace import span_bytes
from . import resources as forward_resources
from .knobs import knobs_of


def step_counts(candidate: Candidate, fit: Coefficients) -> StepCounts:
    """One K/V tile of a CTA."""
    knobs = knobs_of(candidate)
    m, n, dim = knobs.block_m, knobs.block_n, candidate.padded_dim_qk
    columns = forward_resources.value_columns(candidate)

    # Every warp along the rows reads all of K and V; warps along the keys share them but each reads all of P.
    reads = knobs.warps_m * n * (dim + columns) * ELEMENT_BYTES
    if not knobs.q_in_registers:
        reads += knobs.warps_n * m * dim * ELEMENT_BYTES
    writes = 0
    if knobs.warps_n > 1:
        reads += knobs.warps_n * m * n * ELEMENT_BYTES
        writes += m * n * ELEMENT_BYTES

    slices = forward_resources.k_slices(candidate)
    if slices > 1:
        barriers, lookahead = slices + 1, min(knobs.num_stages - 1, slices)
    elif knobs.num_stages == 1:
        barriers, lookahead = 2, 1
    else:
        barriers, lookahead = 1, knobs.num_stages - 1
    if knobs.warps_n > 1:
        barriers += 2  # row maxima, then P
    warps = knobs.warps_m * knobs.warps_n
    row_tiles_per_warp = m // knobs.warps_m // 16
    return StepCounts(
        flops=2 * m * n * (dim + columns),
        reads=reads,
        writes=writes,
        fill_bytes=n * (dim + columns) * ELEMENT_BYTES,
        copy_bytes=candidate.copy_bytes,
        scores=m * n,
        warps=warps,
        other_instructions=writes / STORE_BYTES
        + warps * row_tiles_per_warp * fit.row_tile_instructions,
        sharing_warps=knobs.warps_n,
        barriers=barriers,
        waits=barriers,
        lookahead=lookahead,
        softmax_exposure=fit.ahead_exposure if knobs.qk_ahead else 1.0,
    )


def work_of(problem: Problem, candidate: Candidate, fit: Coefficients) -> KernelWork:
    """All that a candidate's kernel has to do for a problem; of retnet and retention, without the mask or decay."""
    knobs = knobs_of(candidate)
    columns = forward_resources.value_columns(candidate)
    batch, rows_q, rows_k = problem.extents
    rows_q *= batch * problem.heads_q
    heads = packed_heads(problem, knobs)
    queries = knobs.block_m // heads
    seen = tiles_of(problem, block=queries, step=knobs.block_n, by_queries=True)
    return KernelWork(
        counts=step_counts(candidate, fit),
        steps=tuple(-(-count // knobs.splits) for count in seen),
        heads=batch * problem.heads_q // heads,
        slices=knobs.v_slices * knobs.splits,
        longest_first=knobs.cta_order == "longest_first",
        persistent=knobs.persistent,
        causal=problem.causal,
        outer_bytes=knobs.block_m * (candidate.padded_dim_qk + columns) * ELEMENT_BYTES,
        once_bytes=ELEMENT_BYTES * rows_q * (problem.dim_qk + problem.dim_v),
        streams=batch * problem.heads_kv,
        stream_bytes=ELEMENT_BYTES * rows_k * (problem.dim_qk + problem.dim_v),
        hbm_share=HBM_SHARE if forward_resources.keys_stream(problem) else 1.0,
    )


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate; ``usages`` of the kernel over rows and, in retention, of the pass for the states."""
    knobs = knobs_of(candidate)
    work = with_score_mod(work_of(problem, candidate, fit), problem, fit)
    if forward_resources.keys_stream(problem):
        fit = replace(fit, load_latency_clk=fit.load_latency_clk + fit.stream_latency_clk)
    rows = predict_kernel(work, spec, usages[0], fit)
    partial = sum(split_bytes(problem, candidate.padded_dim_v, knobs))
    if kernels := bool(partial) + problem.spanned:  # what combines, and what finds spans
        moved = 2 * partial + span_bytes(problem)  # partial results are written and read
        return in_sequence([rows], AuxiliaryWork(kernels=kernels, us=l2_us(moved, spec)), spec)
    if knobs.states is None or knobs.chunk is None or not problem.decodes:
        return rows
    work_of_states = ChunkPassWork(
        knobs=knobs.states,
        chunk=knobs.chunk,
        depth=candidate.padded_dim_qk,
        width=candidate.padded_dim_v,
        states_only=True,
        heads=problem.batch * problem.heads_q,
        tokens=problem.seqlen_q,
        stretch=problem.seqlen_q,
        copy_bytes=candidate.copy_bytes,
    )
    state_bytes = FP32_BYTES * 2 * work_of_states.heads * problem.dim_qk * problem.dim_v
    auxiliary = AuxiliaryWork().plus(state_bytes, spec, fit)
    states = predict_pass(work_of_states, spec, usages[-1], fit)
    return in_sequence([rows, states], auxiliary, spec)
