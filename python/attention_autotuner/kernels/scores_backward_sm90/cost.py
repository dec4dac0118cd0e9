"""The time of a backward candidate over scores of family ``sm90``: its passes, and the row values before them."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usage, limiter_of
from ..shared.schedule import tiles_of
from ..shared.wgmma_cost import TILE_CLK, Sm90Work, once_bytes, predict_warpgroups
from .knobs import knobs_of
from .resources import Sm90PassShape, shapes

STATISTICS_BYTES = 12  # of a row: r in, its base and shift out


def predict(
    problem: Problem,
    candidate: Candidate,
    spec: ArchSpec,
    usages: tuple[Usage, ...],
    fit: Coefficients,
) -> Estimate:
    """The time of a backward candidate: its passes, and the statistics of rows before them."""
    passes = [
        predict_warpgroups(problem, _work_of_pass(problem, shape), spec, usage)
        for shape, usage in zip(shapes(candidate), usages, strict=True)
    ]
    longest = max(passes, key=lambda found: found.us)
    if not longest.terms:
        return longest
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    edges_us = rows * STATISTICS_BYTES * 1e6 / spec.hbm_bytes_per_second
    terms = {name: sum(found.terms[name] for found in passes) for name in longest.terms}
    terms["launch_us"] += spec.launch_overhead_us
    terms["edges_us"] = edges_us
    return Estimate(
        us=sum(found.us for found in passes) + edges_us + spec.launch_overhead_us,
        limiter=limiter_of(terms),
        terms=terms,
        occupancy=longest.occupancy,
        waves=longest.waves,
    )


def _work_of_pass(problem: Problem, shape: Sm90PassShape) -> Sm90Work:
    knobs = shape.knobs
    by_queries = shape.result == "dq"
    group = 1 if by_queries else problem.heads_q // problem.heads_kv
    steps = tiles_of(
        problem, block=knobs.block_rows, step=knobs.block_columns, by_queries=by_queries
    )
    whole = knobs_of(shape.candidate)
    return Sm90Work(
        steps=tuple(group * each for each in steps),
        heads=problem.heads_q if by_queries else problem.heads_kv,
        slices=knobs.slices,
        heads_first=whole.cta_order == "heads_first",
        threads=knobs.num_threads,
        scores=knobs.block_rows * knobs.block_columns,
        columns=shape.depth + shape.columns,
        moved_rows=knobs.block_columns,
        buffered=knobs.num_stages > 1 or knobs.parts > 1,
        block_clk=TILE_CLK,
        once_bytes=once_bytes(problem),
    )
