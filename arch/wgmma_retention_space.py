"""The chunkwise retention candidates of family ``sm90`` that a policy offers, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..codegen.candidate import Candidate
from ..codegen.problem import Problem
from ..codegen.retention_knobs import WgmmaChunkwiseKnobs
from .chunkwise_space import ChunkPasses, ChunkSpace
from .legality import Rejection, check
from .spec import ArchSpec
from .wgmma_resources import SWIZZLE_COLUMNS

MIN_TOKENS = 64  # of a sequence: with less than a chunk, other forms and tiles do less
# The states of divided sequences are a pass of their own. By the cost model, over 120 shapes, it does not pay where
# CTAs of whole sequences employ so many of the SMs, or the sequences have so few tokens.
WHOLE_EMPLOYED = 0.7
WHOLE_TOKENS = 1024
WHOLE_TILES = ((2, 1), (1, 1))  # of whole sequences, the most columns a CTA first


@dataclass(frozen=True, kw_only=True)
class WgmmaChunkSpace:
    """The values each knob may take.

    Attributes:
        tiles: (warpgroups, ctas_per_sm) pairs, the first legal one being the default's; none with columns that V lacks.
        num_stages: stages, likewise.
    """

    tiles: tuple[tuple[int, int], ...] = ((2, 1), (1, 2), (1, 1), (3, 1))
    num_stages: tuple[int, ...] = (3, 2, 4)


def offered(
    problem: Problem, space: WgmmaChunkSpace, chunks: ChunkSpace, spec: ArchSpec
) -> list[Candidate | Rejection]:
    """Every point of the space, as a candidate or as the rejection that says why not."""
    if not _is_taken(problem):
        return []
    passes = ChunkPasses(problem, chunks, spec)
    found: list[Candidate | Rejection] = []
    for knobs in _points(problem, space):
        whole = Candidate.of(problem, "sm90", knobs)
        rejection = check(whole, spec)
        if rejection is not None:
            found.append(rejection)
            continue
        found += [
            replace(whole, knobs=replace(knobs, super_chunk=size))
            for size in passes.super_chunks(knobs.columns, problem.class_v)
            if size % knobs.chunk == 0
        ]
    return found


def preferred(
    problem: Problem, space: WgmmaChunkSpace, chunks: ChunkSpace, spec: ArchSpec
) -> Candidate | None:
    """The first legal point; None where there is none.

    Its super-chunks employ most SMs, where whole sequences do not: with fewer columns a CTA, perhaps.
    """
    if not _is_taken(problem):
        return None
    passes = ChunkPasses(problem, chunks, spec)
    for knobs in _points(problem, space):
        size = passes.default_super_chunk(knobs.columns, problem.class_v)
        whole = _whole(passes, problem, space, spec) if size else ()
        for found in (*whole, replace(knobs, super_chunk=size)):
            candidate = Candidate.of(problem, "sm90", found)
            if check(candidate, spec) is None:
                return candidate
    return None


def _whole(
    passes: ChunkPasses, problem: Problem, space: WgmmaChunkSpace, spec: ArchSpec
) -> Iterator[WgmmaChunkwiseKnobs]:
    """Points that need no super-chunks."""
    tiles = tuple(tile for tile in WHOLE_TILES if tile in space.tiles)
    for knobs in _points(problem, replace(space, tiles=tiles)):
        short = problem.seqlen_q <= WHOLE_TOKENS and knobs.warpgroups == 1
        ctas = passes.ctas(knobs.columns, problem.class_v)
        if short or ctas >= WHOLE_EMPLOYED * spec.num_sms:
            yield knobs


def _is_taken(problem: Problem) -> bool:
    forms = (problem.op, problem.direction) == ("retention", "forward")
    return forms and problem.form in ("auto", "chunkwise") and problem.seqlen_q >= MIN_TOKENS


def _points(problem: Problem, space: WgmmaChunkSpace) -> Iterator[WgmmaChunkwiseKnobs]:
    """Knobs without super-chunks."""
    most = -(-problem.class_v // SWIZZLE_COLUMNS)
    for (groups, ctas), stages in product(space.tiles, space.num_stages):
        if groups <= most:
            yield WgmmaChunkwiseKnobs(warpgroups=groups, num_stages=stages, ctas_per_sm=ctas)
