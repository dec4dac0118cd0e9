"""Which passes of family ``sm90`` may exist: twins of the ``static_assert``s in scores_backward_sm90/traits.cuh."""

from __future__ import annotations

from .rules import CLASS_PREDICATES, Broken, Rule, first_broken
from .wgmma_backward_resources import WgmmaPassShape
from .wgmma_legality import BLOCK_N, MAX_COLUMNS
from .wgmma_resources import BARRIER_BYTES, SWIZZLE_COLUMNS
from .wgmma_rules import fragments_fit_warpgroup, tensor_maps_need_alignment, warpgroups_range

MAX_STAGES = 3
MAX_SLOTS = 8


def _block_columns_known(s: WgmmaPassShape) -> str | None:
    if s.knobs.block_columns in BLOCK_N:
        return None
    return f"block_columns must be one of {BLOCK_N}, got {s.knobs.block_columns}"


def _pass_stages_range(s: WgmmaPassShape) -> str | None:
    if 1 <= s.knobs.num_stages <= MAX_STAGES:
        return None
    return f"num_stages must be in 1..{MAX_STAGES}, got {s.knobs.num_stages}"


def _parts_have_no_turns(s: WgmmaPassShape) -> str | None:
    if s.knobs.parts == 1 or not s.knobs.turns:
        return None
    return f"products of {s.knobs.parts} parts cannot be issued in turns: they wait for each other"


def _result_columns_fit_product(s: WgmmaPassShape) -> str | None:
    if s.knobs.slices < 1:
        return f"slices must be at least 1, got {s.knobs.slices}"
    if s.columns <= MAX_COLUMNS:
        return None
    return f"a CTA computes at most {MAX_COLUMNS} columns of a result, got {s.columns}"


def _parts_divide_depth(s: WgmmaPassShape) -> str | None:
    if s.knobs.parts >= 1 and s.depth % (SWIZZLE_COLUMNS * s.knobs.parts) == 0:
        return None
    return f"parts must be of whole blocks of {SWIZZLE_COLUMNS} columns, got {s.knobs.parts} of {s.depth}"


def _part_slots_range(s: WgmmaPassShape) -> str | None:
    least = 2 if s.knobs.parts == 1 else 3
    if least <= s.knobs.part_slots <= MAX_SLOTS:
        return None
    return f"part_slots must be in {least}..{MAX_SLOTS}, got {s.knobs.part_slots}"


def _barriers_have_room(s: WgmmaPassShape) -> str | None:
    if 8 * s.barriers <= BARRIER_BYTES:
        return None
    return f"{s.barriers} barriers need {8 * s.barriers} bytes, there are {BARRIER_BYTES}"


WGMMA_PASS_PREDICATES: dict[str, Rule[WgmmaPassShape]] = {
    "tensor_maps_need_alignment": tensor_maps_need_alignment,
    "warpgroups_range": warpgroups_range,
    "block_columns_known": _block_columns_known,
    "pass_stages_range": _pass_stages_range,
    "parts_have_no_turns": _parts_have_no_turns,
    "result_columns_fit_product": _result_columns_fit_product,
    "parts_divide_depth": _parts_divide_depth,
    "part_slots_range": _part_slots_range,
    "fragments_fit_warpgroup": fragments_fit_warpgroup,
    "barriers_have_room": _barriers_have_room,
}


def pass_broken(shape: WgmmaPassShape) -> Broken | None:
    """The first rule of the kernel headers that a pass breaks."""
    broken = first_broken(CLASS_PREDICATES, shape.candidate)
    return broken or first_broken(WGMMA_PASS_PREDICATES, shape)
