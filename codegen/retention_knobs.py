"""Knobs of retention's chunkwise and recurrent forms.

A pass over chunks computes, for tiles X and Y of ``[chunk, D]`` and Z of ``[chunk, columns]`` and a state ``[D,
columns]`` that stays in registers, ``Out = decayed(X Y^T) Z + decayed(X S)`` and ``S' = gamma^chunk S + decayed(Y^T)
Z``, chunk after chunk. Forward it is ``(X, Y, Z) = (q, k, v)``; the gradients are the same pass on ``(do, v, k)`` for
dq, and, from the last chunk to the first, on ``(v, do, q)`` for dk and ``(k, q, do)`` for dv. A CTA takes ``columns``
of Z and all of D, which is dim_qk for the output and dv, dim_v for dq and dk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .wgmma_knobs import Warpgroups

Scores = Literal["inline", "given"]

SCORES: tuple[str, ...] = ("inline", "given")


@dataclass(frozen=True, kw_only=True)
class ChunkPass:
    """One pass over chunks.

    Attributes:
        columns: columns of Z, of the state and of the output that a CTA takes.
        column_warps: warps along these columns; each owns ``columns / column_warps``.
        depth_warps: warps that share columns, each with its part of D; their outputs meet in shared memory.
        num_stages: shared-memory stages of X, Y and Z.
        scores: ``inline``: X Y^T is computed in the pass, by every CTA; ``given``: it is computed once, by a kernel of
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
class ChunkwiseKnobs:
    """Retention forward, chunk by chunk.

    Attributes:
        chunk: tokens of one step.
        super_chunk: tokens that one CTA walks, a multiple of ``chunk``: their states at the start come from a pass of
            their own. 0: one CTA walks the whole sequence.
        output: the pass.
    """

    chunk: int
    super_chunk: int = 0
    output: ChunkPass

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return self.output.num_threads

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return True

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return f"chunkwise_l{self.chunk}p{self.super_chunk}_{self.output.label}"


@dataclass(frozen=True, kw_only=True)
class WgmmaChunkwiseKnobs(Warpgroups):
    """Retention forward, chunk by chunk, by a kernel of family ``sm90``.

    Some warpgroups have the state for 64 columns of V each; one more computes scores and loads by tensor maps.

    Attributes:
        super_chunk: as in :class:`ChunkwiseKnobs`.
        warpgroups: that have states.
        num_stages: shared-memory stages of Q, K and V.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    super_chunk: int = 0
    warpgroups: int
    num_stages: int
    ctas_per_sm: int = 1

    @property
    def chunk(self) -> int:
        """Tokens of one step."""
        return 64

    @property
    def columns(self) -> int:
        """Columns of V that one CTA takes."""
        return 64 * self.warpgroups

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        tile = f"g{self.warpgroups}s{self.num_stages}b{self.ctas_per_sm}"
        return f"chunkwise_l{self.chunk}p{self.super_chunk}_{tile}"


@dataclass(frozen=True, kw_only=True)
class RecurrentKnobs:
    """Retention forward, token by token: a CTA keeps some columns of a head's state in registers.

    Attributes:
        columns: columns of the state that a CTA takes; four a thread.
        warps: warps of one CTA, which share the state's rows.
        ctas_per_sm: resident CTAs that the compiler must leave registers for.
    """

    columns: int
    warps: int
    ctas_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.warps

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return True

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return f"recurrent_v{self.columns}w{self.warps}b{self.ctas_per_sm}"


@dataclass(frozen=True, kw_only=True)
class RetentionBackwardKnobs:
    """Retention backward: a pass over chunks for each gradient, with states that are computed again.

    Attributes:
        chunk: tokens of one step.
        super_chunk: as in :class:`ChunkwiseKnobs`; the states at its boundaries are the checkpoints.
        dq, dk, dv: the passes.
    """

    chunk: int
    super_chunk: int = 0
    dq: ChunkPass
    dk: ChunkPass
    dv: ChunkPass

    @property
    def passes(self) -> dict[str, ChunkPass]:
        """The passes by name, in the order they run."""
        return {"dq": self.dq, "dk": self.dk, "dv": self.dv}

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest pass."""
        return max(knobs.num_threads for knobs in self.passes.values())

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return True

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        passes = [f"{name}_{knobs.label}" for name, knobs in self.passes.items()]
        return "_".join([f"chunkwise_l{self.chunk}p{self.super_chunk}", *passes])
