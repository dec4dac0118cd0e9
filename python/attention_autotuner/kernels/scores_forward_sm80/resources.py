"""Resources that a forward candidate takes from an SM, as pure formulas over its knobs.

``smem_bytes`` is exact and the twin of ``ForwardTraits::kSmemBytes`` (a test compares the two); the register count is
an estimate made before the compiler's report.
"""

from __future__ import annotations

from ...arch.occupancy import KernelNeeds
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES
from ..shared.split_kv import queries_are_few, split_bytes
from ..shared.super_chunks import ENOUGH_PIECES, SuperChunks
from ..shared.workspace import layout_bytes, span_bytes, states_bytes
from .knobs import knobs_of

FEW_QUERIES = 129  # fewer wait for their keys
ROW_PADDING = 8  # elements; see templates/include/attention_autotuner/common/tile.cuh


def keys_stream(problem: Problem) -> bool:
    """True for attention of few queries, whose time is that of reading K and V."""
    return problem.score == "softmax" and queries_are_few(problem, FEW_QUERIES)


def value_columns(candidate: Candidate) -> int:
    """Output columns that one CTA computes."""
    return candidate.padded_dim_v // knobs_of(candidate).v_slices


def k_slices(candidate: Candidate) -> int:
    """Slices that K's columns arrive in."""
    return candidate.padded_dim_qk // knobs_of(candidate).k_slice


def padded_rows(candidate: Candidate) -> bool:
    """True where shared-memory rows are padded, not permuted: two row tiles of a wide output fill the registers."""
    knobs = knobs_of(candidate)
    row_tiles = knobs.block_m // knobs.warps_m // 16
    column_tiles = value_columns(candidate) // knobs.warps_n // 8
    return row_tiles >= 2 and column_tiles >= 14


def smem_bytes(candidate: Candidate) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    knobs = knobs_of(candidate)
    padding = ROW_PADDING if padded_rows(candidate) else 0

    def tile_bytes(rows: int, columns: int) -> int:
        return rows * (columns + padding) * ELEMENT_BYTES

    q = tile_bytes(knobs.block_m, candidate.padded_dim_qk)
    k = knobs.num_stages * tile_bytes(knobs.block_n, knobs.k_slice)
    v_stages = knobs.num_stages if k_slices(candidate) == 1 else 1
    v = v_stages * tile_bytes(knobs.block_n, value_columns(candidate))
    p = row_values = 0
    if knobs.warps_n > 1:
        p = tile_bytes(knobs.block_m, knobs.block_n)
        row_values = 4 * knobs.warps_n * knobs.block_m
    mask = 0
    if candidate.mask == "explicit":
        mask = v_stages * tile_bytes(knobs.block_m, knobs.block_n)
    main = (0 if knobs.q_in_registers else q) + v + k + mask + p + row_values
    return max(main, q, tile_bytes(knobs.block_m, value_columns(candidate)))


def fragment_registers(candidate: Candidate) -> int:
    """Registers a thread needs for the O, S and Q fragments that live through the main loop."""
    knobs = knobs_of(candidate)
    row_tiles = knobs.block_m // knobs.warps_m // 16
    o = row_tiles * (value_columns(candidate) // knobs.warps_n // 8) * 4
    s = row_tiles * (knobs.block_n // knobs.warps_n // 8) * 4
    q = row_tiles * (candidate.padded_dim_qk // 16) * 4 if knobs.q_in_registers else 0
    # The next scores grow while these shrink to packed P.
    ahead = s * 3 // 4 if knobs.qk_ahead else 0
    return o + s + q + ahead


def needs(candidate: Candidate) -> KernelNeeds:
    """Resources that the kernel over blocks of rows takes."""
    knobs = knobs_of(candidate)
    return KernelNeeds(
        name="" if knobs.states is None else "rows",
        threads=knobs.row_threads,
        ctas_per_sm=knobs.ctas_per_sm,
        smem_bytes=smem_bytes(candidate),
        fragment_registers=fragment_registers(candidate),
    )


SUPER_CHUNK = 512  # tokens; see ParallelEntry in scores_forward_sm80/retention_entry.cuh


def workspace_bytes(problem: Problem, candidate: Candidate, *, final_state: bool = False) -> int:
    """Bytes of the results of splits, or of the states of super-chunks, from which retention's final one is made.

    Args:
        problem: gives the sizes.
        candidate: of any operation.
        final_state: whether it is wanted.
    """
    knobs, chunk = knobs_of(candidate), knobs_of(candidate).chunk
    if knobs.split_kv or problem.spanned:
        split = split_bytes(problem, candidate.padded_dim_v, knobs)
        return layout_bytes([*split, span_bytes(problem)])
    if not final_state or chunk is None:
        return 0
    cut = SuperChunks.of(problem.seqlen_q, chunk, SUPER_CHUNK, ENOUGH_PIECES)
    return layout_bytes([states_bytes(problem, cut)])
