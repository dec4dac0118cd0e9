"""Which recurrent candidates may exist: twins of the ``static_assert``s of the same names in the kernel's header."""

from __future__ import annotations

from ...core.candidate import Candidate
from ..shared.passes import Pass, single_pass
from ..shared.rules import Rule, state_fits_registers, within
from .knobs import knobs_of
from .resources import THREAD_COLUMNS, RecurrentShape, needs, row_groups

MAX_WARPS = 32
MAX_COLUMNS = 128  # a warp's, four a thread


def _recurrent_columns_share_warps(s: RecurrentShape) -> str | None:
    columns = s.knobs.columns
    whole = columns >= THREAD_COLUMNS and columns % THREAD_COLUMNS == 0
    if whole and columns <= MAX_COLUMNS and 32 % (columns // THREAD_COLUMNS) == 0:
        return None
    return (
        f"columns must be {THREAD_COLUMNS} times a divisor of 32, at most {MAX_COLUMNS}, got "
        f"{columns}"
    )


def _recurrent_rows_divide(s: RecurrentShape) -> str | None:
    groups = row_groups(s.knobs)
    whole = s.knobs.num_threads * THREAD_COLUMNS % s.knobs.columns == 0
    if groups >= 1 and whole and s.padded_dim_qk % groups == 0:
        return None
    return f"groups of threads must divide padded_dim_qk, got {groups} and {s.padded_dim_qk}"


RECURRENT_PREDICATES: dict[str, Rule[RecurrentShape]] = {
    "recurrent_warps_range": within("warps", 1, MAX_WARPS),
    "recurrent_columns_share_warps": _recurrent_columns_share_warps,
    "recurrent_rows_divide": _recurrent_rows_divide,
    "recurrent_state_fits_registers": state_fits_registers,
}


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The one launch of a candidate."""
    shape = RecurrentShape(knobs=knobs_of(candidate), padded_dim_qk=candidate.padded_dim_qk)
    return single_pass(candidate, shape, RECURRENT_PREDICATES, needs)
