"""Resources of retention's recurrent kernel on an SM: a state in registers, four columns a thread, no shared tiles."""

from __future__ import annotations

from dataclasses import dataclass

from ...arch.occupancy import KernelNeeds
from ...core.sizes import FP32_BYTES
from ..shared.passes import launch_needs
from .knobs import RecurrentKnobs

THREAD_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """Recurrent knobs and the padded head dim of q and k."""

    knobs: RecurrentKnobs
    padded_dim_qk: int

    @property
    def state_registers(self) -> int:
        """Registers of a thread for its elements of the state."""
        # A thread holds at least one row where there are groups to spare.
        return THREAD_COLUMNS * -(-self.padded_dim_qk // max(1, row_groups(self.knobs)))


def row_groups(knobs: RecurrentKnobs) -> int:
    """Groups of threads that share the state's rows."""
    return knobs.num_threads * THREAD_COLUMNS // knobs.columns


def needs(shape: RecurrentShape) -> KernelNeeds:
    """Resources that the kernel takes; its shared memory is the warps' sums of one token's output."""
    knobs = shape.knobs
    return launch_needs(knobs, knobs.warps * knobs.columns * FP32_BYTES, shape.state_registers)
