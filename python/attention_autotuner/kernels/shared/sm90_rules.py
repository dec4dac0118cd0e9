"""Rules that all kernels of family ``sm90`` obey: twins of ``static_assert``s that their traits have in common."""

from __future__ import annotations

from .sm90_tiles import Sm90Shape

MAX_MASK_STAGES = 4


def tma_needs_alignment(s: Sm90Shape) -> str | None:
    """TMA descriptors are of tensors whose rows can be read 16 bytes at a time."""
    if s.candidate.copy_bytes == 16:
        return None
    return f"TMA needs tensors aligned to 16 bytes, got {s.candidate.copy_bytes}"


def warpgroups_range(s: Sm90Shape) -> str | None:
    """Registers can be shared out among so many warpgroups."""
    if s.consumer_registers is not None:
        return None
    return f"warpgroups must be one of {tuple(s.registers_by_warpgroups)}, got {s.knobs.warpgroups}"


def mask_stages_range(s: Sm90Shape) -> str | None:
    """A mask has stages where there is one."""
    least, most = (1, MAX_MASK_STAGES) if s.masked else (0, 0)
    if least <= s.knobs.mask_stages <= most:
        return None
    return f"mask_stages must be in {least}..{most}, got {s.knobs.mask_stages}"


def fragments_fit_warpgroup(s: Sm90Shape) -> str | None:
    """A thread has registers for its fragments and for the values beside them."""
    registers = s.consumer_registers or 0
    wanted = s.fragment_registers + s.registers_beside
    if wanted <= registers:
        return None
    return (
        f"needs about {wanted} registers a thread, {s.knobs.warpgroups} warpgroups have {registers}"
    )
