"""The chunkwise retention candidates of family ``sm90`` that a policy offers, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, Rejection
from ...core.problem import Problem
from ..chunks_sm80.space import ChunkPasses
from ..shared.forms import forms
from ..shared.passes import check_passes, points_of
from ..shared.sm90_tiles import SWIZZLE_COLUMNS
from .knobs import ChunkwiseSm90Knobs
from .rules import passes_of

K = TypeVar("K", bound=ChunkwiseSm90Knobs)

MIN_TOKENS = 64  # of a sequence: with less than a chunk, other forms and tiles do less
# The states of divided sequences are a pass of their own. By the cost model, over 120 shapes, it does not pay where
# CTAs of whole sequences employ so many of the SMs, or the sequences have so few tokens.
WHOLE_EMPLOYED = 0.7
WHOLE_TOKENS = 1024
# Great states of longer sequences are faster by parts than whole by 64 columns a CTA; measured on an H200.
NARROW_TOKENS, NARROW_DEPTH = 4096, 128
WHOLE_TILES = ((2, 1), (1, 1))  # of whole sequences, the most columns a CTA first


@dataclass(frozen=True, kw_only=True)
class ChunkSm90Space:
    """The values each knob may take.

    Attributes:
        tiles: (warpgroups, ctas_per_sm) pairs, the first legal one being the default's; none with columns that V lacks.
        num_stages: stages, likewise.
    """

    tiles: tuple[tuple[int, int], ...] = ((2, 1), (1, 2), (1, 1), (3, 1))
    num_stages: tuple[int, ...] = (3, 2, 4)


SPACES: dict[str, ChunkSm90Space] = {}  # by the spec's name; the others have the values above


def points(problem: Problem, spec: ArchSpec) -> Iterator[ChunkwiseSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    if not _is_taken(problem):
        return
    whole = _points(problem, SPACES.get(spec.name, ChunkSm90Space()))
    checked = points_of(problem, spec, whole, passes_of)
    yield from divided(checked, problem, problem.padded_dim_v, spec)


def divided(
    points: Iterable[K | Rejection], problem: Problem, width: int, spec: ArchSpec
) -> Iterator[K | Rejection]:
    """Points with every size of super-chunks that is worth a try, where CTAs share so many columns."""
    passes = ChunkPasses(problem, spec)
    for point in points:
        if isinstance(point, Rejection):
            yield point
            continue
        for size in passes.super_chunks(point.columns, width):
            if size % point.chunk == 0:
                yield replace(point, super_chunk=size)


def default(problem: Problem, spec: ArchSpec) -> ChunkwiseSm90Knobs | None:
    """The first legal point; None where there is none.

    Its super-chunks employ most SMs, where whole sequences do not: with fewer columns a CTA, perhaps.
    """
    if not _is_taken(problem):
        return None
    space = SPACES.get(spec.name, ChunkSm90Space())
    passes = ChunkPasses(problem, spec)
    for knobs in _points(problem, space):
        size = passes.default_super_chunk(knobs.columns, problem.padded_dim_v)
        whole: Iterable[ChunkwiseSm90Knobs] = _whole(passes, problem, space, spec) if size else ()
        for chosen in (*whole, replace(knobs, super_chunk=size)):
            if check_passes(Candidate.of(problem, chosen), passes_of, spec) is None:
                return chosen
    return None


def _whole(
    passes: ChunkPasses, problem: Problem, space: ChunkSm90Space, spec: ArchSpec
) -> Iterator[ChunkwiseSm90Knobs]:
    """Points that need no super-chunks."""
    small = min(problem.padded_dim_qk, problem.padded_dim_v) <= NARROW_DEPTH
    narrow = small or problem.seqlen_q <= NARROW_TOKENS
    tiles = tuple(x for x in WHOLE_TILES if x in space.tiles and (narrow or x[0] > 1))
    for knobs in _points(problem, replace(space, tiles=tiles)):
        if suits_whole(knobs, passes.ctas(knobs.columns, problem.padded_dim_v), problem, spec):
            yield knobs


def suits_whole(knobs: ChunkwiseSm90Knobs, ctas: int, problem: Problem, spec: ArchSpec) -> bool:
    """True where sequences had better stay whole, which makes so many CTAs."""
    short = problem.seqlen_q <= WHOLE_TOKENS and knobs.warpgroups == 1
    return short or ctas >= WHOLE_EMPLOYED * spec.num_sms


def _is_taken(problem: Problem) -> bool:
    return "chunkwise" in forms(problem) and problem.seqlen_q >= MIN_TOKENS


def _points(problem: Problem, space: ChunkSm90Space) -> Iterator[ChunkwiseSm90Knobs]:
    return undivided(ChunkwiseSm90Knobs, problem.padded_dim_v, space)


def undivided(kind: type[K], columns: int, space: ChunkSm90Space) -> Iterator[K]:
    """Knobs without super-chunks, none with columns that the widest result lacks."""
    most = -(-columns // SWIZZLE_COLUMNS)
    for (groups, ctas), stages in product(space.tiles, space.num_stages):
        if groups <= most:
            yield kind(warpgroups=groups, num_stages=stages, ctas_per_sm=ctas)
