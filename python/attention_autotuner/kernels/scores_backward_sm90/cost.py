"""The time of a backward candidate over scores of family ``sm90``: its passes, and the preprocess of row values."""

from __future__ import annotations

from dataclasses import replace

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES
from ..shared.coefficients import Coefficients
from ..shared.engine import AuxiliaryWork, TileList, in_sequence
from ..shared.estimates import Estimate, Usage, Usages
from ..shared.schedule import tiles_of
from ..shared.wgmma_cost import NEIGHBOURS_L2_GAIN, mma_clk, once_bytes, predict_steps
from .knobs import knobs_of
from .resources import PassShape, ScoreBands, StoredPassShape, shapes

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
    auxiliary = AuxiliaryWork.through_memory([rows * PREPROCESS_BYTES], spec)
    if knobs_of(candidate).stored_dk is not None:
        more = 2 * (ScoreBands.of(problem, candidate).count - 1)
        auxiliary = replace(auxiliary, kernels=auxiliary.kernels + more)
    return in_sequence(passes, auxiliary, spec)


def _predict_pass(
    problem: Problem, shape: PassShape, spec: ArchSpec, usage: Usage, fit: Coefficients
) -> Estimate:
    """The time of one pass; infinite where an SM does not hold it, or has no WGMMA."""
    knobs = shape.knobs
    scores = knobs.block_rows * knobs.block_columns
    if isinstance(shape, StoredPassShape):  # it multiplies scores, and computes none
        products, exposed_clk = scores * shape.columns, 0.0
        moved = int(ELEMENT_BYTES * shape.stage_elements / NEIGHBOURS_L2_GAIN)
        once = _stored_bytes(problem)
    else:
        streamed = knobs.block_columns * shape.depth + knobs.step_columns * shape.columns
        products = knobs.block_rows * streamed
        exposed_clk = fit.wgmma_score_clk * scores + fit.wgmma_step_clk
        stores = shape.result == "dq" and knobs_of(shape.candidate).stored_dk is not None
        moved = ELEMENT_BYTES * (streamed + (2 if stores else 1) * scores)
        once = once_bytes(problem) + (_stored_bytes(problem) if stores else 0)
    return predict_steps(
        _tiles_of(problem, shape),
        spec,
        usage,
        fit,
        threads=knobs.num_threads,
        mma_clk=mma_clk(products, spec) / fit.wgmma_efficiency,
        exposed_clk=exposed_clk,
        block_clk=fit.wgmma_tile_clk,
        moved_bytes=moved,
        once=once,
        overlap_loss=fit.wgmma_overlap_loss,
    )


def _tiles_of(problem: Problem, shape: PassShape) -> TileList:
    """The tiles of a pass, those of dK and dV over the query heads of a group."""
    knobs = shape.knobs
    by_queries = shape.result == "dq"
    group = 1 if by_queries else problem.heads_q // problem.heads_kv
    steps = tiles_of(
        problem, block=knobs.block_rows, step=knobs.step_columns, by_queries=by_queries
    )
    return TileList(
        steps=tuple(group * count for count in steps),
        heads=problem.batch * (problem.heads_q if by_queries else problem.heads_kv),
        batches=problem.batch,
        slices=knobs.slices,
        longest_first=knobs_of(shape.candidate).cta_order == "longest_first",
    )


def _stored_bytes(problem: Problem) -> int:
    """Bytes of the scores of all heads and batches."""
    heads = problem.batch * problem.heads_q
    return ELEMENT_BYTES * heads * problem.seqlen_q * problem.seqlen_k
