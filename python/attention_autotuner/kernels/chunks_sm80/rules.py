"""Which passes over chunks may exist: named predicates, each giving the reason of a rejection.

They are what the kernel headers can compile at all; each is the twin of the ``static_assert`` of the same name in the
traits of the pass over chunks.
"""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass
from ..shared.rules import Rule, divides, known, state_fits_registers, within
from .knobs import ChunkPass, ChunksKnobs, knobs_of
from .resources import ChunkShape, needs, shape_of

CHUNKS = (16, 32, 64, 128)
DEPTH_WARPS = (1, 2, 4)
MAX_STAGES = 3
MIN_WARPS = 2  # a pass of a copy must fill whole groups of 8 rows
MAX_WARPS = 16
MIN_PRECOMPUTED_CHUNK = 32  # rows of scores that a copy of all threads fills whole


def _chunk_warps_range(s: ChunkShape) -> str | None:
    along, deep = s.knobs.column_warps, s.knobs.depth_warps
    if MIN_WARPS <= along * deep <= MAX_WARPS and along * deep % 2 == 0:
        return None
    return (
        f"column_warps * depth_warps must be even and in {MIN_WARPS}..{MAX_WARPS}, got "
        f"{along} * {deep}"
    )


def _inline_divides_chunk(s: ChunkShape) -> str | None:
    if s.knobs.scores == "precomputed" or s.chunk % (8 * s.knobs.column_warps) == 0:
        return None
    return (
        "inline scores need a chunk that is a multiple of 8 * column_warps, got "
        f"{s.chunk} for {s.knobs.column_warps} warps"
    )


def _precomputed_needs_chunk_of_32(s: ChunkShape) -> str | None:
    if s.knobs.scores == "inline" or s.chunk >= MIN_PRECOMPUTED_CHUNK:
        return None
    return f"precomputed scores need a chunk of at least {MIN_PRECOMPUTED_CHUNK}, got {s.chunk}"


def _super_chunk_multiple_of_chunk(s: ChunkShape) -> str | None:
    if s.super_chunk >= 0 and s.super_chunk % s.chunk == 0:
        return None
    return f"super_chunk must be a multiple of chunk, got {s.super_chunk} and {s.chunk}"


CHUNK_PREDICATES: dict[str, Rule[ChunkShape]] = {
    "chunk_range": known("chunk", CHUNKS),
    "chunk_stages_range": within("num_stages", 1, MAX_STAGES),
    "depth_warps_range": known("depth_warps", DEPTH_WARPS),
    "chunk_warps_range": _chunk_warps_range,
    "columns_divide_among_warps": divides("columns", "column_warps", "warps"),
    "chunk_divides_among_depth_warps": divides("chunk", "depth_warps", "depth warps"),
    "inline_divides_chunk": _inline_divides_chunk,
    "precomputed_needs_chunk_of_32": _precomputed_needs_chunk_of_32,
    "super_chunk_multiple_of_chunk": _super_chunk_multiple_of_chunk,
    "state_fits_registers": state_fits_registers,
}


def pass_of(shape: ChunkShape) -> Pass:
    """The launch of a pass over chunks."""
    return Pass(
        kernel=ChunksKnobs.kernel,
        subject=shape,
        rules=CHUNK_PREDICATES,
        needs_of=needs,
        prefix=f"{shape.name}: ",
    )


def chunk_pass(
    candidate: Candidate, name: str, knobs: ChunkPass, chunk: int, super_chunk: int
) -> Pass:
    """The launch of a candidate's pass over chunks, by the pass's name."""
    padded_dims = (candidate.padded_dim_qk, candidate.padded_dim_v)
    return pass_of(shape_of(name, knobs, chunk, super_chunk, padded_dims))


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate, in the order they run."""
    knobs = knobs_of(candidate)
    return tuple(
        chunk_pass(candidate, name, item, knobs.chunk, knobs.super_chunk)
        for name, item in knobs.passes.items()
    )
