"""Which candidates of family ``sm90`` may exist: twins of the ``static_assert``s in scores_forward_sm90/traits.cuh."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass, single_pass
from ..shared.rules import Rule, known, within
from ..shared.sm90_rules import fragments_fit_warpgroup, tma_needs_alignment, warpgroups_range
from ..shared.sm90_tiles import BLOCK_COLUMNS, MAX_COLUMNS
from .resources import ForwardSm90Shape, needs, shape_of

MAX_STAGES = 4


def _value_columns_fit_mma(s: ForwardSm90Shape) -> str | None:
    if s.knobs.v_slices < 1:
        return f"v_slices must be at least 1, got {s.knobs.v_slices}"
    if s.columns <= MAX_COLUMNS:
        return None
    return f"a CTA takes at most {MAX_COLUMNS} columns of V, got {s.columns}"


FORWARD_SM90_PREDICATES: dict[str, Rule[ForwardSm90Shape]] = {
    "tma_needs_alignment": tma_needs_alignment,
    "warpgroups_range": warpgroups_range,
    "wgmma_block_n_known": known("block_n", BLOCK_COLUMNS),
    "wgmma_stages_range": within("num_stages", 1, MAX_STAGES),
    "value_columns_fit_mma": _value_columns_fit_mma,
    "fragments_fit_warpgroup": fragments_fit_warpgroup,
}


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The one launch of a candidate."""
    return single_pass(candidate, shape_of(candidate), FORWARD_SM90_PREDICATES, needs)
