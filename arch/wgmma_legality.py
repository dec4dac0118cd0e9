"""Which candidates of family ``sm90`` may exist: twins of the ``static_assert``s in scores_forward_sm90/traits.cuh."""

from __future__ import annotations

from .rules import CLASS_PREDICATES, Broken, Rule, first_broken
from .wgmma_resources import WgmmaShape
from .wgmma_rules import fragments_fit_warpgroup, tensor_maps_need_alignment, warpgroups_range

BLOCK_N = (64, 128)
MAX_STAGES = 4
MAX_COLUMNS = 256  # of one product


def _wgmma_block_n_known(s: WgmmaShape) -> str | None:
    if s.knobs.block_n in BLOCK_N:
        return None
    return f"block_n must be one of {BLOCK_N}, got {s.knobs.block_n}"


def _wgmma_stages_range(s: WgmmaShape) -> str | None:
    if 1 <= s.knobs.num_stages <= MAX_STAGES:
        return None
    return f"num_stages must be in 1..{MAX_STAGES}, got {s.knobs.num_stages}"


def _value_columns_fit_product(s: WgmmaShape) -> str | None:
    if s.knobs.v_slices < 1:
        return f"v_slices must be at least 1, got {s.knobs.v_slices}"
    if s.columns <= MAX_COLUMNS:
        return None
    return f"a CTA multiplies at most {MAX_COLUMNS} columns of V, got {s.columns}"


WGMMA_PREDICATES: dict[str, Rule[WgmmaShape]] = {
    "tensor_maps_need_alignment": tensor_maps_need_alignment,
    "warpgroups_range": warpgroups_range,
    "wgmma_block_n_known": _wgmma_block_n_known,
    "wgmma_stages_range": _wgmma_stages_range,
    "value_columns_fit_product": _value_columns_fit_product,
    "fragments_fit_warpgroup": fragments_fit_warpgroup,
}


def kernel_broken(shape: WgmmaShape) -> Broken | None:
    """The first rule of the kernel headers that a candidate breaks."""
    broken = first_broken(CLASS_PREDICATES, shape.candidate)
    return broken or first_broken(WGMMA_PREDICATES, shape)
