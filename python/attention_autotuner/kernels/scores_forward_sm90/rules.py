"""Which candidates of family ``sm90`` may exist: twins of the ``static_assert``s in scores_forward_sm90/traits.cuh."""

from __future__ import annotations

from ..shared.rules import Rule
from ..shared.sm90_rules import (
    fragments_fit_warpgroup,
    tma_needs_alignment,
    warpgroups_range,
)
from ..shared.sm90_tiles import BLOCK_COLUMNS, MAX_COLUMNS
from .resources import ForwardSm90Shape

MAX_STAGES = 4


def _wgmma_block_n_known(s: ForwardSm90Shape) -> str | None:
    if s.knobs.block_n in BLOCK_COLUMNS:
        return None
    return f"block_n must be one of {BLOCK_COLUMNS}, got {s.knobs.block_n}"


def _wgmma_stages_range(s: ForwardSm90Shape) -> str | None:
    if 1 <= s.knobs.num_stages <= MAX_STAGES:
        return None
    return f"num_stages must be in 1..{MAX_STAGES}, got {s.knobs.num_stages}"


def _value_columns_fit_mma(s: ForwardSm90Shape) -> str | None:
    if s.knobs.v_slices < 1:
        return f"v_slices must be at least 1, got {s.knobs.v_slices}"
    if s.columns <= MAX_COLUMNS:
        return None
    return f"a CTA takes at most {MAX_COLUMNS} columns of V, got {s.columns}"


FORWARD_SM90_PREDICATES: dict[str, Rule[ForwardSm90Shape]] = {
    "tma_needs_alignment": tma_needs_alignment,
    "warpgroups_range": warpgroups_range,
    "wgmma_block_n_known": _wgmma_block_n_known,
    "wgmma_stages_range": _wgmma_stages_range,
    "value_columns_fit_mma": _value_columns_fit_mma,
    "fragments_fit_warpgroup": fragments_fit_warpgroup,
}
