"""Rules that all kernels of family ``sm90`` obey: twins of ``static_assert``s that their traits have in common."""

from __future__ import annotations

from typing import Protocol

from ...arch.occupancy import REGISTERS_BESIDE_FRAGMENTS_MIN
from ...core.candidate import Candidate


class OfCandidate(Protocol):
    """The shape of one of a candidate's kernels."""

    @property
    def candidate(self) -> Candidate:
        """The candidate."""


class HasWarpgroups(Protocol):
    """Knobs of a kernel with consumer warpgroups."""

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""


class OverScores(Protocol):
    """The shape of a kernel over scores."""

    @property
    def knobs(self) -> HasWarpgroups:
        """Its knobs."""

    @property
    def allowed_warpgroups(self) -> tuple[int, ...]:
        """Counts of consumer warpgroups that registers can be shared out among."""

    @property
    def consumer_registers(self) -> int | None:
        """Registers of a consumer thread; None where there are not so many warpgroups."""

    @property
    def fragment_registers(self) -> int:
        """Registers that a thread's fragments take."""


def tma_needs_alignment(s: OfCandidate) -> str | None:
    """TMA descriptors are of tensors whose rows can be read 16 bytes at a time."""
    if s.candidate.copy_bytes == 16:
        return None
    return f"TMA needs tensors aligned to 16 bytes, got {s.candidate.copy_bytes}"


def warpgroups_range(s: OverScores) -> str | None:
    """Registers can be shared out among so many warpgroups."""
    if s.consumer_registers is not None:
        return None
    return f"warpgroups must be one of {s.allowed_warpgroups}, got {s.knobs.warpgroups}"


def fragments_fit_warpgroup(s: OverScores) -> str | None:
    """A thread has registers for its fragments and for the values beside them."""
    registers = s.consumer_registers or 0
    wanted = s.fragment_registers + REGISTERS_BESIDE_FRAGMENTS_MIN
    if wanted <= registers:
        return None
    return (
        f"needs about {wanted} registers a thread, {s.knobs.warpgroups} warpgroups have {registers}"
    )
