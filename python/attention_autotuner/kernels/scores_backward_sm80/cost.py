"""The work of a backward candidate, counted for the cost model: its passes, and what comes before and after them.

The preprocess reads O and its gradient once for LSE and delta, and clears the sums of dQ where the plan has them;
conversion reads those and writes dQ. Both are bound by device memory.
"""

from __future__ import annotations

from functools import lru_cache

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared.coefficients import Coefficients
from ..shared.engine import AuxiliaryWork, in_sequence
from ..shared.estimates import Estimate, Usage, Usages
from ..shared.kernel_cost import KernelWork, predict_kernel, reductions, with_score_mod
from ..shared.schedule import tiles_of
from ..shared.tile_costs import STORE_BYTES, WARP, StepCounts
from . import resources
from .knobs import knobs_of
from .resources import LSE_DELTA_BYTES, KeyShape, PassShape, RowShape

VECTOR_BYTES = 16 * WARP  # a warp's 16-byte stores, and its four-float additions


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of all kernels of a candidate, one after the other."""
    longest_first = knobs_of(candidate).cta_order == "longest_first"
    shares = resources.shares_of_group(problem, candidate)
    passes = [
        _pass_time(problem, shape, candidate.copy_bytes, longest_first, shares, spec, usage, fit)
        for shape, usage in zip(resources.shapes(candidate), usages, strict=True)
    ]
    one_pass = knobs_of(candidate).plan == "one_pass"
    auxiliary = _auxiliary_bytes(problem, one_pass=one_pass, shares=shares)
    return in_sequence(passes, AuxiliaryWork.through_memory(auxiliary, spec), spec)


def _auxiliary_bytes(problem: Problem, *, one_pass: bool, shares: int) -> tuple[int, ...]:
    """Bytes through device memory of each kernel around the passes: the preprocess, and what adds sums up."""
    batch, rows, _ = problem.extents
    rows *= batch * problem.heads_q
    sums = rows * problem.padded_dim_qk * FP32_BYTES
    # O, its gradient, the LSE and its gradient; out come LSE and delta. Retnet reads r alone.
    read = 2 * problem.dim_v * ELEMENT_BYTES if problem.score == "softmax" else 0
    preprocess = rows * (read + 2 * LSE_DELTA_BYTES)
    between = reductions(problem, shares)
    if not one_pass:
        return preprocess, *between
    return preprocess + sums, *between, sums + rows * problem.dim_qk * ELEMENT_BYTES


@lru_cache(maxsize=8192)
def _pass_time(
    problem: Problem,
    shape: PassShape,
    copy_bytes: int,
    longest_first: bool,
    shares: int,
    spec: ArchSpec,
    usage: Usage,
    fit: Coefficients,
) -> Estimate:
    """The time of one pass; plans share passes, so most are asked for many times."""
    work = work_of(problem, shape, copy_bytes, spec, longest_first=longest_first, shares=shares)
    work = with_score_mod(work, problem, fit)
    return predict_kernel(work, spec, usage, fit)


def key_step(shape: KeyShape, copy_bytes: int, spec: ArchSpec) -> StepCounts:
    """One tile of queries of a key pass."""
    m, n, pairs = shape.knobs.block_m, shape.knobs.block_n, shape.knobs.warp_pairs
    qk, v, rows = shape.padded_dim_qk, shape.padded_dim_v, shape.rows_per_warp
    scores = m * n * ELEMENT_BYTES
    # Of a pair: K and Q for S, V and dO for dP, dO for dV, Q for dK; and all P, from one warp to the other.
    first = shape.knobs.query_subtiles * rows + m
    reads = pairs * (first * (qk + v) + m * (v + qk)) * ELEMENT_BYTES + scores
    writes, instructions = scores, scores / VECTOR_BYTES
    if shape.knobs.num_stages > 2:
        reads += scores  # dS again, for the dK that waited
    if shape.stores_ds:
        writes += scores
        instructions += scores / STORE_BYTES
    staged = shape.knobs.num_stages > 1
    sum_bytes, lookahead = 0, 1.0 if staged else 0.0
    if shape.one_pass:
        along_rows, along_columns = resources.dq_split(shape)
        reads += along_rows * along_columns * n * sum(resources.dq_tile(shape)) * ELEMENT_BYTES
        sum_bytes = m * qk * FP32_BYTES
        # From compute capability 9.0 on, four floats are added at once.
        vectorized = spec.compute_capability >= (9, 0)
        instructions += sum_bytes / (VECTOR_BYTES if vectorized else STORE_BYTES)
        if not staged:
            # The next tile loads while dQ is computed.
            lookahead = qk / resources.flops_per_score(shape)
    return StepCounts(
        flops=2 * m * n * resources.flops_per_score(shape),
        reads=reads,
        writes=writes,
        fill_bytes=m * ((qk + v) * ELEMENT_BYTES + LSE_DELTA_BYTES),
        copy_bytes=copy_bytes,
        sum_bytes=sum_bytes,
        scores=m * n,
        warps=2 * pairs,
        other_instructions=instructions,
        barriers=1 if staged else 2,
        waits=1,
        lookahead=lookahead,
    )


def row_step(shape: RowShape, copy_bytes: int, *, scored: bool = True) -> StepCounts:
    """One tile of keys (for dQ) or of queries (for dK and dV) of a row pass, which may do without S."""
    knobs = shape.knobs
    rows, columns = knobs.block_rows // knobs.warps, knobs.block_columns // knobs.column_warps
    unscored = 0 if scored else shape.padded_dim_qk
    inner = shape.resident_columns - unscored
    of_warp = (rows + columns) * inner + columns * shape.result_columns
    warps = knobs.warps * knobs.column_warps
    row_values = 0 if shape.name == "dq" else LSE_DELTA_BYTES
    row_bytes = (shape.padded_dim_qk + shape.other_columns) * ELEMENT_BYTES + row_values
    scores = knobs.block_rows * knobs.block_columns
    staged = knobs.num_stages > 1
    return StepCounts(
        flops=2 * scores * (inner + shape.result_columns),
        reads=warps * of_warp * ELEMENT_BYTES,
        writes=0,
        fill_bytes=knobs.block_columns * row_bytes,
        copy_bytes=copy_bytes,
        scores=scores,
        warps=warps,
        barriers=1 if staged else 2,
        waits=1,
        lookahead=1.0 if staged else 0.0,
    )


def work_of(
    problem: Problem,
    shape: PassShape,
    copy_bytes: int,
    spec: ArchSpec,
    *,
    longest_first: bool,
    shares: int = 1,
) -> KernelWork:
    """All that a pass has to do for a problem, where ``shares`` CTAs share a block of keys."""
    if isinstance(shape, KeyShape):
        counts = key_step(shape, copy_bytes, spec)
        step, slices = shape.knobs.block_m, 1
        outer_columns = 2 * (shape.padded_dim_qk + shape.padded_dim_v)  # K, V and their gradients
    else:
        # The gradient of a score is that of the modified score times the mask: dQ and dK need no S, but through r.
        scored = problem.score == "softmax" or not shape.needs_dp
        counts = row_step(shape, copy_bytes, scored=scored)
        step, slices = shape.knobs.block_columns, shape.knobs.slices
        outer_columns = shape.resident_columns + shape.result_columns
    by_queries = shape.name == "dq"
    steps = tiles_of(problem, block=shape.block, step=step, by_queries=by_queries)
    group = problem.heads_q // problem.heads_kv
    batch, rows_q, rows_k = problem.extents
    heads_kv = batch * problem.heads_kv
    row_bytes = ELEMENT_BYTES * (problem.dim_qk + problem.dim_v)  # of K and V, or of Q and dO
    if by_queries:
        stream_bytes = rows_k * row_bytes
    else:
        # A CTA takes the queries of all heads, or of its share of them.
        steps = tuple(group // shares * count for count in steps)
        stream_bytes = group * rows_q * (row_bytes + LSE_DELTA_BYTES)
    return KernelWork(
        counts=counts,
        steps=steps,
        heads=heads_kv * (group if by_queries else shares),
        slices=slices,
        longest_first=longest_first,
        causal=problem.causal,
        outer_bytes=shape.block * outer_columns * ELEMENT_BYTES,
        once_bytes=_once_bytes(problem, shape),
        streams=heads_kv,
        stream_bytes=stream_bytes,
    )


def _once_bytes(problem: Problem, shape: PassShape) -> int:
    """Bytes of what a pass holds and writes; of the sums of dQ, once in and once out."""
    batch, of_q, of_k = problem.extents
    rows_q, rows_k = batch * problem.heads_q * of_q, batch * problem.heads_kv * of_k
    both = ELEMENT_BYTES * (problem.dim_qk + problem.dim_v)
    if isinstance(shape, KeyShape):
        sums = 2 * rows_q * shape.padded_dim_qk * FP32_BYTES if shape.one_pass else 0
        return 2 * rows_k * both + sums
    if shape.name == "dv":
        return rows_k * both  # K in, dV out
    result = ELEMENT_BYTES * problem.dim_qk
    if shape.name == "dq":
        return rows_q * (both + result + LSE_DELTA_BYTES)
    return rows_k * (both + result)
