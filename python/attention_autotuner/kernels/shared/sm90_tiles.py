"""Tiles in shared memory as all kernels of family ``sm90`` hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...arch.occupancy import REGISTERS_BESIDE_FRAGMENTS_MIN
from ...core.candidate import Candidate
from ...core.modifications import PACKED
from ...core.sizes import ELEMENT_BYTES

SWIZZLE_COLUMNS = 64  # head dims are held in whole blocks of so many columns
ALIGNMENT_BYTES = 1024  # of a tile; the start of shared memory may lack it
BARRIER_BYTES = 256
MAX_COLUMNS = 256  # of one WGMMA
BLOCK_COLUMNS = (64, 128)  # of the scores of one step


def whole_columns(columns: int) -> int:
    """Columns of a head dim in whole blocks, as tiles hold them."""
    return -(-columns // SWIZZLE_COLUMNS) * SWIZZLE_COLUMNS


def cta_bytes(elements: int, more: int = 0) -> int:
    """Dynamic shared memory of a CTA: its tiles of so many elements, barriers, and more bytes."""
    return ALIGNMENT_BYTES + ELEMENT_BYTES * elements + BARRIER_BYTES + more


@dataclass(frozen=True, kw_only=True)
class Sm90Shape:
    """A kernel of the family with the candidate that it is of.

    Attributes:
        candidate: the candidate.
        knobs: of the kernel.
        registers_by_warpgroups: of a consumer thread, by consumer warpgroups.
    """

    candidate: Candidate
    knobs: Any
    registers_by_warpgroups: ClassVar[Mapping[int, int]] = {}

    @property
    def packed(self) -> bool:
        """True where a launch has sequences of their own lengths."""
        return PACKED in self.candidate.modifications

    @property
    def masked(self) -> bool:
        """True where scores are multiplied with an explicit mask, whose tiles stream beside the others."""
        return self.candidate.score == "masked"

    @property
    def depth(self) -> int:
        """Columns of Q and K as tiles hold them."""
        return whole_columns(self.candidate.padded_dim_qk)

    @property
    def registers_beside(self) -> int:
        """Registers that a thread needs at least beside its fragments."""
        return REGISTERS_BESIDE_FRAGMENTS_MIN

    @property
    def consumer_registers(self) -> int | None:
        """Registers of a consumer thread; None where there are not so many warpgroups."""
        return self.registers_by_warpgroups.get(self.knobs.warpgroups)

    @property
    def fragment_registers(self) -> int:
        """Registers that a thread's fragments take."""
        raise NotImplementedError

    def even_fragments(self, fragments: int, producer: int) -> int:
        """Fragment registers of an even share: warpgroups trade registers, so the compiler's limit is the mean."""
        groups: int = self.knobs.warpgroups
        consumer = fragments + REGISTERS_BESIDE_FRAGMENTS_MIN
        even = (groups * consumer + producer) // (groups + 1)
        return max(0, even - REGISTERS_BESIDE_FRAGMENTS_MIN)
