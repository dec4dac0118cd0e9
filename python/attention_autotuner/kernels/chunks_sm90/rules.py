"""Which chunkwise retention candidates of family ``sm90`` may exist: twins of chunks_sm90/traits.cuh's asserts."""

from __future__ import annotations

from ..shared.rules import Rule
from ..shared.sm90_rules import tma_needs_alignment
from .resources import REGISTERS_BESIDE, ChunkSm90Shape

WARPGROUPS = (1, 2, 3)
STAGES = (2, 3, 4)
CTAS_PER_SM = (1, 2)


def _state_warpgroups_range(s: ChunkSm90Shape) -> str | None:
    if s.knobs.warpgroups in WARPGROUPS:
        return None
    return f"warpgroups must be one of {WARPGROUPS}, got {s.knobs.warpgroups}"


def _wgmma_chunk_stages_range(s: ChunkSm90Shape) -> str | None:
    if s.knobs.num_stages in STAGES:
        return None
    return f"num_stages must be one of {STAGES}, got {s.knobs.num_stages}"


def _wgmma_ctas_range(s: ChunkSm90Shape) -> str | None:
    if s.knobs.ctas_per_sm in CTAS_PER_SM:
        return None
    return f"ctas_per_sm must be one of {CTAS_PER_SM}, got {s.knobs.ctas_per_sm}"


def _super_chunk_multiple_of_wgmma_chunk(s: ChunkSm90Shape) -> str | None:
    if s.knobs.super_chunk % s.knobs.chunk == 0:
        return None
    return f"super_chunk must be a multiple of {s.knobs.chunk}, got {s.knobs.super_chunk}"


def _state_fits_warpgroup(s: ChunkSm90Shape) -> str | None:
    wanted, available = s.fragment_registers + REGISTERS_BESIDE, s.state_registers
    if wanted <= available:
        return None
    return (
        f"needs about {wanted} registers a thread, {s.knobs.ctas_per_sm} CTAs of "
        f"{s.knobs.warpgroups} warpgroups leave {available}"
    )


CHUNK_SM90_PREDICATES: dict[str, Rule[ChunkSm90Shape]] = {
    "tma_needs_alignment": tma_needs_alignment,
    "state_warpgroups_range": _state_warpgroups_range,
    "wgmma_chunk_stages_range": _wgmma_chunk_stages_range,
    "wgmma_ctas_range": _wgmma_ctas_range,
    "super_chunk_multiple_of_wgmma_chunk": _super_chunk_multiple_of_wgmma_chunk,
    "state_fits_warpgroup": _state_fits_warpgroup,
}
