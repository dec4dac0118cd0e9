"""Knobs of the matrix product of family ``sm90``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...core.candidate import Service, knobs_as, launch_knob
from ...core.problem import OPERANDS, Operands
from ..shared.knobs import Sm90Knobs

Schedule = Literal["cooperative", "ping_pong"]
Output = Literal["tma", "direct"]

USUAL_ROW_BLOCKS = 8  # where a launch does not say


@dataclass(frozen=True, kw_only=True)
class GemmSm90Knobs(Sm90Knobs):
    """A matrix product by two consumer warpgroups, in CTAs that stay and take one tile after the other.

    Attributes:
        block_m: rows of a tile of the result.
        block_n: its columns.
        stages: of the ring, each 64 steps of the depth.
        schedule: ``cooperative``: the warpgroups share the rows of a tile; ``ping_pong``: each has every other tile.
        output: ``tma``: tiles leave through shared memory; ``direct``: from registers.
        cluster: CTAs that share the columns of B, each with rows of its own.
        transposed_a: A lies by columns.
        transposed_b: B does.
        splits: CTAs that share the depth of a tile; a second kernel adds their sums.
        row_blocks: tiles of rows that are computed side by side.

    Raises:
        ValueError: ``splits`` or ``row_blocks`` is none.
    """

    kernel: ClassVar[str] = "gemm_sm90"
    serves: ClassVar[frozenset[Service]] = frozenset({("gemm", "forward", "none")})
    warpgroups: ClassVar[int] = 2
    num_threads = 128 * (1 + warpgroups)

    block_m: int
    block_n: int
    stages: int
    schedule: Schedule = "cooperative"
    output: Output = "tma"
    cluster: int = 1
    transposed_a: bool = False
    transposed_b: bool = False
    splits: int = launch_knob(1)
    row_blocks: int = launch_knob(USUAL_ROW_BLOCKS)

    def __post_init__(self) -> None:
        for name in ("splits", "row_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def operands(self) -> Operands:
        """As in :class:`~attention_autotuner.core.problem.Problem`."""
        return OPERANDS[2 * self.transposed_a + self.transposed_b]

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        return "_".join(
            [
                self.operands,
                f"m{self.block_m}n{self.block_n}s{self.stages}",
                self.schedule,
                self.output,
                f"cluster{self.cluster}",
                f"split{self.splits}",
                f"rows{self.row_blocks}",
            ]
        )


knobs_of = knobs_as(GemmSm90Knobs)
