"""The launches of a candidate over chunks, and the one that retention's parallel form borrows for its states."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass
from .knobs import ChunkPass, ChunksKnobs, knobs_of
from .resources import ChunkShape, needs, shape_of
from .rules import CHUNK_PREDICATES


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
