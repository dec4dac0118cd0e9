"""The resources of one kernel on an SM, and the CTAs that an SM holds: arithmetic that knows no operation."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import ArchSpec

# Registers per thread are granted in steps of this (CUDA occupancy calculator).
REGISTER_ALLOCATION_UNIT = 8

# Registers beyond the fragments: addresses, loop state, operands in flight. The first is what compiled kernels need at
# least, the second what ptxas takes when it is not held back (both read off 226 sm_90 builds of the forward kernels,
# nvcc 13.0).
REGISTERS_BESIDE_FRAGMENTS_MIN = 40
REGISTERS_BESIDE_FRAGMENTS_TYPICAL = 80


@dataclass(frozen=True, kw_only=True)
class KernelNeeds:
    """One kernel of a candidate.

    Attributes:
        name: which; empty where the candidate has one kernel only.
        threads: of one CTA.
        ctas_per_sm: the launch bound.
        smem_bytes: dynamic shared memory of one CTA, exact.
        fragment_registers: estimate of what a thread's fragments take through the main loop.
    """

    name: str = ""
    threads: int
    ctas_per_sm: int
    smem_bytes: int
    fragment_registers: int


def least_registers(needs: KernelNeeds) -> int:
    """Registers a thread needs before it spills."""
    return needs.fragment_registers + REGISTERS_BESIDE_FRAGMENTS_MIN


def register_cap(needs: KernelNeeds, spec: ArchSpec, ctas_per_sm: int | None = None) -> int:
    """Registers a thread may use under a launch bound, the kernel's own by default."""
    ctas = needs.ctas_per_sm if ctas_per_sm is None else ctas_per_sm
    fair = spec.registers_per_sm // (needs.threads * ctas)
    granted = fair // REGISTER_ALLOCATION_UNIT * REGISTER_ALLOCATION_UNIT
    return min(spec.max_registers_per_thread, granted)


def registers_per_thread(needs: KernelNeeds, spec: ArchSpec) -> int:
    """Estimate of what ptxas will use."""
    wanted = needs.fragment_registers + REGISTERS_BESIDE_FRAGMENTS_TYPICAL
    return min(wanted, register_cap(needs, spec))


def occupancy(spec: ArchSpec, *, threads: int, registers: int, smem_bytes: int) -> int:
    """CTAs resident on one SM, from threads, registers per thread and shared memory per CTA; 0 if none fits."""
    if smem_bytes > spec.smem_per_block_bytes or registers > spec.max_registers_per_thread:
        return 0
    granted = -(-max(registers, 1) // REGISTER_ALLOCATION_UNIT) * REGISTER_ALLOCATION_UNIT
    by_registers = spec.registers_per_sm // (granted * threads)
    by_smem = spec.smem_per_sm_bytes // (smem_bytes + spec.smem_reserved_per_block_bytes)
    by_threads = spec.max_threads_per_sm // threads
    return min(by_registers, by_smem, by_threads, spec.max_blocks_per_sm)
