"""Which passes of family ``sm90`` may exist: twins of the ``static_assert``s in scores_backward_sm90/traits.cuh."""

from __future__ import annotations

from ..shared.rules import Rule
from ..shared.sm90_rules import (
    fragments_fit_warpgroup,
    tensor_maps_need_alignment,
    warpgroups_range,
)
from ..shared.sm90_tiles import BARRIER_BYTES, BLOCK_COLUMNS, MAX_COLUMNS, SWIZZLE_COLUMNS
from .resources import Sm90PassShape

MAX_STAGES = 3
MAX_SLOTS = 8


def _block_columns_known(s: Sm90PassShape) -> str | None:
    if s.knobs.block_columns in BLOCK_COLUMNS:
        return None
    return f"block_columns must be one of {BLOCK_COLUMNS}, got {s.knobs.block_columns}"


def _pass_stages_range(s: Sm90PassShape) -> str | None:
    if 1 <= s.knobs.num_stages <= MAX_STAGES:
        return None
    return f"num_stages must be in 1..{MAX_STAGES}, got {s.knobs.num_stages}"


def _parts_have_no_turns(s: Sm90PassShape) -> str | None:
    if s.knobs.parts == 1 or not s.knobs.turns:
        return None
    return f"products of {s.knobs.parts} parts cannot be issued in turns: they wait for each other"


def _result_columns_fit_product(s: Sm90PassShape) -> str | None:
    if s.knobs.slices < 1:
        return f"slices must be at least 1, got {s.knobs.slices}"
    if s.columns <= MAX_COLUMNS:
        return None
    return f"a CTA computes at most {MAX_COLUMNS} columns of a result, got {s.columns}"


def _parts_divide_depth(s: Sm90PassShape) -> str | None:
    if s.knobs.parts >= 1 and s.depth % (SWIZZLE_COLUMNS * s.knobs.parts) == 0:
        return None
    return f"parts must be of whole blocks of {SWIZZLE_COLUMNS} columns, got {s.knobs.parts} of {s.depth}"


def _part_slots_range(s: Sm90PassShape) -> str | None:
    least = 2 if s.knobs.parts == 1 else 3
    if least <= s.knobs.part_slots <= MAX_SLOTS:
        return None
    return f"part_slots must be in {least}..{MAX_SLOTS}, got {s.knobs.part_slots}"


def _barriers_have_room(s: Sm90PassShape) -> str | None:
    if 8 * s.barriers <= BARRIER_BYTES:
        return None
    return f"{s.barriers} barriers need {8 * s.barriers} bytes, there are {BARRIER_BYTES}"


PASS_SM90_PREDICATES: dict[str, Rule[Sm90PassShape]] = {
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
