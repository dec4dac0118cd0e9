"""Which chunkwise retention candidates of family ``sm90`` may exist: twins of chunks_sm90/traits.cuh's asserts."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass, single_pass
from ..shared.rules import Rule, known
from ..shared.sm90_rules import tma_needs_alignment
from .resources import REGISTERS_BESIDE, ChunkSm90Shape, needs, shape_of

WARPGROUPS = (1, 2, 3)
STAGES = (2, 3, 4)
CTAS_PER_SM = (1, 2)


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
    "state_warpgroups_range": known("warpgroups", WARPGROUPS),
    "wgmma_chunk_stages_range": known("num_stages", STAGES),
    "wgmma_ctas_range": known("ctas_per_sm", CTAS_PER_SM),
    "super_chunk_multiple_of_wgmma_chunk": _super_chunk_multiple_of_wgmma_chunk,
    "state_fits_warpgroup": _state_fits_warpgroup,
}


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launch of a candidate that its knobs size; that for the states of super-chunks takes no more."""
    return single_pass(candidate, shape_of(candidate), CHUNK_SM90_PREDICATES, needs)
