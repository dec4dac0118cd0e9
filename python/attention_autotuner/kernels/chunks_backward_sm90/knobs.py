"""Knobs of the passes over chunks of retention's backward, family ``sm90``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.candidate import Service
from ...core.problem import Form
from ..chunks_sm90.knobs import ChunkwiseSm90Knobs


@dataclass(frozen=True, kw_only=True)
class ChunkwiseBackwardSm90Knobs(ChunkwiseSm90Knobs):
    """Retention backward, each gradient a pass over chunks as the forward direction's.

    dq takes dO, V and K for Q, K and V; from the last chunk to the first, dk takes V, dO and Q, and dv K, Q and dO. All
    three have the same knobs; the columns are those of dim_qk in dq and dk, and of dim_v in dv.
    """

    kernel: ClassVar[str] = "chunks_backward_sm90"
    serves: ClassVar[frozenset[Service]] = frozenset({("retention", "backward", "decayed")})
    form: ClassVar[Form] = "auto"
