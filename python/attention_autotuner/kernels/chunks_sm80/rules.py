"""Which passes over chunks may exist: named predicates, each giving the reason of a rejection.

They are what the kernel headers can compile at all; each is the twin of the ``static_assert`` of the same name in the
traits of the pass over chunks.
"""

from __future__ import annotations

from ..shared.rules import Rule
from .resources import ChunkShape

CHUNKS = (16, 32, 64, 128)
DEPTH_WARPS = (1, 2, 4)
MAX_STAGES = 3
MIN_WARPS = 2  # a pass of a copy must fill whole groups of 8 rows
MAX_WARPS = 16
MIN_PRECOMPUTED_CHUNK = 32  # rows of scores that a copy of all threads fills whole
MAX_STATE_REGISTERS = 128


def _chunk_range(s: ChunkShape) -> str | None:
    return None if s.chunk in CHUNKS else f"chunk must be one of {CHUNKS}, got {s.chunk}"


def _chunk_stages_range(s: ChunkShape) -> str | None:
    if 1 <= s.knobs.num_stages <= MAX_STAGES:
        return None
    return f"num_stages must be in 1..{MAX_STAGES}, got {s.knobs.num_stages}"


def _depth_warps_range(s: ChunkShape) -> str | None:
    if s.knobs.depth_warps in DEPTH_WARPS:
        return None
    return f"depth_warps must be one of {DEPTH_WARPS}, got {s.knobs.depth_warps}"


def _chunk_warps_range(s: ChunkShape) -> str | None:
    along, deep = s.knobs.column_warps, s.knobs.depth_warps
    if MIN_WARPS <= along * deep <= MAX_WARPS and along * deep % 2 == 0:
        return None
    return (
        f"column_warps * depth_warps must be even and in {MIN_WARPS}..{MAX_WARPS}, got "
        f"{along} * {deep}"
    )


def _columns_divide_among_warps(s: ChunkShape) -> str | None:
    if s.knobs.columns % (16 * s.knobs.column_warps) == 0:
        return None
    return (
        f"columns must be a multiple of 16 * column_warps, got {s.knobs.columns} for "
        f"{s.knobs.column_warps} warps"
    )


def _chunk_divides_among_depth_warps(s: ChunkShape) -> str | None:
    if s.chunk % (16 * s.knobs.depth_warps) == 0:
        return None
    return (
        f"chunk must be a multiple of 16 * depth_warps, got {s.chunk} for "
        f"{s.knobs.depth_warps} depth warps"
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


def _state_fits_registers(s: ChunkShape) -> str | None:
    if s.state_registers <= MAX_STATE_REGISTERS:
        return None
    return (
        f"a thread's elements of the state must take at most {MAX_STATE_REGISTERS} registers, got "
        f"{s.state_registers}"
    )


CHUNK_PREDICATES: dict[str, Rule[ChunkShape]] = {
    "chunk_range": _chunk_range,
    "chunk_stages_range": _chunk_stages_range,
    "depth_warps_range": _depth_warps_range,
    "chunk_warps_range": _chunk_warps_range,
    "columns_divide_among_warps": _columns_divide_among_warps,
    "chunk_divides_among_depth_warps": _chunk_divides_among_depth_warps,
    "inline_divides_chunk": _inline_divides_chunk,
    "precomputed_needs_chunk_of_32": _precomputed_needs_chunk_of_32,
    "super_chunk_multiple_of_chunk": _super_chunk_multiple_of_chunk,
    "state_fits_registers": _state_fits_registers,
}
