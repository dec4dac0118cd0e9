"""Resources of the passes of a backward candidate of family ``sm90`` on an SM, as pure formulas over their knobs.

``smem_bytes`` is exact and the twin of ``WgmmaPassTraits::kSmemBytes`` (a test compares the two).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...arch.h100 import H100_SPEC
from ...arch.occupancy import REGISTERS_BESIDE_FRAGMENTS_MIN, KernelNeeds
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES
from ..shared import sm90_tiles
from ..shared.passes import launch_needs
from ..shared.sm90_tiles import Sm90Shape
from ..shared.workspace import backward_bytes, count_head_splits, key_blocks, layout_bytes
from .knobs import Sm90Pass, StoredPass, knobs_of

FACTOR_BYTES = 4
PRODUCER_REGISTERS = 40

Result = Literal["dq", "dk", "dv"]


@dataclass(frozen=True, kw_only=True)
class Sm90PassShape(Sm90Shape):
    """A pass with the candidate that it is of.

    Attributes:
        result: the gradient that the pass computes.
    """

    result: Result
    knobs: Sm90Pass
    registers_by_warpgroups: ClassVar[Mapping[int, int]] = {2: 232, 3: 152}

    @property
    def depth(self) -> int:
        """Columns that the first MMA sums over; where r has a gradient, dQ and dK need those of Q K^T too."""
        qk, v = self.candidate.padded_dim_qk, self.candidate.padded_dim_v
        return sm90_tiles.whole_columns(qk if self.result == "dv" else max(qk, v))

    @property
    def columns(self) -> int:
        """Columns of the result that one CTA computes."""
        qk, v = self.candidate.padded_dim_qk, self.candidate.padded_dim_v
        padded = v if self.result == "dv" else qk
        return sm90_tiles.whole_columns(-(-padded // self.knobs.slices))

    @property
    def fragment_registers(self) -> int:
        """Registers that a thread's fragments take: the result, scores, P and what it keeps of the left tile."""
        knobs = self.knobs
        scores = knobs.block_columns // 2 + knobs.step_columns // 4
        return self.columns // 2 + scores + knobs.kept_depth // 4

    @property
    def kept_registers(self) -> int:
        """Registers of a thread that the first MMA's left tensor takes, if it stays there (twin of ``kKeepsX``)."""
        kept = self.depth // 4
        taken = self.fragment_registers + kept + REGISTERS_BESIDE_FRAGMENTS_MIN
        fits = taken <= (self.consumer_registers or 0)
        stays = self.depth == sm90_tiles.SWIZZLE_COLUMNS and not self.knobs.exchange_stages
        return kept if stays and fits else 0

    @property
    def barriers(self) -> int:
        """Barriers in shared memory."""
        knobs = self.knobs
        if knobs.exchange_stages:
            stages = 2 * (knobs.num_stages + knobs.exchange_stages) * knobs.warpgroups
        else:
            stages = 4 * knobs.num_stages
        return 2 + 2 * knobs.slice_stages + stages


@dataclass(frozen=True, kw_only=True)
class StoredPassShape(Sm90Shape):
    """The pass for dK from stored scores, with the candidate that it is of: the twin of ``StoredPassSm90Traits``."""

    result: ClassVar[Result] = "dk"
    knobs: StoredPass
    registers_by_warpgroups: ClassVar[Mapping[int, int]] = {2: 232}
    kept_registers: ClassVar[int] = 0

    @property
    def columns(self) -> int:
        """Columns of dK that one CTA computes: all."""
        return sm90_tiles.whole_columns(self.candidate.padded_dim_qk)

    @property
    def fragment_registers(self) -> int:
        """Registers that a thread's sums take."""
        return self.knobs.warpgroup_rows // 64 * self.columns // 2

    @property
    def stage_elements(self) -> int:
        """Elements of a stage: scores and Q."""
        return self.knobs.block_columns * (self.knobs.block_rows + self.columns)


PassShape = Sm90PassShape | StoredPassShape


def computing_shapes(candidate: Candidate) -> tuple[Sm90PassShape, ...]:
    """The passes of a candidate that compute scores, in the order they run."""
    results: tuple[Result, ...] = ("dq", "dk", "dv")
    passes = knobs_of(candidate).passes
    return tuple(
        Sm90PassShape(candidate=candidate, result=result, knobs=passes[result])
        for result in results
        if result in passes
    )


def shapes(candidate: Candidate) -> tuple[PassShape, ...]:
    """The passes of a candidate, in the order they run."""
    stored = knobs_of(candidate).stored_dk
    if stored is None:
        return computing_shapes(candidate)
    dq, dv = computing_shapes(candidate)
    return (dq, StoredPassShape(candidate=candidate, knobs=stored), dv)


def smem_bytes(shape: PassShape) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    if isinstance(shape, StoredPassShape):
        return sm90_tiles.cta_bytes(shape.knobs.num_stages * shape.stage_elements)
    knobs = shape.knobs
    depth_slice = knobs.block_columns * (shape.depth // knobs.depth_slices)
    mask = knobs.block_columns * knobs.block_rows
    factors = 0 if shape.result == "dq" else knobs.num_stages * knobs.block_columns * FACTOR_BYTES
    if knobs.exchange_stages:
        depth_slice = max(depth_slice, knobs.block_columns // knobs.depth_slices * shape.columns)
        stages = (knobs.num_stages + knobs.exchange_stages) * mask
        factors *= knobs.warpgroups
    else:
        stages = knobs.num_stages * (knobs.block_columns * shape.columns + mask)
    tiles = knobs.block_rows * shape.depth + knobs.slice_stages * depth_slice + stages
    return sm90_tiles.cta_bytes(tiles, factors)


def needs(shape: PassShape) -> KernelNeeds:
    """Resources that the kernel takes. Warpgroups trade registers, so fragments are what is left of an even share."""
    fragments = shape.fragment_registers + shape.kept_registers
    even = shape.even_fragments(fragments, PRODUCER_REGISTERS)
    return launch_needs(shape.knobs, smem_bytes(shape), even, shape.result)


ENOUGH_CTAS = H100_SPEC.num_sms  # CTAs are persistent, one a SM


@dataclass(frozen=True, kw_only=True)
class ScoreBands:
    """The heads and batches whose scores are stored at a time: the twin of ``ScoreBands`` in score_bands.cuh.

    Attributes:
        count: bands of a launch.
        num_bytes: of the scores of one, where r is a constant.
    """

    count: int
    num_bytes: int

    @classmethod
    def of(cls, problem: Problem, candidate: Candidate) -> ScoreBands:
        """The bands of a problem, for a candidate that stores scores."""
        knobs = knobs_of(candidate)
        group = problem.heads_q // problem.heads_kv
        blocks_q = -(-problem.seqlen_q // knobs.dq.block_rows)
        tiles_k = -(-problem.seqlen_k // knobs.dk_rows) * head_splits(problem, candidate)
        wanted = max(1, ENOUGH_CTAS // max(1, min(blocks_q * group, tiles_k)))
        batches = _even_share(problem.batch, wanted)
        heads = 1
        if batches == problem.batch:
            heads = _even_share(problem.heads_kv, max(1, wanted // batches))
        columns = -(-problem.seqlen_k // knobs.dq.block_columns) * knobs.dq.block_columns
        scores = blocks_q * knobs.dq.block_rows * columns
        return cls(
            count=-(-problem.heads_kv // heads) * -(-problem.batch // batches),
            num_bytes=ELEMENT_BYTES * heads * group * batches * scores,
        )


def _even_share(count: int, most: int) -> int:
    """The greatest of equal parts of a count that have at most so many."""
    return -(-count // -(-count // min(count, most)))


def head_splits(problem: Problem, candidate: Candidate) -> int:
    """CTAs that share a block of keys."""
    blocks = key_blocks(problem, knobs_of(candidate).dk_rows)
    return count_head_splits(problem, blocks, ENOUGH_CTAS)


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of LSE and delta, of partial dK and dV, and of stored scores where r is a constant."""
    usual = backward_bytes(problem, head_splits(problem, candidate))
    if knobs_of(candidate).stored_dk is None:
        return usual
    bands = ScoreBands.of(problem, candidate)
    return layout_bytes([usual, min(bands.count, 2) * bands.num_bytes])
