"""Resources that a candidate of family ``sm90`` takes from an SM, as pure formulas over its knobs.

``smem_bytes`` is exact and the twin of ``WgmmaForwardTraits::kSmemBytes`` (a test compares the two).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...arch.occupancy import KernelNeeds
from ...core.candidate import Candidate
from ..shared import sm90_tiles
from ..shared.passes import launch_needs
from ..shared.sm90_tiles import Sm90Shape
from .knobs import ForwardSm90Knobs, knobs_of

PRODUCER_REGISTERS = {2: 40, 3: 32}  # by consumer warpgroups


@dataclass(frozen=True, kw_only=True)
class ForwardSm90Shape(Sm90Shape):
    """A candidate of the kernel."""

    knobs: ForwardSm90Knobs
    registers_by_warpgroups: ClassVar[Mapping[int, int]] = {2: 232, 3: 160}

    @property
    def depth(self) -> int:
        """Columns of Q and K in the MMA."""
        return sm90_tiles.whole_columns(self.candidate.padded_dim_qk)

    @property
    def columns(self) -> int:
        """Columns of V of one CTA."""
        per_slice = -(-self.candidate.padded_dim_v // self.knobs.v_slices)
        return sm90_tiles.whole_columns(per_slice)

    @property
    def fragment_registers(self) -> int:
        """Registers that a thread's fragments of O, S and P take."""
        return self.columns // 2 + self.knobs.block_n * 3 // 4


def shape_of(candidate: Candidate) -> ForwardSm90Shape:
    """The shape of a candidate."""
    return ForwardSm90Shape(candidate=candidate, knobs=knobs_of(candidate))


def smem_bytes(shape: ForwardSm90Shape) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    knobs = shape.knobs
    q = knobs.block_m * shape.depth
    stage = knobs.block_n * (shape.depth + shape.columns) + knobs.block_m * knobs.block_n
    tiles = sm90_tiles.ELEMENT_BYTES * (q + knobs.num_stages * stage)
    return sm90_tiles.ALIGNMENT_BYTES + tiles + sm90_tiles.BARRIER_BYTES


def needs(shape: ForwardSm90Shape) -> KernelNeeds:
    """Resources that the kernel takes. Warpgroups trade registers, so fragments are what is left of an even share."""
    producer = PRODUCER_REGISTERS.get(shape.knobs.warpgroups, 32)
    even = shape.even_fragments(shape.fragment_registers, producer)
    return launch_needs(shape.knobs, smem_bytes(shape), even)
