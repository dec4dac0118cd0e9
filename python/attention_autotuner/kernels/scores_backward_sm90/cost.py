"""The time of a backward candidate over scores of family ``sm90``: its passes, and the preprocess of row values."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.coefficients import Coefficients
from ..shared.engine import AuxiliaryWork, in_sequence
from ..shared.estimates import Estimate, Usages
from ..shared.schedule import tiles_of
from ..shared.wgmma_cost import Sm90Work, once_bytes, predict_warpgroups
from .knobs import knobs_of
from .resources import Sm90PassShape, shapes

PREPROCESS_BYTES = 12  # of a row: r in, its base and shift out


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a backward candidate: its passes, and the preprocess of row values before them."""
    passes = [
        predict_warpgroups(_work_of_pass(problem, shape, fit), spec, usage, fit)
        for shape, usage in zip(shapes(candidate), usages, strict=True)
    ]
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    preprocess = AuxiliaryWork.through_memory([rows * PREPROCESS_BYTES], spec)
    return in_sequence(passes, preprocess, spec)


def _work_of_pass(problem: Problem, shape: Sm90PassShape, fit: Coefficients) -> Sm90Work:
    knobs = shape.knobs
    by_queries = shape.result == "dq"
    group = 1 if by_queries else problem.heads_q // problem.heads_kv
    steps = tiles_of(
        problem, block=knobs.block_rows, step=knobs.block_columns, by_queries=by_queries
    )
    whole = knobs_of(shape.candidate)
    return Sm90Work(
        steps=tuple(group * count for count in steps),
        heads=problem.batch * (problem.heads_q if by_queries else problem.heads_kv),
        batches=problem.batch,
        slices=knobs.slices,
        longest_first=whole.cta_order == "longest_first",
        threads=knobs.num_threads,
        scores=knobs.block_rows * knobs.block_columns,
        columns=shape.depth + shape.columns,
        moved_rows=knobs.block_columns,
        buffered=knobs.num_stages > 1 or knobs.depth_slices > 1,
        block_clk=fit.wgmma_tile_clk,
        once_bytes=once_bytes(problem),
    )
