"""The chunkwise retention candidates of family ``sm90`` that a policy offers, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, log
from typing import TypeVar

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, Rejection
from ...core.problem import Problem
from ..chunks_sm80.space import ChunkPasses
from ..shared.coefficients import FITTED, Coefficients
from ..shared.estimates import Estimate, Usages, expected_usage
from ..shared.forms import forms
from ..shared.passes import PassesOf, points_of
from ..shared.sm90_tiles import SWIZZLE_COLUMNS
from . import cost
from .knobs import ChunkwiseSm90Knobs
from .rules import passes_of

K = TypeVar("K", bound=ChunkwiseSm90Knobs)

MIN_TOKENS = 64  # of a sequence: with less than a chunk, other forms and tiles do less
# Of defaults: the races behind the model had no more warpgroups, and do not tell times apart that are so near.
MAX_DEFAULT_GROUPS = 2
NEAR = 1.01
# A default serves all lengths of its bucket, of which the problem has the greatest: shares of it, and what each counts.
SERVED_SHARES = {0.6: 1 / 3, 0.9: 2 / 3}


@dataclass(frozen=True, kw_only=True)
class ChunkSm90Space:
    """The values each knob may take.

    Attributes:
        tiles: (warpgroups, ctas_per_sm) pairs; none with columns that V lacks. Where times are near, a default has the
            first.
        num_stages: stages, the first legal ones being the default's.
        super_shares: sizes of super-chunks as shares of a sequence. A sixteenth of the longest of a bucket is an eighth
            of the shortest.
    """

    tiles: tuple[tuple[int, int], ...] = ((2, 1), (1, 1), (1, 2), (3, 1))
    num_stages: tuple[int, ...] = (3, 2, 4)
    super_shares: tuple[int, ...] = (2, 4, 8, 16)


SPACES: dict[str, ChunkSm90Space] = {}  # by the spec's name; the others have the values above


def points(problem: Problem, spec: ArchSpec) -> Iterator[ChunkwiseSm90Knobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not."""
    if not _is_taken(problem):
        return
    space = SPACES.get(spec.name, ChunkSm90Space())
    checked = points_of(problem, spec, _points(problem, space), passes_of)
    yield from divided(checked, problem, problem.padded_dim_v, spec, space)


def divided(
    points: Iterable[K | Rejection],
    problem: Problem,
    width: int,
    spec: ArchSpec,
    space: ChunkSm90Space,
) -> Iterator[K | Rejection]:
    """Points with every size of super-chunks that is worth a try, where CTAs share so many columns."""
    passes = ChunkPasses(problem, spec)
    for point in points:
        if isinstance(point, Rejection):
            yield point
            continue
        for size in passes.super_chunks(point.columns, width, space.super_shares):
            if size % point.chunk == 0:
                yield replace(point, super_chunk=size)


def default(problem: Problem, spec: ArchSpec) -> ChunkwiseSm90Knobs | None:
    """The point that takes the least time by the cost model; None where there is none."""
    if not _is_taken(problem):
        return None
    space = SPACES.get(spec.name, ChunkSm90Space())
    checked = points_of(problem, spec, _points(problem, space), passes_of)
    sizes = partial(divided, problem=problem, width=problem.padded_dim_v, spec=spec, space=space)
    return fastest(checked, sizes, problem, spec, passes_of, cost.predict)


def fastest(
    points: Iterable[K | Rejection],
    sizes: Callable[[Iterable[K]], Iterable[K | Rejection]],
    problem: Problem,
    spec: ArchSpec,
    launches_of: PassesOf,
    predict: Callable[[Problem, Candidate, ArchSpec, Usages, Coefficients], Estimate],
) -> K | None:
    """The point that takes the least time at the lengths that a default serves, relative to the best of each.

    None where no point is legal.

    Args:
        points: without super-chunks; of those with the same tile, the first legal one counts.
        sizes: gives points their super-chunks.
        problem: the problem.
        spec: the GPU.
        launches_of: gives a candidate's passes.
        predict: gives its time.
    """
    tiles: dict[tuple[int, int], K] = {}
    for knobs in points:
        if not isinstance(knobs, Rejection) and knobs.warpgroups <= MAX_DEFAULT_GROUPS:
            tiles.setdefault((knobs.warpgroups, knobs.ctas_per_sm), knobs)
    candidates: dict[K, tuple[Candidate, Usages]] = {}
    for knobs in tiles.values():
        launches = launches_of(Candidate.of(problem, knobs))
        usages = tuple(expected_usage(launch.needs, spec) for launch in launches)
        for point in sizes([knobs]):
            if not isinstance(point, Rejection):
                candidates[point] = Candidate.of(problem, point), usages
    losses = dict.fromkeys(candidates, 0.0)
    for share, counts in SERVED_SHARES.items():
        served = _shortened(problem, share)
        times = {
            point: predict(served, candidate, spec, usages, FITTED).us
            for point, (candidate, usages) in candidates.items()
        }
        least = min(times.values(), default=0.0)
        for point, us in times.items():
            losses[point] += counts * log(us / least)
    nearly = min(losses.values(), default=0.0) + log(NEAR)
    return next((point for point, loss in losses.items() if loss <= nearly), None)


def _shortened(problem: Problem, share: float) -> Problem:
    return replace(
        problem, seqlen_q=ceil(share * problem.seqlen_q), seqlen_k=ceil(share * problem.seqlen_k)
    )


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
