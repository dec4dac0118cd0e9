"""Resources that attention's forward kernel of family ``sm90`` takes from an SM, as pure formulas over its knobs.

``smem_bytes`` is exact and the twin of ``AttentionForwardSm90Traits::kSmemBytes`` (a test compares the two).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...arch.occupancy import REGISTERS_BESIDE_FRAGMENTS_MIN, KernelNeeds
from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES
from ..shared.engine import residency
from ..shared.estimates import expected_usage
from ..shared.passes import launch_needs
from ..shared.sm90_tiles import ALIGNMENT_BYTES, Sm90Shape, whole_columns
from ..shared.split_kv import counted_splits, packed_heads, split_bytes, split_rows
from ..shared.workspace import COUNT_BYTES, layout_bytes, list_bytes, span_bytes
from .knobs import AttentionForwardSm90Knobs, knobs_of

BARRIER_BYTES = 512
EXCHANGED_ROW_BYTES = 8  # level and sum of a row, beside its P
REGISTERS_BESIDE_FRAGMENTS = 32  # of a consumer thread; its addresses are few and its loop is short
PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32, 4: 24}  # by consumer warpgroups; one trades none


@dataclass(frozen=True, kw_only=True)
class AttentionForwardSm90Shape(Sm90Shape):
    """A candidate of the kernel."""

    knobs: AttentionForwardSm90Knobs
    # What the producer leaves of even shares of an SM's registers, 240 at most.
    registers_by_warpgroups: ClassVar[Mapping[int, int]] = {1: 240, 2: 240, 3: 160, 4: 112}

    @property
    def registers_beside(self) -> int:
        """Registers that a thread needs at least beside its fragments."""
        return REGISTERS_BESIDE_FRAGMENTS

    @property
    def columns(self) -> int:
        """Columns of V of one CTA as tiles hold them."""
        return whole_columns(self.value_columns)

    @property
    def value_columns(self) -> int:
        """Columns of V of one CTA."""
        return -(-self.candidate.padded_dim_v // (16 * self.knobs.v_slices)) * 16

    @property
    def fragment_registers(self) -> int:
        """Registers that a thread's fragments take: O, S, what is kept of Q, and P unless it takes the place of S.

        The next P counts where it is made while this one is still read.
        """
        knobs = self.knobs
        fragments = self.value_columns // 2 + knobs.score_keys // 2 + knobs.kept_depth // 4
        if knobs.mainloop != "strict":
            fragments += knobs.block_n // 4
        if knobs.overlaps and knobs.optimistic:
            fragments += knobs.block_n // 4
        return fragments


def shape_of(candidate: Candidate) -> AttentionForwardSm90Shape:
    """The shape of a candidate."""
    return AttentionForwardSm90Shape(candidate=candidate, knobs=knobs_of(candidate))


def smem_bytes(shape: AttentionForwardSm90Shape) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    knobs = shape.knobs
    q = knobs.q_stages * knobs.block_m * shape.depth
    keys = knobs.k_stages * shape.depth + knobs.v_stages * shape.columns
    if knobs.exchange_stages:
        keys = (knobs.k_stages + knobs.v_stages) * max(shape.depth, shape.columns)
    mask = knobs.mask_stages * knobs.block_m
    elements = q + knobs.score_keys * (keys + mask)
    exchanged_row = knobs.score_keys * ELEMENT_BYTES + EXCHANGED_ROW_BYTES
    exchanged = knobs.exchange_stages * knobs.block_m * exchanged_row
    return ALIGNMENT_BYTES + ELEMENT_BYTES * elements + exchanged + BARRIER_BYTES


def needs(shape: AttentionForwardSm90Shape) -> KernelNeeds:
    """Resources that the kernel takes. Warpgroups trade registers, so fragments are what is left of an even share."""
    beside = REGISTERS_BESIDE_FRAGMENTS - REGISTERS_BESIDE_FRAGMENTS_MIN
    producer = PRODUCER_REGISTERS.get(shape.knobs.warpgroups, 24)
    fragments = shape.fragment_registers + beside
    if shape.knobs.warpgroups > 1:
        fragments = shape.even_fragments(fragments, producer)
    return launch_needs(shape.knobs, smem_bytes(shape), fragments)


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of a launch's workspace: the counter of claimed tiles, the results of splits, the list of packed blocks."""
    counter = [COUNT_BYTES] if knobs_of(candidate).schedule == "dynamic" else []
    knobs = knobs_of(candidate)
    queries, splits = knobs.block_m // packed_heads(problem, knobs), 0
    split = split_bytes(problem, candidate.padded_dim_v, knobs)
    if problem.packed and split:
        split.append(COUNT_BYTES * split_rows(problem))
    if knobs.pack_gqa or knobs.split_kv:
        splits = counted_splits(problem, knobs)
    listed = list_bytes(problem, queries, by_queries=True, most_splits=splits)
    return layout_bytes([*counter, *split, *listed, span_bytes(problem)])


def ctas_of_head(problem: Problem, knobs: AttentionForwardSm90Knobs, spec: ArchSpec) -> float:
    """CTAs that run at a time, for each head of a tile."""
    kernel = needs(shape_of(Candidate.of(problem, knobs)))
    usage = expected_usage(kernel, spec)
    placed = residency(spec, usage, threads=kernel.threads, ctas=1, filled=False)
    slots = spec.num_sms if placed is None else placed.slots
    return slots * packed_heads(problem, knobs) / problem.heads_q
