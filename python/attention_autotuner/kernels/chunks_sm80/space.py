"""The passes over chunks that retention's candidates are made of, in a fixed order, and which to try first.

Passes are checked one by one and then combined. Of those that a combination has several of, only a few are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log2

from ...arch.occupancy import REGISTERS_BESIDE_FRAGMENTS_MIN, register_cap
from ...arch.spec import ArchSpec
from ...core.candidate import Rejection, rejected
from ...core.identity import plain
from ...core.problem import Problem
from ..shared.forms import default_form, forms
from ..shared.rules import MAX_STATE_REGISTERS, Violation
from .knobs import ChunkPass, ChunksKnobs, Scores
from .resources import ChunkShape, needs, shape_of, wanted_registers
from .rules import pass_of

FULL_CTAS = 2  # CTAs an SM from which a sequence need not be divided
EMPLOYED = 0.75  # of the SMs, that a division which needs no tuning gives a CTA
MIN_COLUMNS = 32  # of a CTA, whatever the head dim: two warps of 16
MIN_SUPER_CHUNK = 256  # tokens
# Tokens; of packed sequences whatever their lengths, as kernels cut none that is shorter.
PACKED_SUPER_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class ChunkSpace:
    """The values each knob may take.

    Attributes:
        chunks: tokens of a step.
        super_chunks: tokens of a CTA where not all.
        super_shares: the same as shares of a sequence, rounded to a power of two.
        columns: of Z, of a CTA.
        warp_columns: of them, of a warp. As many depth warps as its state needs go with it.
        num_stages: of shared memory; a single one only where two do not fit.
        ctas_per_sm: launch bounds.
        backward_choices: how many kinds of each pass backward candidates have, for each chunk.
    """

    chunks: tuple[int, ...] = (32, 64)
    super_chunks: tuple[int, ...] = (2048, 4096)
    super_shares: tuple[int, ...] = (2, 4, 8)
    columns: tuple[int, ...] = (128, 64, 32, 96, 48)
    warp_columns: tuple[int, ...] = (32, 16)
    num_stages: tuple[int, ...] = (2, 3)
    ctas_per_sm: tuple[int, ...] = (1, 2)
    backward_choices: int = 4


@dataclass(frozen=True, kw_only=True)
class ChunkPreference:
    """One row of a default table: a chunk and a pass to try first for inner head dims up to ``up_to``."""

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


# Which rows lead was measured on an H200: 32 columns a warp, or 16 where the state leaves room for no more, and chunks
# of 32 but for the deepest heads. The others are for narrow heads and for GPUs with less shared memory.
FORWARD_CHUNKS: tuple[ChunkPreference, ...] = (
    _row(64, 32, 64, (2, 1), 3),
    _row(64, 32, 32, (2, 1), 3),
    _row(128, 32, 128, (4, 1), 2),
    _row(128, 32, 64, (2, 1), 2),
    _row(128, 32, 32, (2, 1), 2),
    _row(256, 64, 128, (8, 1), 2),
    _row(256, 32, 64, (4, 1), 2),
    _row(256, 32, 64, (4, 1), 1),
    _row(256, 32, 32, (2, 1), 2),
)
BACKWARD_CHUNKS: tuple[ChunkPreference, ...] = (
    _row(64, 32, 64, (2, 1), 3),
    _row(64, 32, 32, (2, 1), 3),
    _row(128, 32, 64, (2, 1), 2),
    _row(128, 32, 32, (2, 1), 2),
    _row(64, 64, 64, (2, 1), 2),
    _row(128, 64, 64, (4, 1), 2),
    _row(256, 32, 64, (4, 1), 2),
    _row(256, 32, 64, (4, 1), 1),
    _row(256, 32, 32, (2, 1), 2),
    _row(512, 32, 64, (4, 2), 2, scores="precomputed"),
    _row(512, 32, 64, (4, 2), 1, scores="precomputed"),
    _row(512, 32, 32, (2, 2), 2, scores="precomputed"),
    _row(512, 32, 32, (2, 2), 1, scores="precomputed"),
)


SPACES: dict[str, ChunkSpace] = {}  # by the spec's name; the others have the values above


class ChunkPasses:
    """The legal passes over chunks of a problem.

    Attributes:
        space: the values of the knobs.
        rejected: the others, with the rule that they break.
    """

    def __init__(self, problem: Problem, spec: ArchSpec) -> None:
        self.space = SPACES.get(spec.name, ChunkSpace())
        self._padded_dims = (problem.padded_dim_qk, problem.padded_dim_v)
        self._problem = problem
        self._spec = spec
        self._rows = FORWARD_CHUNKS if problem.direction == "forward" else BACKWARD_CHUNKS
        self.rejected: list[tuple[ChunkShape, Violation]] = []

    def legal(self, name: str, chunk: int) -> list[ChunkPass]:
        """All legal passes of a name, for a chunk, in the space's order."""
        passes: dict[ChunkPass, None] = {}
        for knobs in self._tiles(name, chunk):
            deep = [replace(knobs, num_stages=stages) for stages in self.space.num_stages]
            legal = [deeper for deeper in deep if self._is_legal(name, chunk, deeper)]
            if not legal:
                single = replace(knobs, num_stages=1)
                legal = [single] if self._is_legal(name, chunk, single) else []
            for staged in legal:
                passes |= dict.fromkeys(self._bounds(name, chunk, staged))
        return [*passes]

    def few(self, name: str, chunk: int) -> list[ChunkPass]:
        """The most promising of them: those of the default table, then those that leave the compiler registers."""
        listed = [row.knobs for row in self._rows_for(name, chunk)]

        def promise(knobs: ChunkPass) -> tuple[int, bool, int, int]:
            shape = shape_of(name, knobs, chunk, 0, self._padded_dims)
            place = listed.index(knobs) if knobs in listed else len(listed)
            return place, not self._fits_registers(shape), knobs.ctas_per_sm, shape.slices

        return sorted(self.legal(name, chunk), key=promise)[: self.space.backward_choices]

    def first(self, name: str, chunk: int) -> ChunkPass | None:
        """The pass without tuning: the first legal row of the default table for this chunk, else the most promising."""
        for row in self._rows_for(name, chunk):
            shape = shape_of(name, row.knobs, chunk, 0, self._padded_dims)
            within = row.knobs.columns <= max(shape.width, MIN_COLUMNS)
            if within and pass_of(shape).violation_on(self._spec) is None:
                return row.knobs
        return next(iter(self.few(name, chunk)), None)

    def super_chunks(
        self, columns: int, width: int, super_shares: tuple[int, ...] | None = None
    ) -> list[int]:
        """Sizes of super-chunks: none, and if that leaves SMs idle, by each size below its length.

        Args:
            columns: of a CTA.
            width: columns that CTAs share.
            super_shares: as the space has them; None for the space's own.
        """
        seqlen = self._problem.seqlen_q
        if self._problem.packed:  # no composition of a batch builds other kernels
            return [0, *sorted({PACKED_SUPER_CHUNK, *self.space.super_chunks})]
        if self.ctas(columns, width) >= FULL_CTAS * self._spec.num_sms:
            return [0]
        shares = [
            2 ** round(log2(seqlen / share)) for share in super_shares or self.space.super_shares
        ]
        sizes = {*self.space.super_chunks, *shares}
        return [0, *sorted(size for size in sizes if MIN_SUPER_CHUNK <= size < seqlen)]

    def default_super_chunk(self, columns: int, width: int) -> int:
        """The largest division that employs most SMs, or the finest there is; of packed sequences, always the same."""
        if self._problem.packed:
            return PACKED_SUPER_CHUNK
        _, *fine = self.super_chunks(columns, width)
        ctas, wanted = self.ctas(columns, width), EMPLOYED * self._spec.num_sms
        if ctas >= wanted or not fine:
            return 0
        filling = [size for size in fine if ctas * -(-self._problem.seqlen_q // size) >= wanted]
        return filling[-1] if filling else fine[0]

    def chunk_order(self, depth: int) -> list[int]:
        """The space's chunks, those of the default table for an inner head dim first."""
        known = self.space.chunks
        first = (row.chunk for row in self._rows if depth <= row.up_to)
        return list(dict.fromkeys(chunk for chunk in (*first, *known) if chunk in known))

    def rejections(self) -> list[Rejection]:
        """Rejections of the passes that are not legal, each for all candidates that would have it."""
        return [
            rejected(
                self._problem,
                ChunksKnobs,
                {"chunk": shape.chunk, shape.name: plain(shape.knobs)},
                violation,
            )
            for shape, violation in dict.fromkeys(self.rejected)
        ]

    def ctas(self, columns: int, width: int) -> int:
        """CTAs of whole sequences, each with so many of the columns."""
        return self._problem.batch * self._problem.heads_q * -(-width // columns)

    def _rows_for(self, name: str, chunk: int) -> list[ChunkPreference]:
        """Rows of the default table that speak of a pass, the first the most."""
        depth = shape_of(name, self._rows[0].knobs, chunk, 0, self._padded_dims).depth
        return [row for row in self._rows if row.chunk == chunk and depth <= row.up_to]

    def _tiles(self, name: str, chunk: int) -> Iterator[ChunkPass]:
        """Passes that differ in more than stages and launch bounds, legal or not.

        Scores are precomputed where depth warps would have to share the work on them, or where slices would repeat it.
        """
        for columns, warp_columns in product(self.space.columns, self.space.warp_columns):
            if columns % warp_columns:
                continue
            knobs = ChunkPass(columns=columns, column_warps=columns // warp_columns, num_stages=2)
            shape = shape_of(name, knobs, chunk, 0, self._padded_dims)
            if columns > max(shape.width, MIN_COLUMNS):
                continue
            wanted = shape.state_registers
            deep = next((n for n in (1, 2) if wanted <= n * MAX_STATE_REGISTERS), 4)
            if deep == 1:
                yield knobs
            if name != "states" and (deep > 1 or shape.slices > 1):
                yield replace(knobs, depth_warps=deep, scores="precomputed")

    def _bounds(self, name: str, chunk: int, knobs: ChunkPass) -> list[ChunkPass]:
        """A pass with every launch bound that its registers fit; the first of them in any case."""
        first, *others = (replace(knobs, ctas_per_sm=ctas) for ctas in self.space.ctas_per_sm)
        shapes = [shape_of(name, bounded, chunk, 0, self._padded_dims) for bounded in others]
        return [first] + [
            shape.knobs
            for shape in shapes
            if self._fits_registers(shape) and pass_of(shape).violation_on(self._spec) is None
        ]

    def _fits_registers(self, shape: ChunkShape) -> bool:
        """True where all that is live at once fits the registers."""
        wanted = wanted_registers(shape) + REGISTERS_BESIDE_FRAGMENTS_MIN
        return wanted <= register_cap(needs(shape), self._spec)

    def _is_legal(self, name: str, chunk: int, knobs: ChunkPass) -> bool:
        shape = shape_of(name, knobs, chunk, 0, self._padded_dims)
        violation = pass_of(shape).violation_on(self._spec)
        if violation is not None:
            self.rejected.append((shape, violation))
        return violation is None


def points(problem: Problem, spec: ArchSpec) -> Iterator[ChunksKnobs | Rejection]:
    """Every candidate's knobs, and every pass that is not legal as a rejection; dq and dk are of one shape."""
    if problem.direction == "forward" and "chunkwise" not in forms(problem):
        return
    passes = ChunkPasses(problem, spec)
    for chunk in passes.space.chunks:
        if problem.direction == "forward":
            for output in passes.legal("output", chunk):
                for size in passes.super_chunks(output.columns, problem.padded_dim_v):
                    yield ChunksKnobs(chunk=chunk, super_chunk=size, output=output)
            continue
        for same, dv in product(passes.few("dq", chunk), passes.few("dv", chunk)):
            for size in passes.super_chunks(same.columns, problem.padded_dim_qk):
                yield ChunksKnobs(chunk=chunk, super_chunk=size, dq=same, dk=same, dv=dv)
    yield from passes.rejections()


def default(problem: Problem, spec: ArchSpec) -> ChunksKnobs | None:
    """The knobs that need no tuning, or None."""
    if problem.direction == "forward" and default_form(problem) != "chunkwise":
        return None
    passes = ChunkPasses(problem, spec)
    if problem.direction == "forward":
        for chunk in passes.chunk_order(problem.padded_dim_qk):
            output = passes.first("output", chunk)
            if output is not None:
                size = passes.default_super_chunk(output.columns, problem.padded_dim_v)
                return ChunksKnobs(chunk=chunk, super_chunk=size, output=output)
        return None
    for chunk in passes.chunk_order(problem.widest_dim):
        same, dv = passes.first("dq", chunk), passes.first("dv", chunk)
        if same is not None and dv is not None:
            size = passes.default_super_chunk(same.columns, problem.padded_dim_qk)
            return ChunksKnobs(chunk=chunk, super_chunk=size, dq=same, dk=same, dv=dv)
    return None
