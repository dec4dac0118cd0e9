"""The work of retention's passes over chunks, counted for the cost model.

A plan's passes run one after the other, each at the cost of :mod:`.walk_costs`. Before them come, where the plan has
them, the states of super-chunks and the scores of all chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usage, limiter_of
from ..shared.tile_costs import ELEMENT_BYTES
from ..shared.workspace import pieces_of
from .knobs import ChunkPass, knobs_of
from .pass_cost import STATE_BYTES, Walk, walk_time

MAX_DEPTH_WARPS = 4
SCORES_EFFICIENCY = 0.5  # of the tensor rate, in the kernel that only computes scores
BESIDE_BANDWIDTH = 0.7  # of the peak, that kernels beside the passes reach


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What runs beside the passes and is bound by device memory or the tensor cores alone.

    Attributes:
        kernels: how many kernels.
        us: their time without launches, microseconds.
    """

    kernels: int = 0
    us: float = 0.0

    def plus(self, num_bytes: float, spec: ArchSpec, *, flops: float = 0.0) -> Beside:
        """One kernel more."""
        memory = num_bytes * 1e6 / (BESIDE_BANDWIDTH * spec.hbm_bytes_per_second)
        rate = spec.mma_flops_per_clk_per_sm * spec.num_sms * spec.sm_clock_mhz
        return Beside(
            kernels=self.kernels + 1,
            us=self.us + max(memory, flops / (rate * SCORES_EFFICIENCY)),
        )


def predict(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    usages: Sequence[Usage],
    fit: Coefficients,
) -> Estimate:
    """The time of a candidate's kernels; ``usages`` of its passes."""
    knobs = knobs_of(candidate)
    passes = {
        name: (one, usage) for (name, one), usage in zip(knobs.passes.items(), usages, strict=True)
    }
    return _plan(problem, candidate, knobs.chunk, knobs.super_chunk, passes, spec, fit)


def _plan(
    problem: Problem,
    candidate: Candidate,
    chunk: int,
    super_chunk: int,
    passes: dict[str, tuple[ChunkPass, Usage]],
    spec: ArchSpec,
    fit: Coefficients,
) -> Estimate:
    """All kernels of a plan, one after the other."""
    heads, tokens = problem.batch * problem.heads_q, problem.seqlen_q
    split = 0 < super_chunk < tokens
    states = STATE_BYTES * heads * problem.dim_qk * problem.dim_v
    walks: list[tuple[Walk, Usage]] = []
    beside = Beside()
    scored: set[int] = set()
    for name, (knobs, usage) in passes.items():
        over_values = name in ("output", "dv")  # its CTAs slice dim_v, else dim_qk
        qk, v = candidate.class_qk, candidate.class_v
        walk = Walk(
            knobs=knobs,
            chunk=chunk,
            depth=qk if over_values else v,
            width=v if over_values else qk,
            gradient=name != "output",
            heads=heads,
            tokens=tokens,
            stretch=super_chunk if split else tokens,
            copy_bytes=candidate.copy_bytes,
        )
        walks.append((walk, usage))
        if split and name != "dk":  # dk starts from the states that dv does
            summing = _summing(walk)
            walks.append((summing, usage))
            beside = beside.plus(4 * states * summing.stretches, spec)  # written, scanned, read
        if knobs.scores == "given" and walk.depth not in scored:
            scored.add(walk.depth)
            rows = heads * tokens
            beside = beside.plus(
                ELEMENT_BYTES * rows * (2 * walk.depth + chunk),
                spec,
                flops=2.0 * rows * chunk * walk.depth,
            )
        if name in ("dk", "dv") and problem.heads_q > problem.heads_kv:
            beside = beside.plus(2 * STATE_BYTES * heads * tokens * walk.width, spec)
    if problem.decodes:
        beside = Beside(kernels=beside.kernels, us=beside.us).plus(2 * states, spec)
    return total([walk_time(walk, spec, usage, fit) for walk, usage in walks], beside, spec)


def _summing(walk: Walk) -> Walk:
    """The walk that only sums states, of all stretches but the last, in pieces where CTAs are few.

    Its warps take twice the columns and half the depth where they can, as ``StatesPass`` in the traits says.
    """
    knobs = walk.knobs
    ctas = walk.heads * walk.slices * (walk.stretches - 1)
    pieces = pieces_of(walk.stretch, walk.chunk, ctas)
    deep = 32 * knobs.depth_warps
    if (
        knobs.columns == 16 * knobs.column_warps
        and knobs.column_warps % 2 == 0
        and knobs.depth_warps < MAX_DEPTH_WARPS
        and walk.depth % deep == 0
        and walk.chunk % deep == 0
    ):
        knobs = replace(
            knobs, column_warps=knobs.column_warps // 2, depth_warps=2 * knobs.depth_warps
        )
    return replace(
        walk,
        knobs=knobs,
        states_only=True,
        gradient=False,
        tokens=walk.stretch * (walk.stretches - 1),
        stretch=walk.stretch // pieces,
    )


def total(parts: Sequence[Estimate], beside: Beside, spec: ArchSpec) -> Estimate:
    """Kernels one after the other, and what runs beside them."""
    longest = max(parts, key=lambda found: found.us)
    if not longest.terms:
        return longest
    names = dict.fromkeys(name for part in parts for name in part.terms)
    terms = {name: sum(part.terms.get(name, 0.0) for part in parts) for name in names}
    launches = beside.kernels * spec.launch_overhead_us
    terms["launch_us"] += launches
    terms["edges_us"] = beside.us
    return Estimate(
        us=sum(part.us for part in parts) + beside.us + launches,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=longest.occupancy,
        waves=longest.waves,
    )
