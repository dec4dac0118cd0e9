"""Resources that a toy candidate takes from an SM: registers and nothing shared."""

from __future__ import annotations

from attention_autotuner.arch.occupancy import KernelNeeds
from attention_autotuner.core.candidate import Candidate

from .knobs import knobs_of

LANES = 32


def columns(candidate: Candidate) -> int:
    """Columns of the output that a lane has."""
    return -(-candidate.padded_dim_v // LANES)


def needs(candidate: Candidate) -> KernelNeeds:
    """Resources that the one kernel takes."""
    knobs = knobs_of(candidate)
    return KernelNeeds(
        threads=knobs.num_threads,
        ctas_per_sm=knobs.ctas_per_sm,
        smem_bytes=0,
        fragment_registers=columns(candidate),
    )
