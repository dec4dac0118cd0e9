"""Knobs of the pass over chunks of retention, family ``sm90``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.candidate import Service, knobs_as
from ...core.problem import Form
from ..shared.knobs import Sm90Knobs, Warpgroups


@dataclass(frozen=True, kw_only=True)
class ChunkwiseSm90Knobs(Warpgroups, Sm90Knobs):
    """Retention forward, chunk by chunk, by a kernel of family ``sm90``.

    Some warpgroups have the state for 64 columns of V each; one more computes scores and loads by TMA.

    Attributes:
        super_chunk: as in :class:`~.ChunksKnobs`.
        warpgroups: that have states.
        num_stages: shared-memory stages of Q, K and V.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    kernel: ClassVar[str] = "chunks_sm90"
    serves: ClassVar[frozenset[Service]] = frozenset({("retention", "forward", "decayed")})
    form: ClassVar[Form] = "chunkwise"
    chunk: ClassVar[int] = 64  # tokens of one step

    super_chunk: int = 0
    warpgroups: int
    num_stages: int
    ctas_per_sm: int = 1

    @property
    def columns(self) -> int:
        """Columns of V that one CTA takes."""
        return 64 * self.warpgroups

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        tile = f"g{self.warpgroups}s{self.num_stages}b{self.ctas_per_sm}"
        return f"chunkwise_l{self.chunk}p{self.super_chunk}_{tile}"


knobs_of = knobs_as(ChunkwiseSm90Knobs)
