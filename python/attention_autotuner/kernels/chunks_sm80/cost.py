"""The work of retention's passes over chunks, counted for the cost model.

A plan's passes run one after the other, each at the cost of :mod:`.pass_cost`. Before them come, where the plan has
them, the states of super-chunks and the scores of all chunks.
"""

from __future__ import annotations

from dataclasses import replace

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared.coefficients import Coefficients
from ..shared.engine import AuxiliaryWork, in_sequence
from ..shared.estimates import Estimate, Usage, Usages
from ..shared.super_chunks import pieces_of
from .knobs import knobs_of
from .pass_cost import ChunkPassWork, predict_pass

MAX_DEPTH_WARPS = 4  # as StatesPass in the traits has it


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate's kernels; ``usages`` of its passes."""
    plan = knobs_of(candidate)
    chunk, super_chunk = plan.chunk, plan.super_chunk
    batch, tokens, _ = problem.extents
    heads, longest = batch * problem.heads_q, problem.seqlen_q
    lengths = tuple(rows for rows, _ in problem.lengths) if problem.packed else ()
    split = 0 < super_chunk < longest
    states = FP32_BYTES * heads * problem.dim_qk * problem.dim_v
    launches: list[tuple[ChunkPassWork, Usage]] = []
    auxiliary = AuxiliaryWork()
    scored: set[int] = set()
    for (name, knobs), usage in zip(plan.passes.items(), usages, strict=True):
        over_values = name in ("output", "dv")  # its CTAs slice dim_v, else dim_qk
        qk, v = candidate.padded_dim_qk, candidate.padded_dim_v
        work = ChunkPassWork(
            knobs=knobs,
            chunk=chunk,
            depth=qk if over_values else v,
            width=v if over_values else qk,
            gradient=name != "output",
            heads=heads,
            tokens=tokens,
            stretch=super_chunk if split else longest,
            copy_bytes=candidate.copy_bytes,
            lengths=lengths,
        )
        launches.append((work, usage))
        if split and name != "dk":  # dk starts from the states that dv does
            summing = _summing(work)
            launches.append((summing, usage))
            moved = 4 * states * summing.stretches  # written, scanned, read
            auxiliary = auxiliary.plus(moved, spec, fit)
        if knobs.scores == "precomputed" and work.depth not in scored:
            scored.add(work.depth)
            rows = heads * tokens
            auxiliary = auxiliary.plus(
                ELEMENT_BYTES * rows * (2 * work.depth + chunk),
                spec,
                fit,
                flops=2.0 * rows * chunk * work.depth,
            )
        if name in ("dk", "dv") and problem.heads_q > problem.heads_kv:
            moved = 2 * FP32_BYTES * heads * tokens * work.width
            auxiliary = auxiliary.plus(moved, spec, fit)
    if problem.decodes:
        auxiliary = auxiliary.plus(2 * states, spec, fit)
    estimates = [predict_pass(work, spec, usage, fit) for work, usage in launches]
    return in_sequence(estimates, auxiliary, spec)


def _summing(work: ChunkPassWork) -> ChunkPassWork:
    """The pass that only sums states, of all stretches but the last, in pieces where CTAs are few.

    Its warps take twice the columns and half the depth where they can, as ``StatesPass`` in the traits says.
    """
    knobs = work.knobs
    ctas = work.heads * work.slices * (work.stretches - 1)
    pieces = 1 if work.lengths else pieces_of(work.stretch, chunk=work.chunk, ctas=ctas)
    cut = (work.stretch * max(0, (length - 1) // work.stretch) for length in work.lengths)
    lengths = tuple(filter(None, cut))
    deep = 32 * knobs.depth_warps
    if (
        knobs.columns == 16 * knobs.column_warps
        and knobs.column_warps % 2 == 0
        and knobs.depth_warps < MAX_DEPTH_WARPS
        and work.depth % deep == 0
        and work.chunk % deep == 0
    ):
        knobs = replace(
            knobs, column_warps=knobs.column_warps // 2, depth_warps=2 * knobs.depth_warps
        )
    return replace(
        work,
        knobs=knobs,
        states_only=True,
        gradient=False,
        tokens=sum(lengths) if lengths else work.stretch * (work.stretches - 1),
        stretch=work.stretch // pieces,
        lengths=lengths,
    )
