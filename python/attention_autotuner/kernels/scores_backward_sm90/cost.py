"""The time of a backward candidate over scores of family ``sm90``: its passes, and the preprocess of row values."""

from __future__ import annotations

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.coefficients import Coefficients
from ..shared.engine import AuxiliaryWork, TileList, in_sequence
from ..shared.estimates import Estimate, Usage, Usages
from ..shared.schedule import tiles_of
from ..shared.tile_costs import ELEMENT_BYTES
from ..shared.wgmma_cost import mma_clk, once_bytes, predict_steps
from .knobs import knobs_of
from .resources import Sm90PassShape, shapes

PREPROCESS_BYTES = 12  # of a row: r in, its base and shift out


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a backward candidate: its passes, and the preprocess of row values before them."""
    passes = [
        _predict_pass(problem, shape, spec, usage, fit)
        for shape, usage in zip(shapes(candidate), usages, strict=True)
    ]
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    preprocess = AuxiliaryWork.through_memory([rows * PREPROCESS_BYTES], spec)
    return in_sequence(passes, preprocess, spec)


def _predict_pass(
    problem: Problem, shape: Sm90PassShape, spec: ArchSpec, usage: Usage, fit: Coefficients
) -> Estimate:
    """The time of one pass; infinite where an SM does not hold it, or has no WGMMA."""
    knobs = shape.knobs
    by_queries = shape.result == "dq"
    group = 1 if by_queries else problem.heads_q // problem.heads_kv
    steps = tiles_of(
        problem, block=knobs.block_rows, step=knobs.step_columns, by_queries=by_queries
    )
    tiles = TileList(
        steps=tuple(group * count for count in steps),
        heads=problem.batch * (problem.heads_q if by_queries else problem.heads_kv),
        batches=problem.batch,
        slices=knobs.slices,
        longest_first=knobs_of(shape.candidate).cta_order == "longest_first",
    )
    scores = knobs.block_rows * knobs.block_columns
    streamed = knobs.block_columns * shape.depth + knobs.step_columns * shape.columns  # elements
    return predict_steps(
        tiles,
        spec,
        usage,
        fit,
        threads=knobs.num_threads,
        mma_clk=mma_clk(knobs.block_rows * streamed, spec) / fit.wgmma_efficiency,
        exposed_clk=fit.wgmma_score_clk * scores + fit.wgmma_step_clk,
        block_clk=fit.wgmma_tile_clk,
        moved_bytes=ELEMENT_BYTES * (streamed + scores),
        once=once_bytes(problem),
        overlap_loss=fit.wgmma_overlap_loss,
    )
