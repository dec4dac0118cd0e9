"""The time of a forward candidate over scores of family ``sm90``."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usages
from ..shared.schedule import tiles_of
from ..shared.wgmma_cost import Sm90Work, once_bytes, predict_warpgroups
from .resources import shape_of


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a forward candidate; infinite where an SM does not hold it, or has no WGMMA."""
    (usage,) = usages
    shape = shape_of(candidate)
    knobs = shape.knobs
    work = Sm90Work(
        steps=tiles_of(problem, block=knobs.block_m, step=knobs.block_n, by_queries=True),
        heads=problem.batch * problem.heads_q,
        batches=problem.batch,
        slices=knobs.v_slices,
        longest_first=knobs.cta_order == "longest_first",
        threads=knobs.num_threads,
        scores=knobs.block_m * knobs.block_n,
        columns=shape.depth + shape.columns,
        moved_rows=knobs.block_n,
        buffered=knobs.num_stages > 1,
        block_clk=fit.wgmma_cta_clk,
        once_bytes=once_bytes(problem),
    )
    return predict_warpgroups(work, spec, usage, fit)
