"""What retention's recurrent kernel costs an SM: a state in registers, four columns a thread, and no shared tiles."""

from __future__ import annotations

from ..codegen.candidate import Candidate
from ..codegen.retention_knobs import RecurrentKnobs
from .occupancy import KernelNeeds

THREAD_COLUMNS = 4
SUM_BYTES = 4  # fp32


def row_groups(knobs: RecurrentKnobs) -> int:
    """Groups of threads that share the state's rows."""
    return knobs.num_threads * THREAD_COLUMNS // knobs.columns


def thread_rows(class_qk: int, knobs: RecurrentKnobs) -> int:
    """Rows of the state that one thread holds; at least 1 where there are groups to spare."""
    return -(-class_qk // max(1, row_groups(knobs)))


def needs(candidate: Candidate, knobs: RecurrentKnobs) -> KernelNeeds:
    """What the candidate's kernel takes; its shared memory is the warps' sums of one token's output."""
    return KernelNeeds(
        threads=knobs.num_threads,
        ctas_per_sm=knobs.ctas_per_sm,
        smem_bytes=knobs.warps * knobs.columns * SUM_BYTES,
        fragment_registers=THREAD_COLUMNS * thread_rows(candidate.class_qk, knobs),
    )
