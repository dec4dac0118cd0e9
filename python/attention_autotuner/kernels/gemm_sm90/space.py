"""The candidates that a policy offers, in a fixed order, and those that serve without tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...arch.spec import ArchSpec
from ...core.candidate import Rejection
from ...core.problem import Problem
from ..shared.passes import first_legal, points_of
from .knobs import USUAL_ROW_BLOCKS, GemmSm90Knobs, Output, Schedule
from .resources import BLOCK_K, smem_bytes
from .rules import passes_of

TILES: tuple[tuple[Schedule, int, int], ...] = (
    ("cooperative", 128, 256),
    ("cooperative", 256, 128),
    ("cooperative", 128, 192),
    ("cooperative", 128, 128),
    ("ping_pong", 64, 256),
    ("ping_pong", 128, 128),
    ("ping_pong", 64, 192),
    ("ping_pong", 64, 128),
    ("ping_pong", 64, 64),
)
OUTPUTS: tuple[Output, ...] = ("tma", "direct")
CLUSTERS = (1, 2)
SPLITS = (2, 4, 8)
ROW_BLOCKS = (USUAL_ROW_BLOCKS, 2 * USUAL_ROW_BLOCKS)
MAX_STAGES = 8
LEAST_STEPS = 8  # of one split
FEW_ROWS = 64
NARROW_COLUMNS = 64


def points(problem: Problem, spec: ArchSpec) -> Iterator[GemmSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    return points_of(problem, spec, _space(problem, spec), passes_of)


def default(problem: Problem, spec: ArchSpec) -> GemmSm90Knobs | None:
    """The first legal point without a cluster; for few rows, smaller tiles with splits that fill the GPU once.

    Few rows take tiles so narrow that they need no splits, where that employs most SMs: splits need a second kernel,
    with which 64 x 8192 x 8192 takes 19 % longer.
    """
    space = [
        x
        for x in _space(problem, spec)
        if (x.cluster, x.output, x.row_blocks) == (1, "tma", USUAL_ROW_BLOCKS)
        and (x.splits == 1 or x.splits * _tiles(problem, x) <= spec.num_sms)
    ]
    few = problem.seqlen_q <= FEW_ROWS
    if few or 2 * _tiles(problem, space[0]) <= spec.num_sms:
        narrow = -(-problem.dim_v // NARROW_COLUMNS)  # tiles, of few rows and without splits
        columns = NARROW_COLUMNS if 0.75 <= narrow / spec.num_sms <= 1.0 else 256
        tile = ("ping_pong", FEW_ROWS, columns) if few else ("cooperative", 128, 128)
        smaller = [x for x in space if (x.schedule, x.block_m, x.block_n) == tile]
        space = [*reversed(smaller), *space]
    return first_legal(problem, spec, space, passes_of)


def _tiles(problem: Problem, knobs: GemmSm90Knobs) -> int:
    return -(-problem.seqlen_q // knobs.block_m) * -(-problem.dim_v // knobs.block_n)


def _space(problem: Problem, spec: ArchSpec) -> Iterator[GemmSm90Knobs]:
    for (schedule, block_m, block_n), output, cluster in product(TILES, OUTPUTS, CLUSTERS):
        if cluster > 1 and problem.seqlen_q <= block_m:
            continue  # the other CTA would have no rows
        knobs = GemmSm90Knobs(
            block_m=block_m,
            block_n=block_n,
            stages=2,
            schedule=schedule,
            output=output,
            cluster=cluster,
            transposed_a=problem.operands[0] == "t",
            transposed_b=problem.operands[1] == "t",
        )
        knobs = replace(knobs, stages=_most_stages(knobs, spec))
        blocks = -(-problem.seqlen_q // block_m)
        tiles, steps = _tiles(problem, knobs), -(-problem.dim_qk // BLOCK_K)
        splits = [x for x in SPLITS if tiles * x <= 2 * spec.num_sms and steps >= LEAST_STEPS * x]
        groups = [x for x in ROW_BLOCKS if x == USUAL_ROW_BLOCKS or x < 2 * blocks]
        for split, group in product((1, *splits), groups):
            yield replace(knobs, splits=split, row_blocks=group)


def _most_stages(knobs: GemmSm90Knobs, spec: ArchSpec) -> int:
    """As many stages as shared memory holds."""
    fitting = range(MAX_STAGES, 2, -1)
    return next(
        (n for n in fitting if smem_bytes(replace(knobs, stages=n)) <= spec.smem_per_block_bytes), 2
    )
