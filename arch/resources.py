"""What a candidate costs an SM, as pure formulas over its knobs: shared memory, registers, resident CTAs.

``smem_bytes`` is exact and the twin of ``ForwardTraits::kSmemBytes`` (a test compares the two); the register counts are
estimates made before the compiler has spoken.
"""

from __future__ import annotations

from ..codegen.candidate import Candidate
from .spec import ArchSpec

ELEMENT_BYTES = 2  # fp16 and bf16
ROW_PADDING = 8  # elements; see templates/include/attention_autotuner/tile_sm80.cuh
REGISTER_ALLOCATION_UNIT = (
    8  # registers per thread are granted in steps of this (CUDA occupancy calculator)
)

# Registers beyond the fragments: addresses, loop state, operands in flight. The first is what compiled kernels need at
# least, the second what ptxas takes when it is not held back (both read off 226 sm_90 builds, nvcc 13.0).
REGISTERS_BESIDE_FRAGMENTS_MIN = 40
REGISTERS_BESIDE_FRAGMENTS_TYPICAL = 80


def padded_rows(candidate: Candidate) -> bool:
    """Whether shared-memory rows are padded, not permuted: where two row tiles of a wide output fill the registers."""
    row_tiles = candidate.forward.block_m // candidate.forward.warps_m // 16
    column_tiles = value_columns(candidate) // candidate.forward.warps_n // 8
    return row_tiles >= 2 and column_tiles >= 14


def value_columns(candidate: Candidate) -> int:
    """Output columns that one CTA computes."""
    return candidate.class_v // candidate.forward.v_slices


def k_slices(candidate: Candidate) -> int:
    """Slices that K's columns arrive in."""
    return candidate.class_qk // candidate.forward.k_slice


def smem_bytes(candidate: Candidate) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    c = candidate
    padding = ROW_PADDING if padded_rows(c) else 0

    def tile_bytes(rows: int, columns: int) -> int:
        return rows * (columns + padding) * ELEMENT_BYTES

    q = tile_bytes(c.forward.block_m, c.class_qk)
    k = c.forward.num_stages * tile_bytes(c.forward.block_n, c.forward.k_slice)
    v_stages = c.forward.num_stages if k_slices(c) == 1 else 1
    v = v_stages * tile_bytes(c.forward.block_n, value_columns(c))
    p = statistics = 0
    if c.forward.warps_n > 1:
        p = tile_bytes(c.forward.block_m, c.forward.block_n)
        statistics = 4 * c.forward.warps_n * c.forward.block_m
    main = (0 if c.forward.q_in_registers else q) + v + k + p + statistics
    return max(main, q, tile_bytes(c.forward.block_m, value_columns(c)))


def fragment_registers(candidate: Candidate) -> int:
    """Registers a thread needs for the O, S and Q fragments that live through the main loop."""
    c = candidate
    row_tiles = c.forward.block_m // c.forward.warps_m // 16
    o = row_tiles * (value_columns(c) // c.forward.warps_n // 8) * 4
    s = row_tiles * (c.forward.block_n // c.forward.warps_n // 8) * 4
    q = row_tiles * (c.class_qk // 16) * 4 if c.forward.q_in_registers else 0
    ahead = (
        s * 3 // 4 if c.forward.qk_ahead else 0
    )  # the next scores grow while these shrink to packed P
    return o + s + q + ahead


def register_cap(candidate: Candidate, spec: ArchSpec) -> int:
    """Registers a thread may use under the candidate's launch bound."""
    fair = spec.registers_per_sm // (candidate.forward.num_threads * candidate.forward.ctas_per_sm)
    return min(
        spec.max_registers_per_thread, fair // REGISTER_ALLOCATION_UNIT * REGISTER_ALLOCATION_UNIT
    )


def registers_per_thread(candidate: Candidate, spec: ArchSpec) -> int:
    """Estimate of what ptxas will use."""
    wanted = fragment_registers(candidate) + REGISTERS_BESIDE_FRAGMENTS_TYPICAL
    return min(wanted, register_cap(candidate, spec))


def occupancy(spec: ArchSpec, *, threads: int, registers: int, smem_bytes: int) -> int:
    """CTAs resident on one SM, from threads, registers per thread and shared memory per CTA; 0 if none fits."""
    if smem_bytes > spec.smem_per_block_bytes or registers > spec.max_registers_per_thread:
        return 0
    granted = -(-max(registers, 1) // REGISTER_ALLOCATION_UNIT) * REGISTER_ALLOCATION_UNIT
    by_registers = spec.registers_per_sm // (granted * threads)
    by_smem = spec.smem_per_sm_bytes // (smem_bytes + spec.smem_reserved_per_block_bytes)
    by_threads = spec.max_threads_per_sm // threads
    return min(by_registers, by_smem, by_threads, spec.max_blocks_per_sm)
