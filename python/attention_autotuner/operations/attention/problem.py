"""Softmax attention as a problem."""

from __future__ import annotations

from ...core.modifications import COMPILED
from ...core.operation import Semantics

SEMANTICS = Semantics(
    op="attention",
    scores={"none": "softmax"},
    alignments=("bottom_right", "top_left"),
    takes_key_bounds=True,
    goes_by_tiles=True,
    modifications=COMPILED,
)
