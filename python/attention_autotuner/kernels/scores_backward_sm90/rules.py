"""Which passes of family ``sm90`` may exist: twins of the ``static_assert``s in scores_backward_sm90/traits.cuh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.candidate import Candidate
from ..shared.passes import Pass
from ..shared.rules import Rule, known, within
from ..shared.sm90_rules import fragments_fit_warpgroup, tma_needs_alignment, warpgroups_range
from ..shared.sm90_tiles import BARRIER_BYTES, BLOCK_COLUMNS, MAX_COLUMNS, SWIZZLE_COLUMNS
from .knobs import BackwardSm90Knobs
from .resources import PassShape, Sm90PassShape, StoredPassShape, needs, shapes

MAX_STAGES = 3
MAX_STORED_STAGES = 8
MAX_STORED_REGISTERS = 128  # of the sums of a thread
MMA_ROWS = 64
MAX_SLICE_STAGES = 8
MMA_DEPTH = 16
MAX_EXCHANGE_STAGES = 2
STEP_TILES = 3  # of a ring of shared scores, that MMAs in flight read


def _sliced_depth_has_no_ping_pong(s: Sm90PassShape) -> str | None:
    if s.knobs.depth_slices == 1 or not s.knobs.ping_pong:
        return None
    return f"MMAs of {s.knobs.depth_slices} depth slices cannot ping-pong: they wait for each other"


def _result_columns_fit_mma(s: Sm90PassShape) -> str | None:
    if s.knobs.slices < 1:
        return f"slices must be at least 1, got {s.knobs.slices}"
    if s.columns <= MAX_COLUMNS:
        return None
    return f"a CTA computes at most {MAX_COLUMNS} columns of a result, got {s.columns}"


def _slices_divide_depth(s: Sm90PassShape) -> str | None:
    if s.knobs.depth_slices >= 1 and s.depth % (SWIZZLE_COLUMNS * s.knobs.depth_slices) == 0:
        return None
    return f"depth_slices must be whole blocks of {SWIZZLE_COLUMNS} columns, got {s.knobs.depth_slices} of {s.depth}"


def _slice_stages_range(s: Sm90PassShape) -> str | None:
    least = 2 if s.knobs.depth_slices == 1 else 3
    if least <= s.knobs.slice_stages <= MAX_SLICE_STAGES:
        return None
    return f"slice_stages must be in {least}..{MAX_SLICE_STAGES}, got {s.knobs.slice_stages}"


def _kept_depth_range(s: Sm90PassShape) -> str | None:
    kept = s.knobs.kept_depth
    whole = 0 < kept < s.depth and kept % SWIZZLE_COLUMNS == 0
    if kept == 0 or (whole and not s.knobs.exchange_stages):
        return None
    return f"kept_depth must be blocks of {SWIZZLE_COLUMNS} below {s.depth}, got {kept}"


def _two_slices_share_scores(s: Sm90PassShape) -> str | None:
    if not s.knobs.exchange_stages or (s.result == "dv" and s.knobs.slices == 2):
        return None
    return f"two slices of dv exchange scores, got {s.knobs.slices} of {s.result}"


def _shared_scores_have_no_ping_pong(s: Sm90PassShape) -> str | None:
    if not s.knobs.exchange_stages or not s.knobs.ping_pong:
        return None
    return "warpgroups that share scores with another CTA cannot ping-pong: they wait for it"


def _shared_ring_holds_step(s: Sm90PassShape) -> str | None:
    least = STEP_TILES * s.knobs.depth_slices
    if not s.knobs.exchange_stages or s.knobs.slice_stages >= least:
        return None
    return f"a step holds {least} slots of the ring, got {s.knobs.slice_stages}"


def _shared_slices_fit_mma(s: Sm90PassShape) -> str | None:
    if not s.knobs.exchange_stages or s.knobs.depth_slices < 1:
        return None
    if s.knobs.block_columns % (MMA_DEPTH * s.knobs.depth_slices) == 0:
        return None
    return f"slices of {s.knobs.block_columns} rows must be whole MMAs, got {s.knobs.depth_slices}"


def _barriers_fit(s: Sm90PassShape) -> str | None:
    if 8 * s.barriers <= BARRIER_BYTES:
        return None
    return f"{s.barriers} barriers need {8 * s.barriers} bytes, there are {BARRIER_BYTES}"


PASS_SM90_PREDICATES: dict[str, Rule[Sm90PassShape]] = {
    "tma_needs_alignment": tma_needs_alignment,
    "warpgroups_range": warpgroups_range,
    "block_columns_known": known("block_columns", BLOCK_COLUMNS),
    "pass_stages_range": within("num_stages", 1, MAX_STAGES),
    "sliced_depth_has_no_ping_pong": _sliced_depth_has_no_ping_pong,
    "result_columns_fit_mma": _result_columns_fit_mma,
    "slices_divide_depth": _slices_divide_depth,
    "slice_stages_range": _slice_stages_range,
    "fragments_fit_warpgroup": fragments_fit_warpgroup,
    "kept_depth_range": _kept_depth_range,
    "exchange_stages_range": within("exchange_stages", 0, MAX_EXCHANGE_STAGES),
    "two_slices_share_scores": _two_slices_share_scores,
    "shared_scores_have_no_ping_pong": _shared_scores_have_no_ping_pong,
    "shared_ring_holds_step": _shared_ring_holds_step,
    "shared_slices_fit_mma": _shared_slices_fit_mma,
    "barriers_fit": _barriers_fit,
}


def _stored_rows_fit_mma(s: StoredPassShape) -> str | None:
    rows = s.knobs.warpgroup_rows
    if rows >= MMA_ROWS and rows % MMA_ROWS == 0:
        return None
    return f"warpgroup_rows must be a multiple of {MMA_ROWS}, got {rows}"


def _stored_fragments_fit_warpgroup(s: StoredPassShape) -> str | None:
    if s.fragment_registers <= MAX_STORED_REGISTERS:
        return None
    return (
        f"{s.knobs.warpgroup_rows} rows by {s.columns} columns of dK take {s.fragment_registers} "
        f"registers a thread, a pass has {MAX_STORED_REGISTERS}"
    )


STORED_SM90_PREDICATES: dict[str, Rule[StoredPassShape]] = {
    "tma_needs_alignment": tma_needs_alignment,
    "stored_warpgroups_known": known("warpgroups", tuple(StoredPassShape.registers_by_warpgroups)),
    "stored_rows_fit_mma": _stored_rows_fit_mma,
    "stored_stages_range": within("num_stages", 2, MAX_STORED_STAGES),
    "stored_fragments_fit_warpgroup": _stored_fragments_fit_warpgroup,
}


STORED_SYMBOL = r"scores_backward_sm90_storedI"
SYMBOL = r"scores_backward_sm90I.*6ResultE{}E"
RESULTS = ("dq", "dk", "dv")  # attention_autotuner::Result, in the order of its values


def pass_of(shape: PassShape) -> Pass:
    """The launch of a pass."""
    rules: Mapping[str, Rule[Any]] = PASS_SM90_PREDICATES
    symbol = SYMBOL.format(RESULTS.index(shape.result))
    if isinstance(shape, StoredPassShape):
        rules, symbol = STORED_SM90_PREDICATES, STORED_SYMBOL
    return Pass(
        kernel=BackwardSm90Knobs.kernel, subject=shape, rules=rules, needs_of=needs, symbol=symbol
    )


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate, in the order they run."""
    return tuple(map(pass_of, shapes(candidate)))
