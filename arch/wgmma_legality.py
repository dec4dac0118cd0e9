"""Which candidates of family ``sm90`` may exist: twins of the ``static_assert``s in retnet_forward_traits_sm90.cuh."""

from __future__ import annotations

from .occupancy import REGISTERS_BESIDE_FRAGMENTS_MIN
from .rules import CLASS_PREDICATES, Broken, Rule, first_broken
from .wgmma_resources import CONSUMER_REGISTERS, WgmmaShape

BLOCK_N = (64, 128)
MAX_STAGES = 4
MAX_COLUMNS = 256  # of one product


def _tensor_maps_need_alignment(s: WgmmaShape) -> str | None:
    if s.candidate.copy_bytes == 16:
        return None
    return f"tensor maps need tensors aligned to 16 bytes, got {s.candidate.copy_bytes}"


def _warpgroups_range(s: WgmmaShape) -> str | None:
    if s.knobs.warpgroups in CONSUMER_REGISTERS:
        return None
    return f"warpgroups must be one of {tuple(CONSUMER_REGISTERS)}, got {s.knobs.warpgroups}"


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


def _fragments_fit_warpgroup(s: WgmmaShape) -> str | None:
    registers = CONSUMER_REGISTERS.get(s.knobs.warpgroups, 0)
    wanted = s.fragment_registers + REGISTERS_BESIDE_FRAGMENTS_MIN
    if wanted <= registers:
        return None
    return (
        f"needs about {wanted} registers a thread, {s.knobs.warpgroups} warpgroups have {registers}"
    )


WGMMA_PREDICATES: dict[str, Rule[WgmmaShape]] = {
    "tensor_maps_need_alignment": _tensor_maps_need_alignment,
    "warpgroups_range": _warpgroups_range,
    "wgmma_block_n_known": _wgmma_block_n_known,
    "wgmma_stages_range": _wgmma_stages_range,
    "value_columns_fit_product": _value_columns_fit_product,
    "fragments_fit_warpgroup": _fragments_fit_warpgroup,
}


def kernel_broken(shape: WgmmaShape) -> Broken | None:
    """The first rule of the kernel headers that a candidate breaks."""
    broken = first_broken(CLASS_PREDICATES, shape.candidate)
    return broken or first_broken(WGMMA_PREDICATES, shape)
