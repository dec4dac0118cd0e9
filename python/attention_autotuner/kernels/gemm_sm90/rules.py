"""Which candidates may exist: twins of the ``static_assert``s in gemm_sm90/traits.cuh, and what pays."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass, single_pass
from ..shared.rules import Rule, known, within
from ..shared.sm90_rules import fragments_fit_warpgroup, tma_needs_alignment
from .resources import ROWS, GemmSm90Shape, needs, shape_of

MAX_ROWS = 256  # of one TMA tile


def _block_m_fills_warpgroups(s: GemmSm90Shape) -> str | None:
    least = ROWS * s.sharing
    if s.knobs.block_m % least == 0 and least <= s.knobs.block_m <= MAX_ROWS:
        return None
    return f"block_m must be a multiple of {least} up to {MAX_ROWS}, got {s.knobs.block_m}"


def _cluster_splits_columns(s: GemmSm90Shape) -> str | None:
    if s.knobs.cluster == 1 or (s.knobs.cluster == 2 and s.knobs.block_n % 128 == 0):
        return None
    return f"cluster must be 1, or 2 of whole blocks of 64 columns, got {s.knobs.cluster} of {s.knobs.block_n}"


GEMM_SM90_PREDICATES: dict[str, Rule[GemmSm90Shape]] = {
    "tma_needs_alignment": tma_needs_alignment,
    "block_m_fills_warpgroups": _block_m_fills_warpgroups,
    "block_n_known": known("block_n", (64, 128, 192, 256)),
    "stages_range": within("stages", 2, 8),
    "cluster_splits_columns": _cluster_splits_columns,
    "fragments_fit_warpgroup": fragments_fit_warpgroup,
}


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launch that the knobs size; the one that adds splits up is the same for all."""
    return single_pass(
        candidate, shape_of(candidate), GEMM_SM90_PREDICATES, needs, symbol=r"gemm_sm90I"
    )
