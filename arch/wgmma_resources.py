"""What a candidate of family ``sm90`` costs an SM, as pure formulas over its knobs.

``smem_bytes`` is exact and the twin of ``WgmmaForwardTraits::kSmemBytes`` (a test compares the two).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.candidate import Candidate
from ..codegen.wgmma_knobs import WgmmaForwardKnobs
from .forward_resources import ELEMENT_BYTES
from .occupancy import REGISTERS_BESIDE_FRAGMENTS_MIN, KernelNeeds

SWIZZLE_COLUMNS = 64  # head dims are held in whole blocks of so many columns
ALIGNMENT_BYTES = 1024  # of a tile; the start of shared memory may lack it
BARRIER_BYTES = 256
PRODUCER_REGISTERS = {2: 40, 3: 32}  # by multiplying warpgroups
CONSUMER_REGISTERS = {2: 232, 3: 160}


@dataclass(frozen=True, kw_only=True)
class WgmmaShape:
    """A candidate of the family with its knobs at hand.

    Attributes:
        candidate: the candidate.
        knobs: its knobs.
    """

    candidate: Candidate
    knobs: WgmmaForwardKnobs

    @property
    def depth(self) -> int:
        """Columns of Q and K that are multiplied."""
        return whole_columns(self.candidate.class_qk)

    @property
    def columns(self) -> int:
        """Columns of V that one CTA multiplies."""
        per_slice = -(-self.candidate.class_v // self.knobs.v_slices)
        return whole_columns(per_slice)

    @property
    def consumer_registers(self) -> int | None:
        """Registers of a thread that multiplies; None where there are not so many warpgroups."""
        return CONSUMER_REGISTERS.get(self.knobs.warpgroups)

    @property
    def fragment_registers(self) -> int:
        """Registers that a thread's fragments of O, S and P take."""
        return self.columns // 2 + self.knobs.block_n * 3 // 4


def shape_of(candidate: Candidate) -> WgmmaShape | None:
    """The shape of a candidate of the family, or None for those of another."""
    knobs = candidate.knobs
    if not isinstance(knobs, WgmmaForwardKnobs):
        return None
    return WgmmaShape(candidate=candidate, knobs=knobs)


def smem_bytes(shape: WgmmaShape) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    knobs = shape.knobs
    q = knobs.block_m * shape.depth
    stage = knobs.block_n * (shape.depth + shape.columns) + knobs.block_m * knobs.block_n
    tiles = ELEMENT_BYTES * (q + knobs.num_stages * stage)
    return ALIGNMENT_BYTES + tiles + BARRIER_BYTES


def needs(shape: WgmmaShape) -> KernelNeeds:
    """What the kernel takes. Warpgroups trade registers, so fragments are what is left of an even share."""
    groups = shape.knobs.warpgroups
    consumer = shape.fragment_registers + REGISTERS_BESIDE_FRAGMENTS_MIN
    even = (groups * consumer + PRODUCER_REGISTERS.get(groups, 32)) // (groups + 1)
    return KernelNeeds(
        threads=shape.knobs.num_threads,
        ctas_per_sm=1,
        smem_bytes=smem_bytes(shape),
        fragment_registers=max(0, even - REGISTERS_BESIDE_FRAGMENTS_MIN),
    )


def whole_columns(columns: int) -> int:
    """Columns of a head dim in whole blocks, as tiles hold them."""
    return -(-columns // SWIZZLE_COLUMNS) * SWIZZLE_COLUMNS
