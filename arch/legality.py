"""Which candidates may exist: named predicates, each giving the reason when it says no.

``KERNEL_PREDICATES`` are what the kernel headers can compile at all; each is the twin of the ``static_assert`` of the
same name in ``templates/include/attention_autotuner/attention_forward_traits.cuh`` (a test compares the names).
``ARCH_PREDICATES`` are what one GPU has room for, and ``TASTE_PREDICATES`` cut what never pays, so that the space stays
small enough to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..codegen.candidate import Candidate
from ..codegen.problem import MAX_DIM_QK, MAX_DIM_V
from . import resources
from .spec import ArchSpec

MIN_WARPS = 2  # a pass of a copy must fill whole groups of 8 rows
MAX_WARPS = 16
MAX_STAGES = 4
MIN_SHARED_P_COLUMNS = 192  # output columns of a CTA from which P may go through shared memory
MIN_SLICE_COLUMNS = 128  # output columns of one of several value slices
MAX_ROW_BARRIERS = 15  # named barriers 1..15; 0 is __syncthreads


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A candidate that a policy will not offer.

    Attributes:
        config: the candidate's fields.
        predicate: the name of the rule that said no.
        reason: the constraint with the values that broke it.
    """

    config: dict[str, Any]
    predicate: str
    reason: str


KernelRule = Callable[[Candidate], "str | None"]
ArchRule = Callable[[Candidate, ArchSpec], "str | None"]


def _class_qk_range(c: Candidate) -> str | None:
    if c.class_qk % 16 == 0 and 16 <= c.class_qk <= MAX_DIM_QK:
        return None
    return f"class_qk must be a multiple of 16 in 16..{MAX_DIM_QK}, got {c.class_qk}"


def _class_v_range(c: Candidate) -> str | None:
    if c.class_v % 16 == 0 and 16 <= c.class_v <= MAX_DIM_V:
        return None
    return f"class_v must be a multiple of 16 in 16..{MAX_DIM_V}, got {c.class_v}"


def _warps_range(c: Candidate) -> str | None:
    if MIN_WARPS <= c.forward.warps_m * c.forward.warps_n <= MAX_WARPS:
        return None
    return f"warps_m * warps_n must be in {MIN_WARPS}..{MAX_WARPS}, got {c.forward.warps_m} * {c.forward.warps_n}"


def _row_barriers_available(c: Candidate) -> str | None:
    if c.forward.warps_n == 1 or c.forward.warps_m <= MAX_ROW_BARRIERS:
        return None
    return f"warps_m must be at most {MAX_ROW_BARRIERS} with warps_n > 1, got {c.forward.warps_m}"


def _block_m_divides_among_warps(c: Candidate) -> str | None:
    if c.forward.block_m % (16 * c.forward.warps_m) == 0:
        return None
    return f"block_m must be a multiple of 16 * warps_m, got {c.forward.block_m} for {c.forward.warps_m} warps"


def _block_n_divides_among_warps(c: Candidate) -> str | None:
    if c.forward.block_n % (16 * c.forward.warps_n) == 0:
        return None
    return f"block_n must be a multiple of 16 * warps_n, got {c.forward.block_n} for {c.forward.warps_n} warps"


def _v_slices_divide_class_v(c: Candidate) -> str | None:
    if c.class_v % c.forward.v_slices == 0:
        return None
    return f"v_slices must divide class_v, got {c.forward.v_slices} and {c.class_v}"


def _value_columns_divide_among_warps(c: Candidate) -> str | None:
    if resources.value_columns(c) % (16 * c.forward.warps_n) == 0:
        return None
    return (
        f"class_v / v_slices must be a multiple of 16 * warps_n, got {resources.value_columns(c)} "
        f"for {c.forward.warps_n} warps"
    )


def _k_slice_divides_class_qk(c: Candidate) -> str | None:
    if c.forward.k_slice % 16 == 0 and c.class_qk % c.forward.k_slice == 0:
        return None
    return f"k_slice must be a multiple of 16 that divides class_qk, got {c.forward.k_slice} and {c.class_qk}"


def _num_stages_range(c: Candidate) -> str | None:
    if 1 <= c.forward.num_stages <= MAX_STAGES:
        return None
    return f"num_stages must be in 1..{MAX_STAGES}, got {c.forward.num_stages}"


def _qk_ahead_needs_two_whole_stages(c: Candidate) -> str | None:
    if not c.forward.qk_ahead or (
        c.forward.num_stages == 2 and c.forward.k_slice == c.class_qk and c.forward.warps_n == 1
    ):
        return None
    return (
        "qk_ahead needs num_stages == 2, unsliced K and warps_n == 1, got "
        f"num_stages {c.forward.num_stages}, k_slice {c.forward.k_slice} of {c.class_qk}, warps_n {c.forward.warps_n}"
    )


def _sliced_k_needs_two_stages(c: Candidate) -> str | None:
    if c.forward.k_slice == c.class_qk or c.forward.num_stages >= 2:
        return None
    return f"sliced K needs num_stages >= 2, got {c.forward.num_stages}"


def _copy_bytes_known(c: Candidate) -> str | None:
    return None if c.copy_bytes in (2, 16) else f"copy_bytes must be 2 or 16, got {c.copy_bytes}"


def _smem_fits_block(c: Candidate, spec: ArchSpec) -> str | None:
    needed = resources.smem_bytes(c)
    if needed <= spec.smem_per_block_bytes:
        return None
    return f"needs {needed} bytes of shared memory, {spec.name} gives a CTA {spec.smem_per_block_bytes}"


def _ctas_fit_sm(c: Candidate, spec: ArchSpec) -> str | None:
    needed = c.forward.ctas_per_sm * (resources.smem_bytes(c) + spec.smem_reserved_per_block_bytes)
    if needed > spec.smem_per_sm_bytes:
        return (
            f"{c.forward.ctas_per_sm} CTAs need {needed} bytes of shared memory, an SM of {spec.name} has "
            f"{spec.smem_per_sm_bytes}"
        )
    threads = c.forward.ctas_per_sm * c.forward.num_threads
    if threads > spec.max_threads_per_sm:
        return f"{c.forward.ctas_per_sm} CTAs have {threads} threads, {spec.name} holds {spec.max_threads_per_sm}"
    return None


def _registers_fit(c: Candidate, spec: ArchSpec) -> str | None:
    needed = resources.fragment_registers(c) + resources.REGISTERS_BESIDE_FRAGMENTS_MIN
    cap = resources.register_cap(c, spec)
    if needed <= cap:
        return None
    ctas, threads = c.forward.ctas_per_sm, c.forward.num_threads
    return f"needs about {needed} registers a thread, {ctas} CTAs of {threads} threads leave {cap}"


def _launch_bound_matters(c: Candidate, spec: ArchSpec) -> str | None:
    ctas = c.forward.ctas_per_sm
    if ctas == 1:
        return None
    cap = resources.register_cap(c, spec)
    fewer = replace(c, knobs=replace(c.forward, ctas_per_sm=ctas - 1))
    if cap < resources.register_cap(fewer, spec):
        return None
    return f"{ctas} CTAs leave as many registers a thread ({cap}) as {ctas - 1}: the same kernel"


def _p_in_registers_where_it_fits(c: Candidate) -> str | None:
    if c.forward.warps_n == 1 or resources.value_columns(c) >= MIN_SHARED_P_COLUMNS:
        return None
    return f"P goes through shared memory only for 192 or more value columns, got {resources.value_columns(c)}"


def _slices_only_for_wide_heads(c: Candidate) -> str | None:
    if c.forward.v_slices > 1 and resources.value_columns(c) < MIN_SLICE_COLUMNS:
        return f"value slices narrower than 128 columns repeat Q K^T too often, got {resources.value_columns(c)}"
    if c.forward.k_slice < c.class_qk and c.class_qk < 128:
        return f"K is sliced only from class_qk 128 on, got {c.class_qk}"
    return None


def _rows_per_warp_known(c: Candidate) -> str | None:
    rows = c.forward.block_m // c.forward.warps_m
    return None if rows in (16, 32) else f"a warp owns 16 or 32 rows, got {rows}"


KERNEL_PREDICATES: dict[str, KernelRule] = {
    "class_qk_range": _class_qk_range,
    "class_v_range": _class_v_range,
    "warps_range": _warps_range,
    "row_barriers_available": _row_barriers_available,
    "block_m_divides_among_warps": _block_m_divides_among_warps,
    "block_n_divides_among_warps": _block_n_divides_among_warps,
    "v_slices_divide_class_v": _v_slices_divide_class_v,
    "value_columns_divide_among_warps": _value_columns_divide_among_warps,
    "k_slice_divides_class_qk": _k_slice_divides_class_qk,
    "num_stages_range": _num_stages_range,
    "qk_ahead_needs_two_whole_stages": _qk_ahead_needs_two_whole_stages,
    "sliced_k_needs_two_stages": _sliced_k_needs_two_stages,
    "copy_bytes_known": _copy_bytes_known,
}
TASTE_PREDICATES: dict[str, KernelRule] = {
    "rows_per_warp_known": _rows_per_warp_known,
    "p_in_registers_where_it_fits": _p_in_registers_where_it_fits,
    "slices_only_for_wide_heads": _slices_only_for_wide_heads,
}
ARCH_PREDICATES: dict[str, ArchRule] = {
    "launch_bound_matters": _launch_bound_matters,
    "smem_fits_block": _smem_fits_block,
    "ctas_fit_sm": _ctas_fit_sm,
    "registers_fit": _registers_fit,
}


def check(candidate: Candidate, spec: ArchSpec) -> Rejection | None:
    """The first rule that a candidate breaks on a GPU, or None."""
    for name, rule in (*KERNEL_PREDICATES.items(), *TASTE_PREDICATES.items()):
        reason = rule(candidate)
        if reason is not None:
            return Rejection(config=candidate.config, predicate=name, reason=reason)
    for name, arch_rule in ARCH_PREDICATES.items():
        reason = arch_rule(candidate, spec)
        if reason is not None:
            return Rejection(config=candidate.config, predicate=name, reason=reason)
    return None
