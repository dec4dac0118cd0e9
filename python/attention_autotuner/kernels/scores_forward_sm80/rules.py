"""Which forward candidates may exist: named predicates, each giving the reason of a rejection.

``KERNEL_PREDICATES`` are what the kernel headers can compile at all; each is the twin of the ``static_assert`` of the
same name in ``templates/include/attention_autotuner/scores_forward_sm80/traits.cuh`` (a test compares the names).
``PRUNING_PREDICATES`` cut what never pays, so that the space stays small enough to rank.
"""

from __future__ import annotations

from ...core.candidate import Candidate
from ...core.modifications import PACKED
from ..chunks_sm80.rules import chunk_pass
from ..shared.passes import Pass
from ..shared.rules import CLASS_PREDICATES, COPY_PREDICATES, Rule, divides, product_within, within
from .knobs import knobs_of
from .resources import needs, value_columns

MIN_WARPS = 2  # a pass of a copy must fill whole groups of 8 rows
MAX_WARPS = 16
MAX_STAGES = 4
MIN_SHARED_P_COLUMNS = 192  # output columns of a CTA from which P may go through shared memory
MIN_SLICE_COLUMNS = 128  # output columns of one of several value slices
MIN_ODD_DIM = 400  # padded value head dim from which a row block's output takes too many registers to stay whole
FEW_QUERIES = ("pack_gqa", "split_kv")  # knobs for them
MAX_ROW_BARRIERS = 15  # named barriers 1..15; 0 is __syncthreads


def _row_barriers_available(c: Candidate) -> str | None:
    if knobs_of(c).warps_n == 1 or knobs_of(c).warps_m <= MAX_ROW_BARRIERS:
        return None
    return f"warps_m must be at most {MAX_ROW_BARRIERS} with warps_n > 1, got {knobs_of(c).warps_m}"


def _v_slices_divide_padded_dim_v(c: Candidate) -> str | None:
    if c.padded_dim_v % knobs_of(c).v_slices == 0:
        return None
    return f"v_slices must divide padded_dim_v, got {knobs_of(c).v_slices} and {c.padded_dim_v}"


def _value_columns_divide_among_warps(c: Candidate) -> str | None:
    if value_columns(c) % (16 * knobs_of(c).warps_n) == 0:
        return None
    return (
        f"padded_dim_v / v_slices must be a multiple of 16 * warps_n, got {value_columns(c)} "
        f"for {knobs_of(c).warps_n} warps"
    )


def _k_slice_divides_padded_dim_qk(c: Candidate) -> str | None:
    if knobs_of(c).k_slice % 16 == 0 and c.padded_dim_qk % knobs_of(c).k_slice == 0:
        return None
    return (
        f"k_slice must be a multiple of 16 that divides padded_dim_qk, got {knobs_of(c).k_slice} and "
        f"{c.padded_dim_qk}"
    )


def _qk_ahead_needs_two_whole_stages(c: Candidate) -> str | None:
    knobs = knobs_of(c)
    whole = knobs.num_stages == 2 and knobs.k_slice == c.padded_dim_qk and knobs.warps_n == 1
    if whole or not knobs.qk_ahead:
        return None
    return (
        "qk_ahead needs num_stages == 2, unsliced K and warps_n == 1, got "
        f"num_stages {knobs.num_stages}, k_slice {knobs.k_slice} of {c.padded_dim_qk}, warps_n {knobs.warps_n}"
    )


def _sliced_k_needs_two_stages(c: Candidate) -> str | None:
    if knobs_of(c).k_slice == c.padded_dim_qk or knobs_of(c).num_stages >= 2:
        return None
    return f"sliced K needs num_stages >= 2, got {knobs_of(c).num_stages}"


def _softmax_alone(c: Candidate) -> str | None:
    knobs = [name for name in FEW_QUERIES if getattr(knobs_of(c), name)]
    return f"{' and '.join(knobs)} need a softmax" if knobs and c.score != "softmax" else None


def _p_in_registers_where_it_fits(c: Candidate) -> str | None:
    if knobs_of(c).split_kv:
        return None  # few rows need no more than one warp along them
    if knobs_of(c).warps_n == 1 or value_columns(c) >= MIN_SHARED_P_COLUMNS:
        return None
    return (
        f"P goes through shared memory only for 192 or more value columns, got {value_columns(c)}"
    )


def narrow_slices(padded_dim_v: int) -> int | None:
    """The fewest value slices of a padded head dim too wide for one, whose halves are no multiples of 16; else None."""
    if padded_dim_v < MIN_ODD_DIM or padded_dim_v % 32 == 0:
        return None
    return next(s for s in range(2, padded_dim_v) if padded_dim_v % (16 * s) == 0)


def _slices_only_for_wide_heads(c: Candidate) -> str | None:
    knobs, columns = knobs_of(c), value_columns(c)
    sliced = knobs.v_slices not in (1, narrow_slices(c.padded_dim_v))
    if sliced and columns < MIN_SLICE_COLUMNS:
        return f"value slices narrower than 128 columns repeat Q K^T too often, got {columns}"
    if knobs.k_slice < c.padded_dim_qk and c.padded_dim_qk < 128:
        return f"K is sliced only from padded_dim_qk 128 on, got {c.padded_dim_qk}"
    return None


def _rows_per_warp_known(c: Candidate) -> str | None:
    rows = knobs_of(c).block_m // knobs_of(c).warps_m
    return None if rows in (16, 32) else f"a warp owns 16 or 32 rows, got {rows}"


def _packed_tiles_are_dispatched(c: Candidate) -> str | None:
    if PACKED not in c.modifications or not knobs_of(c).persistent:
        return None
    return "tiles of packed sequences differ too much for a fixed share of each CTA, got persistent=True"


KERNEL_PREDICATES: dict[str, Rule[Candidate]] = {
    **CLASS_PREDICATES,
    "warps_range": product_within("warps_m", "warps_n", MIN_WARPS, MAX_WARPS),
    "row_barriers_available": _row_barriers_available,
    "block_m_divides_among_warps": divides("block_m", "warps_m", "warps"),
    "block_n_divides_among_warps": divides("block_n", "warps_n", "warps"),
    "v_slices_divide_padded_dim_v": _v_slices_divide_padded_dim_v,
    "value_columns_divide_among_warps": _value_columns_divide_among_warps,
    "k_slice_divides_padded_dim_qk": _k_slice_divides_padded_dim_qk,
    "num_stages_range": within("num_stages", 1, MAX_STAGES),
    "qk_ahead_needs_two_whole_stages": _qk_ahead_needs_two_whole_stages,
    "sliced_k_needs_two_stages": _sliced_k_needs_two_stages,
    "softmax_alone": _softmax_alone,
    **COPY_PREDICATES,
}
PRUNING_PREDICATES: dict[str, Rule[Candidate]] = {
    "rows_per_warp_known": _rows_per_warp_known,
    "p_in_registers_where_it_fits": _p_in_registers_where_it_fits,
    "slices_only_for_wide_heads": _slices_only_for_wide_heads,
    "packed_tiles_are_dispatched": _packed_tiles_are_dispatched,
}


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate, in the order they run."""
    knobs = knobs_of(candidate)
    rows = Pass(kernel=knobs.kernel, subject=candidate, rules=KERNEL_PREDICATES, needs_of=needs)
    if knobs.states is None or knobs.chunk is None:
        return (rows,)
    return (rows, chunk_pass(candidate, "states", knobs.states, knobs.chunk, 0))
