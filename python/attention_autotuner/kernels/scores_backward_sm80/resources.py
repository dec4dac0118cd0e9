"""Resources that the passes of a backward candidate take from an SM, as pure formulas over their knobs.

Shared memory is exact: the twins of ``KeyPassTraits::kSmemBytes`` and ``RowPassTraits::kSmemBytes`` in
``templates/include/attention_autotuner/scores_backward_sm80/traits.cuh`` (a test compares them). Register counts are
estimates made before the compiler's report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...arch.occupancy import KernelNeeds
from ...arch.rtx4090 import RTX4090_SPEC
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared.passes import launch_needs
from ..shared.workspace import (
    backward_bytes,
    bias_sums_bytes,
    count_head_splits,
    key_blocks,
    query_tiles,
)
from .knobs import KeyPass, RowPass, knobs_of

ENOUGH_CTAS = 2 * RTX4090_SPEC.num_sms  # two a SM of the GPU with most that the family is tuned for
LSE_DELTA_BYTES = 8  # of a query: its LSE and delta in fp32


@dataclass(frozen=True, kw_only=True)
class _Dims:
    """The fields of a candidate that formulas of its passes need.

    Attributes:
        padded_dim_qk, padded_dim_v: padded head dims.
        masked: a tile of an explicit mask streams with each step.
    """

    padded_dim_qk: int
    padded_dim_v: int
    masked: bool = False


@dataclass(frozen=True, kw_only=True)
class KeyShape(_Dims):
    """A key pass with what its formulas need of the candidate.

    Attributes:
        name: of the pass.
        knobs: the pass.
        one_pass: it adds its share of dQ.
    """

    name: str = "keys"
    knobs: KeyPass
    one_pass: bool

    @property
    def block(self) -> int:
        """Rows of the result that one CTA computes: keys."""
        return self.knobs.block_n

    @property
    def stores_ds(self) -> bool:
        """True where dS goes to shared memory: for dQ, or for a dK that waits for the next step."""
        return self.one_pass or self.knobs.num_stages > 2

    @property
    def rows_per_warp(self) -> int:
        """Key rows that a pair of warps owns."""
        return self.knobs.block_n // self.knobs.warp_pairs


@dataclass(frozen=True, kw_only=True)
class RowShape(_Dims):
    """A row pass with what its formulas need of the candidate.

    Attributes:
        name: of the pass, which is the result's: ``dq``, ``dk`` or ``dv``.
        knobs: the pass.
    """

    name: str
    knobs: RowPass

    @property
    def block(self) -> int:
        """Rows of the result that one CTA computes."""
        return self.knobs.block_rows

    @property
    def needs_dp(self) -> bool:
        """True where it computes dP beside S; only dV does without."""
        return self.name != "dv"

    @property
    def resident_columns(self) -> int:
        """Columns of the rows that stay: of Q and dO, or of K and V."""
        return self.padded_dim_qk + (self.padded_dim_v if self.needs_dp else 0)

    @property
    def result_dim(self) -> int:
        """Padded head dim of the result."""
        return self.padded_dim_qk if self.needs_dp else self.padded_dim_v

    @property
    def result_columns(self) -> int:
        """Columns of the result that one CTA computes; the last slice may have fewer that count."""
        return -(-self.result_dim // 16 // self.knobs.slices) * 16

    @property
    def other_columns(self) -> int:
        """Columns that stream beside Q (or K): dO's (or V's), of which dV needs its slice alone."""
        return self.padded_dim_v if self.needs_dp else self.result_columns


PassShape = KeyShape | RowShape


def key_shape(source: Candidate | Problem, knobs: KeyPass, *, one_pass: bool) -> KeyShape:
    """A key pass of a candidate or for a problem, which adds its shares of dQ or does not."""
    return KeyShape(knobs=knobs, one_pass=one_pass, **_dims(source))


def row_shape(source: Candidate | Problem, name: str, knobs: RowPass) -> RowShape:
    """A row pass of a candidate or for a problem."""
    return RowShape(name=name, knobs=knobs, **_dims(source))


def _dims(source: Candidate | Problem) -> dict[str, Any]:
    dims = {"padded_dim_qk": source.padded_dim_qk, "padded_dim_v": source.padded_dim_v}
    return {**dims, "masked": source.mask == "explicit"}


def shapes(candidate: Candidate) -> tuple[PassShape, ...]:
    """The passes of a candidate, in the order they run."""
    plan = knobs_of(candidate)
    one_pass = plan.plan == "one_pass"
    return tuple(
        key_shape(candidate, knobs, one_pass=one_pass)
        if isinstance(knobs, KeyPass)
        else row_shape(candidate, name, knobs)
        for name, knobs in plan.passes.items()
    )


def dq_split(shape: KeyShape) -> tuple[int, int]:
    """The split of dQ's tile among the warps of a one-pass key pass: (warps along its rows, along its columns).

    None has more 16x16 tiles than it must, and then each reads least; the twin of ``split_dq`` in the traits.
    """
    warps, keys = 2 * shape.knobs.warp_pairs, shape.knobs.block_n // 16
    row_tiles, column_tiles = shape.knobs.block_m // 16, shape.padded_dim_qk // 16

    def cost(along_rows: int) -> tuple[int, int]:
        rows, columns = row_tiles // along_rows, -(-column_tiles // (warps // along_rows))
        return rows * columns, (rows + columns) * keys

    powers = (1 << n for n in range(warps.bit_length()))
    whole = [n for n in powers if row_tiles % n == 0 and warps % n == 0]
    along_rows = min(whole, key=cost, default=1)
    return along_rows, warps // along_rows


def dq_tile(shape: KeyShape) -> tuple[int, int]:
    """Rows and columns of dQ's tile that the busiest warp computes."""
    along_rows, along_columns = dq_split(shape)
    return (shape.knobs.block_m // along_rows, -(-shape.padded_dim_qk // 16 // along_columns) * 16)


def _key_smem_bytes(shape: KeyShape) -> int:
    m, n, stages = shape.knobs.block_m, shape.knobs.block_n, shape.knobs.num_stages
    resident = n * (shape.padded_dim_qk + shape.padded_dim_v) * ELEMENT_BYTES
    scores = n * m * ELEMENT_BYTES
    exchange = scores  # P, from one warp of a pair to the other
    q = stages * m * shape.padded_dim_qk * ELEMENT_BYTES
    do = m * (shape.padded_dim_v * ELEMENT_BYTES + LSE_DELTA_BYTES)
    ds = scores if shape.stores_ds else 0
    mask = scores if shape.masked else 0
    return resident + exchange + q + min(stages, 2) * (do + ds + mask)


def _key_fragment_registers(shape: KeyShape) -> int:
    """Each warp of a pair holds dV or dK, and scores; its share of dQ comes when the scores are gone."""
    row_tiles = shape.rows_per_warp // 16
    result = row_tiles * max(shape.padded_dim_qk, shape.padded_dim_v) // 8 * 4
    scores = row_tiles * (shape.knobs.block_m // shape.knobs.query_subtiles) // 8 * 4
    dq = 0
    if shape.one_pass:
        rows, columns = dq_tile(shape)
        dq = rows // 16 * (columns // 8) * 4
    return result + max(scores, dq)


def _row_smem_bytes(shape: RowShape) -> int:
    knobs = shape.knobs
    rows, columns = knobs.block_rows, knobs.block_columns
    resident = rows * shape.resident_columns * ELEMENT_BYTES
    streamed = columns * (shape.padded_dim_qk + shape.other_columns) * ELEMENT_BYTES
    row_values = 0 if shape.name == "dq" else columns * LSE_DELTA_BYTES
    mask = rows * columns * ELEMENT_BYTES if shape.masked else 0
    result = rows * shape.result_columns
    sums = result * FP32_BYTES * (knobs.column_warps - 1)
    stages = knobs.num_stages * (streamed + row_values + mask)
    return max(resident + stages, sums, result * ELEMENT_BYTES)


def _row_fragment_registers(shape: RowShape) -> int:
    row_tiles = shape.knobs.block_rows // shape.knobs.warps // 16
    result = row_tiles * (shape.result_columns // 8) * 4
    scores = row_tiles * (shape.knobs.block_columns // shape.knobs.column_warps // 8) * 4
    return result + scores * (2 if shape.needs_dp else 1)


def needs(shape: PassShape) -> KernelNeeds:
    """Resources that a pass takes."""
    if isinstance(shape, KeyShape):
        smem_bytes, registers = _key_smem_bytes(shape), _key_fragment_registers(shape)
    else:
        smem_bytes, registers = _row_smem_bytes(shape), _row_fragment_registers(shape)
    return launch_needs(shape.knobs, smem_bytes, registers, shape.name)


def flops_per_score(shape: PassShape) -> int:
    """Multiply-adds of a pass for one pair of query and key, over all slices; by padded head dims."""
    qk, v = shape.padded_dim_qk, shape.padded_dim_v
    if isinstance(shape, KeyShape):
        return 2 * qk + 2 * v + (qk if shape.one_pass else 0)
    return shape.knobs.slices * (shape.resident_columns + shape.result_columns)


def shares_of_group(problem: Problem, candidate: Candidate) -> int:
    """CTAs that share a block of keys where those are too few for a GPU, each with some of the query heads."""
    block = max(shape.block for shape in shapes(candidate) if shape.name != "dq")
    return count_head_splits(problem, key_blocks(problem, block), ENOUGH_CTAS)


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of LSE and delta, sums of dQ, partial dK and dV, sums for a bias table, and spans."""
    sums = 0
    for shape in shapes(candidate):
        if isinstance(shape, KeyShape) and shape.one_pass:
            block = shape.knobs.block_m
            sums = FP32_BYTES * query_tiles(problem, block) * block * problem.padded_dim_qk
    usual = backward_bytes(problem, shares_of_group(problem, candidate))
    return usual + sums + bias_sums_bytes(problem)
