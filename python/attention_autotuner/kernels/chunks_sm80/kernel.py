"""Retention chunk by chunk, family ``sm80``: forward, and the gradients."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Entry, Kernel, Traits
from ..shared.cells import RETENTION_COLUMNS, cells, chunk_words, pass_words
from . import cost, resources, rules, space
from .knobs import RENAMED_SCORES, ChunkPass, ChunksKnobs, knobs_of


class ChunksSm80(Kernel[ChunksKnobs]):
    """mma.sync over chunks, the state in registers as the B operand."""

    knobs = ChunksKnobs
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    headings = RETENTION_COLUMNS
    workspace_bytes = staticmethod(resources.workspace_bytes)
    renamed = RENAMED_SCORES

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        if candidate.direction == "forward":
            return Entry(cpp_type="ChunksEntry")
        return Entry(cpp_type="ChunksBackwardEntry", header="backward_entry.cuh")

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        all_passes = tuple(knobs.passes.values())
        start = ("chunkwise", knobs.chunk, knobs.super_chunk)
        return Traits(
            tile=(*start, *map(_tile, all_passes)),
            feed=tuple((knobs.scores, knobs.num_stages) for knobs in all_passes),
            stratum=(*start, *map(_stages, all_passes)),
            cells=cells(
                RETENTION_COLUMNS,
                candidate,
                "chunkwise",
                chunk_words(knobs.chunk, knobs.super_chunk),
                pass_words(knobs.passes),
            ),
        )


def _stages(knobs: ChunkPass) -> tuple[int, ...]:
    """Columns, warps and stages of a pass."""
    return (knobs.columns, knobs.depth_warps, knobs.num_threads // 32, knobs.num_stages)


def _tile(knobs: ChunkPass) -> tuple[int, ...]:
    """Columns and warps of a pass."""
    return (knobs.columns, knobs.column_warps, knobs.depth_warps)
