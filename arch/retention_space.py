"""The retention candidates that a policy offers, form by form in a fixed order, and the one that needs no tuning."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

from ..codegen.candidate import Candidate, Family
from ..codegen.knobs import ParallelKnobs
from ..codegen.problem import Form, Problem
from ..codegen.retention_knobs import ChunkPass, RecurrentKnobs
from . import chunkwise_space, forward_space
from .chunkwise_space import ChunkPasses, ChunkSpace
from .forward_space import ForwardPreference, ForwardSpace
from .legality import Rejection, check
from .spec import ArchSpec

MAX_RECURRENT_SEQLEN = 64  # tokens up to which the recurrent form is worth a try unasked
AUTO_ROWS = ForwardSpace(
    tiles=((128, 4), (64, 4), (128, 8)),
    block_n=(64, 32),
    num_stages=(2, 1),
    k_slice=(0,),
    schedules=((False, "heads_first"),),
    ctas_per_sm=(1, 2),
)


@dataclass(frozen=True, kw_only=True)
class RetentionSpace:
    """The values that the knobs of retention's forms may take.

    Attributes:
        chunks: of the passes over chunks.
        recurrent: (columns, warps) pairs, the most promising first.
        ctas_per_sm: launch bounds of the recurrent form, likewise.
        auto_rows: of the parallel form where it is one of several; all that attention has where it is the only one.
    """

    chunks: ChunkSpace = field(default_factory=ChunkSpace)
    recurrent: tuple[tuple[int, int], ...] = tuple(product((64, 32, 16, 8, 128), (8, 4, 2, 1, 16)))
    ctas_per_sm: tuple[int, ...] = (2, 1, 4)
    auto_rows: ForwardSpace = AUTO_ROWS


def forms(problem: Problem) -> tuple[Form, ...]:
    """The forms that a problem's candidates may have."""
    if problem.form != "auto":
        return (problem.form,)
    short = problem.seqlen_q <= MAX_RECURRENT_SEQLEN
    return ("parallel", "chunkwise", "recurrent") if short else ("parallel", "chunkwise")


def offered(
    problem: Problem, family: Family, space: RetentionSpace, rows: ForwardSpace, spec: ArchSpec
) -> list[Candidate | Rejection]:
    """Every point of the space, as a candidate or as the rejection that says why not."""
    if problem.direction == "backward":
        return chunkwise_space.backward_offered(problem, family, space.chunks, spec)
    found: list[Candidate | Rejection] = []
    for form in forms(problem):
        if form == "parallel":
            own = rows if problem.form == "parallel" else space.auto_rows
            found += _parallel(problem, family, space, own, spec)
        elif form == "chunkwise":
            found += chunkwise_space.forward_offered(problem, family, space.chunks, spec)
        else:
            found += _recurrent(problem, family, space, spec)
    return found


def preferred(
    problem: Problem,
    family: Family,
    space: RetentionSpace,
    rows: ForwardSpace,
    preferences: tuple[ForwardPreference, ...],
    spec: ArchSpec,
) -> Candidate | None:
    """What needs no tuning: chunkwise, or recurrent for few tokens, unless the problem says its form."""
    if problem.direction == "backward":
        return chunkwise_space.backward_preferred(problem, family, space.chunks, spec)
    form = problem.form
    if form == "auto":
        form = "recurrent" if problem.seqlen_q <= 1 else "chunkwise"
    if form == "chunkwise":
        return chunkwise_space.forward_preferred(problem, family, space.chunks, spec)
    if form == "recurrent":
        found = _recurrent(problem, family, space, spec)
        return next((one for one in found if isinstance(one, Candidate)), None)
    states = _states(problem, space, spec)
    like = forward_space.preferred(_like_attention(problem), family, rows, preferences, spec)
    if states is None or like is None:
        return None
    chunk, one = states
    return Candidate.of(problem, family, ParallelKnobs(rows=like.forward, chunk=chunk, states=one))


def _like_attention(problem: Problem) -> Problem:
    """The attention problem whose kernel the parallel form's rows are."""
    return replace(problem, op="attention", form="auto")


def _states(
    problem: Problem, space: RetentionSpace, spec: ArchSpec
) -> tuple[int, ChunkPass] | None:
    """The chunk and the pass that every parallel candidate gives the states: they are no part of its usual work."""
    passes = ChunkPasses(problem, space.chunks, spec)
    for chunk in passes.chunk_order(problem.class_qk):
        found = passes.first("states", chunk)
        if found is not None:
            return chunk, found
    return None


def _parallel(
    problem: Problem, family: Family, space: RetentionSpace, rows: ForwardSpace, spec: ArchSpec
) -> list[Candidate | Rejection]:
    states = _states(problem, space, spec)
    if states is None:
        return list(ChunkPasses(problem, space.chunks, spec).rejections(family))
    chunk, one = states
    found: list[Candidate | Rejection] = []
    for entry in forward_space.offered(_like_attention(problem), family, rows, spec):
        if isinstance(entry, Rejection):
            config = entry.config | {"op": "retention", "knobs": {"rows": entry.config["knobs"]}}
            found.append(replace(entry, config=config))
        else:
            knobs = ParallelKnobs(rows=entry.forward, chunk=chunk, states=one)
            found.append(Candidate.of(problem, family, knobs))
    return found


def _recurrent(
    problem: Problem, family: Family, space: RetentionSpace, spec: ArchSpec
) -> list[Candidate | Rejection]:
    found: list[Candidate | Rejection] = []
    for (columns, warps), ctas in product(space.recurrent, space.ctas_per_sm):
        knobs = RecurrentKnobs(columns=columns, warps=warps, ctas_per_sm=ctas)
        candidate = Candidate.of(problem, family, knobs)
        found.append(check(candidate, spec) or candidate)
    return found
