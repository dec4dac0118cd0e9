"""Retention's gradients chunk by chunk, family ``sm90``."""

from __future__ import annotations

from ..chunks_sm90.kernel import ChunksSm90
from . import cost, resources, rules, space
from .knobs import ChunkwiseBackwardSm90Knobs


class ChunksBackwardSm90(ChunksSm90):
    """Three passes of WGMMA over chunks, each with the tensors of one gradient; dk and dv go backward in time."""

    knobs = ChunkwiseBackwardSm90Knobs
    cpp_type = "ChunksBackwardSm90Entry"
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    workspace_bytes = staticmethod(resources.workspace_bytes)
