"""Resources that the matrix product of family ``sm90`` takes: the twin of ``GemmSm90Traits``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...arch.occupancy import KernelNeeds
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import FP32_BYTES
from ..shared.passes import launch_needs
from ..shared.sm90_tiles import Sm90Shape, cta_bytes
from .knobs import GemmSm90Knobs, knobs_of

BLOCK_K = 64  # of one stage
PRODUCER_REGISTERS = 24
ROWS = 64  # of one MMA


@dataclass(frozen=True, kw_only=True)
class GemmSm90Shape(Sm90Shape):
    """A candidate of the kernel."""

    knobs: GemmSm90Knobs
    registers_by_warpgroups: ClassVar[Mapping[int, int]] = {2: 240}

    @property
    def sharing(self) -> int:
        """Warpgroups of a tile."""
        return 1 if self.knobs.schedule == "ping_pong" else self.knobs.warpgroups

    @property
    def fragment_registers(self) -> int:
        """Registers that a thread's sums take."""
        return self.knobs.block_m * self.knobs.block_n // (128 * self.sharing)


def shape_of(candidate: Candidate) -> GemmSm90Shape:
    """The shape of a candidate."""
    return GemmSm90Shape(candidate=candidate, knobs=knobs_of(candidate))


def smem_bytes(knobs: GemmSm90Knobs) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    stage = (knobs.block_m + knobs.block_n) * BLOCK_K
    columns = 128 if knobs.block_n % 128 == 0 else 64
    stored = knobs.warpgroups * ROWS * columns if knobs.output == "tma" else 0
    return cta_bytes(knobs.stages * stage + stored)


def needs(shape: GemmSm90Shape) -> KernelNeeds:
    """Resources that the kernel takes. Warpgroups trade registers, so fragments are what is left of an even share."""
    fragments = shape.even_fragments(shape.fragment_registers, PRODUCER_REGISTERS)
    return launch_needs(shape.knobs, smem_bytes(shape.knobs), fragments)


def splits_of(problem: Problem, candidate: Candidate) -> int:
    """CTAs that share the depth of a tile: at most one for each step."""
    return min(knobs_of(candidate).splits, -(-problem.dim_qk // BLOCK_K))


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of a launch's workspace: the sums of all splits in fp32."""
    splits = splits_of(problem, candidate)
    return 0 if splits == 1 else FP32_BYTES * splits * problem.seqlen_q * problem.dim_v
