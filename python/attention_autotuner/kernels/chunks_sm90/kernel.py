"""Retention forward chunk by chunk, family ``sm90``."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..kernel import Kernel, Traits
from ..shared.cells import RETENTION_COLUMNS, bound_words, cells, chunk_words
from . import cost, resources, rules, space
from .knobs import ChunkwiseSm90Knobs, knobs_of


class ChunksSm90(Kernel[ChunkwiseSm90Knobs]):
    """WGMMA over chunks; one warpgroup computes scores and loads by TMA, the others hold states."""

    knobs = ChunkwiseSm90Knobs
    cpp_type = "ChunksSm90Entry"
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    headings = RETENTION_COLUMNS
    workspace_bytes = staticmethod(resources.workspace_bytes)

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        kernels = f"{knobs.columns} columns {knobs.warpgroups} groups {knobs.num_stages} stages"
        return Traits(
            tile=(self.name, knobs.super_chunk, knobs.columns),
            feed=(knobs.num_stages, knobs.ctas_per_sm),
            stratum=(self.name, knobs.super_chunk, knobs.columns, knobs.num_stages),
            cells=cells(
                RETENTION_COLUMNS,
                candidate,
                "chunkwise",
                chunk_words(knobs.chunk, knobs.super_chunk),
                kernels,
                more=(bound_words(knobs.ctas_per_sm),),
            ),
        )
