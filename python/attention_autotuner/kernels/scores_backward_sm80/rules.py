"""Which passes of backward candidates may exist: named predicates, each giving the reason of a rejection.

They are what the kernel headers can compile at all; each is the twin of the ``static_assert`` of the same name in
``templates/include/attention_autotuner/scores_backward_sm80/traits.cuh`` (a test compares the names).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.candidate import Candidate
from ..shared.passes import Pass
from ..shared.rules import Rule, divides, multiple_of_16, product_within, within
from .knobs import BackwardKnobs
from .resources import KeyShape, PassShape, RowShape, needs, shapes

MAX_BLOCK_M = 128
MAX_BLOCK_COLUMNS = 128
MAX_PAIRS = 8
MAX_BARRIERS = 15  # named barriers 1..15; 0 is __syncthreads
MAX_KEY_STAGES = 3
MAX_ROW_STAGES = 2
MIN_WARPS = 2  # a pass of a copy must fill whole groups of 8 rows
MAX_WARPS = 16
MAX_COLUMN_WARPS = 2


def _keys_query_subtiles_divide(s: KeyShape) -> str | None:
    subtiles, pairs = s.knobs.query_subtiles, s.knobs.warp_pairs
    whole = s.knobs.block_m % (16 * subtiles) == 0
    if whole and pairs * subtiles <= MAX_BARRIERS and (subtiles == 1 or s.knobs.num_stages < 3):
        return None
    return (
        f"query_subtiles must divide block_m by multiples of 16, be 1 with 3 stages, and times warp_pairs "
        f"be at most {MAX_BARRIERS}, got {subtiles} for block_m {s.knobs.block_m}, {pairs} pairs and "
        f"{s.knobs.num_stages} stages"
    )


def _rows_block_columns_divides_among_warps(s: RowShape) -> str | None:
    columns, warps = s.knobs.block_columns, s.knobs.column_warps
    if columns % (16 * warps) == 0 and columns <= MAX_BLOCK_COLUMNS:
        return None
    return (
        f"block_columns must be a multiple of 16 * column_warps up to {MAX_BLOCK_COLUMNS}, got "
        f"{columns} for {warps} column warps"
    )


def _rows_slices_divide_padded_dim(s: RowShape) -> str | None:
    slices, columns = s.knobs.slices, s.result_columns
    even = slices * columns == s.result_dim
    # Only dV reads its slice alone, so only there may the last slice reach beyond the padded head dim.
    if even or (s.name == "dv" and (slices - 1) * columns < s.result_dim):
        return None
    return (
        f"slices must share {s.result_dim} columns of {s.name} by whole tiles of 16, got {slices}"
    )


KEY_PREDICATES: dict[str, Rule[KeyShape]] = {
    "keys_block_m_multiple_of_16": multiple_of_16("block_m", MAX_BLOCK_M),
    "keys_warps_range": within("warp_pairs", 1, MAX_PAIRS),
    "keys_block_n_divides_among_pairs": divides("block_n", "warp_pairs", "pairs"),
    "keys_num_stages_range": within("num_stages", 1, MAX_KEY_STAGES),
    "keys_query_subtiles_divide": _keys_query_subtiles_divide,
}
ROW_PREDICATES: dict[str, Rule[RowShape]] = {
    "rows_warps_range": product_within("warps", "column_warps", MIN_WARPS, MAX_WARPS),
    "rows_column_warps_range": within("column_warps", 1, MAX_COLUMN_WARPS),
    "rows_block_rows_divides_among_warps": divides("block_rows", "warps", "warps"),
    "rows_block_columns_divides_among_warps": _rows_block_columns_divides_among_warps,
    "rows_num_stages_range": within("num_stages", 1, MAX_ROW_STAGES),
    "rows_slices_divide_padded_dim": _rows_slices_divide_padded_dim,
}


# Lb0: the kernels whose CTAs do not share a group of query heads; the others are for problems with few CTAs.
KEYS_SYMBOL = r"backward_keysI.*Lb0E"
ROWS_SYMBOL = r"backward_rowsI.*6ResultE{}E.*Lb0E"
RESULTS = ("dq", "dk", "dv")  # attention_autotuner::Result, in the order of its values


def pass_of(shape: PassShape) -> Pass:
    """The launch of a pass."""
    is_keys = isinstance(shape, KeyShape)
    rules: Mapping[str, Rule[Any]] = KEY_PREDICATES if is_keys else ROW_PREDICATES
    symbol = KEYS_SYMBOL if is_keys else ROWS_SYMBOL.format(RESULTS.index(shape.name))
    return Pass(
        kernel=BackwardKnobs.kernel, subject=shape, rules=rules, needs_of=needs, symbol=symbol
    )


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate, in the order they run."""
    return tuple(map(pass_of, shapes(candidate)))
