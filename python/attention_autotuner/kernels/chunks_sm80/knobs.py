"""Knobs of the passes over chunks of retention, family ``sm80``.

A pass over chunks computes, for tiles X and Y of ``[chunk, D]`` and Z of ``[chunk, columns]`` and a state ``[D,
columns]`` that stays in registers, ``Out = decayed(X Y^T) Z + decayed(X S)`` and ``S' = gamma^chunk S + decayed(Y^T)
Z``, chunk after chunk. Forward it is ``(X, Y, Z) = (q, k, v)``; the gradients are the same pass on ``(do, v, k)`` for
dq, and, from the last chunk to the first, on ``(v, do, q)`` for dk and ``(k, q, do)`` for dv. A CTA takes ``columns``
of Z and all of D, which is dim_qk for the output and dv, dim_v for dq and dk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...core.candidate import Service, knobs_as
from ...core.modifications import PACKED
from ...core.problem import Form
from ..shared.knobs import PlannedPasses, Sm80Knobs

Scores = Literal["inline", "precomputed"]

RENAMED_SCORES: dict[str, str] = {"given": "precomputed"}


@dataclass(frozen=True, kw_only=True)
class ChunkPass:
    """One pass over chunks.

    Attributes:
        columns: columns of Z, of the state and of the output that a CTA takes.
        column_warps: warps along these columns; each owns ``columns / column_warps``.
        depth_warps: warps that share columns, each with a slice of D; their outputs are added in shared memory.
        num_stages: shared-memory stages of X, Y and Z.
        scores: ``inline``: X Y^T is computed in the pass, by every CTA; ``precomputed``: once, by a kernel of
            its own, and read.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    columns: int
    column_warps: int
    depth_warps: int = 1
    num_stages: int
    scores: Scores = "inline"
    ctas_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.column_warps * self.depth_warps

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return (
            f"v{self.columns}w{self.column_warps}x{self.depth_warps}s{self.num_stages}"
            f"{self.scores}b{self.ctas_per_sm}"
        )


@dataclass(frozen=True, kw_only=True)
class ChunksKnobs(PlannedPasses, Sm80Knobs):
    """Retention chunk by chunk: one pass forward, one for each gradient with states that are computed again.

    Attributes:
        chunk: tokens of one step.
        super_chunk: tokens that one CTA takes, a multiple of ``chunk``: their states at the start come from a pass of
            their own, and are the checkpoints of the gradients. 0: one CTA takes the whole sequence.
        output: the pass of the forward direction; None for backward.
        dq, dk, dv: the passes of the gradients; None for forward.
    """

    kernel: ClassVar[str] = "chunks_sm80"
    serves: ClassVar[frozenset[Service]] = frozenset(
        {("retention", "forward", "decayed"), ("retention", "backward", "decayed")}
    )

    modifications: ClassVar[frozenset[str]] = frozenset({PACKED})

    pass_names: ClassVar[tuple[str, ...]] = ("output", "dq", "dk", "dv")

    chunk: int
    super_chunk: int = 0
    output: ChunkPass | None = None
    dq: ChunkPass | None = None
    dk: ChunkPass | None = None
    dv: ChunkPass | None = None

    def __post_init__(self) -> None:
        if tuple(self.passes) not in (("output",), ("dq", "dk", "dv")):
            raise ValueError(f"takes the pass output, or dq, dk and dv, got {tuple(self.passes)}")

    @property
    def form(self) -> Form:
        """``chunkwise`` of the forward direction."""
        return "auto" if self.output is None else "chunkwise"

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        start = f"chunkwise_l{self.chunk}p{self.super_chunk}"
        if self.output is not None:
            return f"{start}_{self.output.label}"
        return "_".join([start, *self.pass_labels])


knobs_of = knobs_as(ChunksKnobs)
