"""The passes over chunks that retention's candidates are made of, in a fixed order, and which to try first.

Passes are judged one by one and then combined. Those that a combination has several of come in a few kinds only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

from ..codegen.candidate import Candidate, Family
from ..codegen.problem import Problem
from ..codegen.retention_knobs import ChunkPass, ChunkwiseKnobs, RetentionBackwardKnobs, Scores
from .chunkwise_legality import MIN_COLUMNS, pass_broken
from .chunkwise_resources import ChunkShape, needs, shape_of
from .legality import Rejection
from .occupancy import REGISTERS_BESIDE_FRAGMENTS_TYPICAL, register_cap
from .rules import Broken
from .spec import ArchSpec

FULL_CTAS = 2  # CTAs an SM from which a sequence need not be divided


@dataclass(frozen=True, kw_only=True)
class ChunkSpace:
    """The values each knob may take.

    Attributes:
        chunks: tokens of a step.
        super_chunks: tokens of a CTA; 0 for all.
        columns, column_warps, depth_warps, num_stages, scores, ctas_per_sm: as in
            :class:`~..codegen.retention_knobs.ChunkPass`.
        backward_choices: how many kinds of each pass backward candidates have, for each chunk.
    """

    chunks: tuple[int, ...] = (64, 32, 128, 16)
    super_chunks: tuple[int, ...] = (0, 256, 512, 1024, 2048, 4096)
    columns: tuple[int, ...] = (128, 64, 32, 96, 48, 16)
    column_warps: tuple[int, ...] = (4, 8, 2, 1, 3, 6)
    depth_warps: tuple[int, ...] = (1, 2)
    num_stages: tuple[int, ...] = (2, 1, 3)
    scores: tuple[Scores, ...] = ("inline", "given")
    ctas_per_sm: tuple[int, ...] = (1, 2, 3, 4)
    backward_choices: int = 5


@dataclass(frozen=True, kw_only=True)
class ChunkPreference:
    """One row of the default table: a chunk and a pass to try first for inner head dims up to ``up_to``."""

    up_to: int
    chunk: int
    knobs: ChunkPass


def _row(
    up_to: int,
    chunk: int,
    columns: int,
    warps: tuple[int, int],
    stages: int,
    scores: Scores = "inline",
) -> ChunkPreference:
    knobs = ChunkPass(
        columns=columns,
        column_warps=warps[0],
        depth_warps=warps[1],
        num_stages=stages,
        scores=scores,
    )
    return ChunkPreference(up_to=up_to, chunk=chunk, knobs=knobs)


# Estimates from registers and shared memory: as much of Z as leaves a warp's state and output in registers.
# A launch bound of 1 suits all: for up to 128 threads a bound of 2 leaves as many registers.
CHUNK_PREFERENCES: tuple[ChunkPreference, ...] = (
    _row(64, 64, 64, (2, 1), 2),
    _row(64, 64, 64, (2, 1), 1),
    _row(128, 64, 128, (4, 1), 2),
    _row(128, 64, 64, (4, 1), 2),
    _row(128, 32, 128, (4, 1), 2),
    _row(256, 64, 128, (8, 1), 2),
    _row(256, 64, 128, (8, 1), 1),
    _row(256, 32, 64, (4, 1), 2),
    _row(256, 32, 64, (4, 1), 1),
    _row(512, 32, 64, (4, 2), 2, scores="given"),
    _row(512, 32, 64, (4, 2), 1, scores="given"),
)


class ChunkPasses:
    """The legal passes over chunks of a problem.

    Attributes:
        refused: the others, with the rule that each breaks.
    """

    def __init__(self, problem: Problem, space: ChunkSpace, spec: ArchSpec) -> None:
        self._classes = (problem.class_qk, problem.class_v)
        self._problem = problem
        self._space = space
        self._spec = spec
        self.refused: list[tuple[ChunkShape, Broken]] = []

    def legal(self, name: str, chunk: int) -> list[ChunkPass]:
        """All legal passes of a name, for a chunk, in the space's order."""
        shapes = [shape_of(name, one, chunk, 0, self._classes) for one in self._points(name)]
        return [shape.knobs for shape in self._legal(shapes)]

    def few(self, name: str, chunk: int) -> list[ChunkPass]:
        """The most promising of them: those that leave the compiler registers, in the fewest slices, come first."""
        found = self.legal(name, chunk)

        def taste(knobs: ChunkPass) -> tuple[bool, int]:
            shape = shape_of(name, knobs, chunk, 0, self._classes)
            kernel = needs(shape)
            wanted = kernel.fragment_registers + REGISTERS_BESIDE_FRAGMENTS_TYPICAL
            return wanted > register_cap(kernel, self._spec), shape.slices

        return sorted(found, key=taste)[: self._space.backward_choices]

    def first(self, name: str, chunk: int) -> ChunkPass | None:
        """What to use untuned: the first legal row of the default table for this chunk, else the most promising."""
        depth = shape_of(name, CHUNK_PREFERENCES[0].knobs, chunk, 0, self._classes).depth
        rows = [
            shape_of(name, row.knobs, chunk, 0, self._classes)
            for row in CHUNK_PREFERENCES
            if row.chunk == chunk and depth <= row.up_to
        ]
        found = next(self._legal(rows), None)
        if found is not None and found.knobs in self._points(name):
            return found.knobs
        return next(iter(self.few(name, chunk)), None)

    def super_chunks(self, chunk: int, columns: int, width: int) -> list[int]:
        """How a sequence may be divided: not at all, and if that leaves SMs idle, by each size below its length."""
        ctas = self._problem.batch * self._problem.heads_q * -(-width // columns)
        if ctas >= FULL_CTAS * self._spec.num_sms:
            return [0]
        return [
            size
            for size in self._space.super_chunks
            if size == 0 or (size < self._problem.seqlen_q and size % chunk == 0)
        ]

    def default_super_chunk(self, chunk: int, columns: int, width: int) -> int:
        """The largest division that employs every SM, or the finest there is."""
        sizes = self.super_chunks(chunk, columns, width)
        rows = self._problem.batch * self._problem.heads_q * -(-width // columns)
        if rows >= self._spec.num_sms or len(sizes) == 1:
            return 0
        fine = sorted(size for size in sizes if size)
        filling = [s for s in fine if rows * -(-self._problem.seqlen_q // s) >= self._spec.num_sms]
        return filling[-1] if filling else fine[0]

    def chunk_order(self, depth: int) -> list[int]:
        """The space's chunks, those of the default table for an inner head dim first."""
        first = [row.chunk for row in CHUNK_PREFERENCES if depth <= row.up_to]
        return list(
            dict.fromkeys([c for c in first if c in self._space.chunks] + [*self._space.chunks])
        )

    def rejections(self, family: Family) -> list[Rejection]:
        """What was refused, each with what is known of the candidates that would have it."""
        problem = self._problem
        return [
            Rejection(
                config={
                    "family": family,
                    "op": problem.op,
                    "direction": problem.direction,
                    "dtype": problem.dtype,
                    "class_qk": problem.class_qk,
                    "class_v": problem.class_v,
                    "copy_bytes": problem.alignment_bytes,
                    "mask": problem.mask,
                    "knobs": {"chunk": shape.chunk, shape.name: asdict(shape.knobs)},
                },
                predicate=broken[0],
                reason=broken[1],
            )
            for shape, broken in dict.fromkeys(self.refused)
        ]

    def _points(self, name: str) -> list[ChunkPass]:
        width = self._problem.class_qk if name in ("dq", "dk") else self._problem.class_v
        widths = [c for c in self._space.columns if c <= max(width, MIN_COLUMNS)]
        scores: tuple[Scores, ...] = ("inline",) if name == "states" else self._space.scores
        return [
            ChunkPass(
                columns=columns,
                column_warps=warps,
                depth_warps=deep,
                num_stages=stages,
                scores=kind,
                ctas_per_sm=ctas,
            )
            for columns, warps, deep, kind, stages, ctas in product(
                widths,
                self._space.column_warps,
                self._space.depth_warps,
                scores,
                self._space.num_stages,
                self._space.ctas_per_sm,
            )
            if columns % (16 * warps) == 0 and (deep == 1 or kind == "given" or name == "states")
        ]

    def _legal(self, shapes: Iterable[ChunkShape]) -> Iterator[ChunkShape]:
        for shape in shapes:
            broken = pass_broken(shape, self._spec)
            if broken is None:
                yield shape
            else:
                self.refused.append((shape, broken))


def forward_offered(
    problem: Problem, family: Family, space: ChunkSpace, spec: ArchSpec
) -> list[Candidate | Rejection]:
    """Every chunkwise forward candidate, and every pass that is not legal as a rejection."""
    passes = ChunkPasses(problem, space, spec)
    found: list[Candidate | Rejection] = [
        Candidate.of(problem, family, ChunkwiseKnobs(chunk=chunk, super_chunk=size, output=output))
        for chunk in space.chunks
        for output in passes.legal("output", chunk)
        for size in passes.super_chunks(chunk, output.columns, problem.class_v)
    ]
    return [*found, *passes.rejections(family)]


def forward_preferred(
    problem: Problem, family: Family, space: ChunkSpace, spec: ArchSpec
) -> Candidate | None:
    """The chunkwise forward candidate that needs no tuning, or None."""
    passes = ChunkPasses(problem, space, spec)
    for chunk in passes.chunk_order(problem.class_qk):
        output = passes.first("output", chunk)
        if output is not None:
            size = passes.default_super_chunk(chunk, output.columns, problem.class_v)
            knobs = ChunkwiseKnobs(chunk=chunk, super_chunk=size, output=output)
            return Candidate.of(problem, family, knobs)
    return None


def backward_offered(
    problem: Problem, family: Family, space: ChunkSpace, spec: ArchSpec
) -> list[Candidate | Rejection]:
    """Every backward candidate, and every pass that is not legal as a rejection; dq and dk are of one shape."""
    passes = ChunkPasses(problem, space, spec)
    found: list[Candidate | Rejection] = []
    for chunk in space.chunks:
        alike = _with_default(passes.few("dq", chunk), passes.first("dq", chunk))
        values = _with_default(passes.few("dv", chunk), passes.first("dv", chunk))
        for same, dv in product(alike, values):
            found += [
                Candidate.of(
                    problem,
                    family,
                    RetentionBackwardKnobs(chunk=chunk, super_chunk=size, dq=same, dk=same, dv=dv),
                )
                for size in passes.super_chunks(chunk, same.columns, problem.class_qk)
            ]
    return [*found, *passes.rejections(family)]


def backward_preferred(
    problem: Problem, family: Family, space: ChunkSpace, spec: ArchSpec
) -> Candidate | None:
    """The backward candidate that needs no tuning, or None."""
    passes = ChunkPasses(problem, space, spec)
    for chunk in passes.chunk_order(max(problem.class_qk, problem.class_v)):
        same, dv = passes.first("dq", chunk), passes.first("dv", chunk)
        if same is None or dv is None:
            continue
        size = passes.default_super_chunk(chunk, same.columns, problem.class_qk)
        knobs = RetentionBackwardKnobs(chunk=chunk, super_chunk=size, dq=same, dk=same, dv=dv)
        return Candidate.of(problem, family, knobs)
    return None


def _with_default(few: list[ChunkPass], default: ChunkPass | None) -> list[ChunkPass]:
    """The few with the default at their head."""
    return few if default is None else list(dict.fromkeys([default, *few]))
