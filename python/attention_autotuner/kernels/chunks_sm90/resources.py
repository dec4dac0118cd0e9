"""Resources that a chunkwise retention candidate of family ``sm90`` takes from an SM, as pure formulas over its knobs.

``smem_bytes`` and the registers are exact and the twins of ``WgmmaChunkTraits`` (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...arch.occupancy import REGISTER_ALLOCATION_UNIT, REGISTERS_BESIDE_FRAGMENTS_MIN, KernelNeeds
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import FP32_BYTES
from ..shared import sm90_tiles
from ..shared.passes import launch_needs
from ..shared.sm90_tiles import Sm90Shape
from ..shared.super_chunks import SuperChunks
from ..shared.workspace import layout_bytes
from .knobs import ChunkwiseSm90Knobs, knobs_of

PART_DEPTH = 256  # of a warpgroup, at most
PIECE_COLUMNS, SLOTS = 128, 11  # of Q and K, where warpgroups have parts of the depth
SCORE_STAGES = 2  # tiles of decayed scores
OUTPUT_REGISTERS = 32  # of a thread
TOKEN_REGISTERS = 16  # V's, transposed and decayed
PACKED_REGISTERS = 8  # a part of the state, rounded
REGISTERS_BESIDE = 32  # at least
AMPLE_REGISTERS_BESIDE = 48
SCORE_REGISTERS = (80, 72)  # of the warpgroup that scores: where there are enough, and else
FACTOR_BYTES = 1024  # of tokens and of outputs
MAX_LAUNCH_REGISTERS, MAX_STATE_REGISTERS = 248, 240
SM_REGISTERS = 65536  # of every GPU that the family runs on


@dataclass(frozen=True, kw_only=True)
class ChunkSm90Shape(Sm90Shape):
    """A candidate of the kernel."""

    knobs: ChunkwiseSm90Knobs

    @property
    def depth_parts(self) -> int:
        """Warpgroups that share columns, each with a part of the depth: of the backward pass only."""
        return 2 if self.candidate.padded_dim_qk > PART_DEPTH and self.knobs.warpgroups == 2 else 1

    @property
    def depth(self) -> int:
        """Columns of Q and K in the MMA."""
        if self.depth_parts > 1:
            return self.depth_parts * PART_DEPTH
        return super().depth

    @property
    def columns(self) -> int:
        """Columns of V that one CTA takes."""
        return self.knobs.columns // self.depth_parts

    @property
    def slices(self) -> int:
        """CTAs that share a stretch."""
        return -(-self.candidate.padded_dim_v // self.columns)

    @property
    def fragment_registers(self) -> int:
        """Registers that the fragments of a thread with a state take."""
        beside = OUTPUT_REGISTERS + TOKEN_REGISTERS + PACKED_REGISTERS
        return self.depth // self.depth_parts // 2 + beside

    @property
    def state_registers(self) -> int:
        """Registers that such a thread gets: warpgroups share out what all have at launch."""
        unit, groups = REGISTER_ALLOCATION_UNIT, self.knobs.warpgroups
        fair = SM_REGISTERS // (self.knobs.num_threads * self.knobs.ctas_per_sm)
        pool = min(fair // unit * unit, MAX_LAUNCH_REGISTERS) * (1 + groups)
        ample, least = SCORE_REGISTERS
        fits = pool - groups * (self.fragment_registers + AMPLE_REGISTERS_BESIDE) >= ample
        mine = (pool - (ample if fits else least)) // groups
        return min(mine // unit * unit, MAX_STATE_REGISTERS)


def shape_of(candidate: Candidate) -> ChunkSm90Shape:
    """The shape of a candidate."""
    return ChunkSm90Shape(candidate=candidate, knobs=knobs_of(candidate))


def smem_bytes(shape: ChunkSm90Shape) -> int:
    """Dynamic shared memory of one CTA, bytes; the pass for states of super-chunks has no more."""
    knobs = shape.knobs
    if shape.depth_parts > 1:  # slots, stages of V, scores, the output, and shares of it in fp32
        columns = SLOTS * PIECE_COLUMNS + 6 * sm90_tiles.SWIZZLE_COLUMNS
    else:
        stage, scores = 2 * shape.depth + knobs.columns, SCORE_STAGES * sm90_tiles.SWIZZLE_COLUMNS
        columns = knobs.num_stages * stage + scores + knobs.columns
    return sm90_tiles.cta_bytes(knobs.chunk * columns, FACTOR_BYTES)


def needs(shape: ChunkSm90Shape) -> KernelNeeds:
    """Resources that the kernel takes. Warpgroups trade registers, so fragments are what is left of an even share."""
    groups = shape.knobs.warpgroups
    wanted = groups * (shape.fragment_registers + REGISTERS_BESIDE) + SCORE_REGISTERS[1]
    fragments = max(0, wanted // (groups + 1) - REGISTERS_BESIDE_FRAGMENTS_MIN)
    return launch_needs(shape.knobs, smem_bytes(shape), fragments)


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of what pieces of super-chunks add to the state, in whole tiles, where there are several super-chunks."""
    shape = shape_of(candidate)
    knobs, heads = shape.knobs, problem.batch * problem.heads_q
    cut = SuperChunks.of(problem.seqlen_q, knobs.chunk, knobs.super_chunk, heads * shape.slices)
    state = FP32_BYTES * shape.depth * shape.slices * shape.columns
    return layout_bytes([heads * cut.slots * state]) if cut.supers > 1 else 0
