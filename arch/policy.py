"""Policies: from a problem to the candidates worth considering on one GPU, in a fixed order.

One of them needs no tuning: the default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from ..codegen.candidate import Candidate, Family
from ..codegen.identity import digest16
from ..codegen.knobs import CtaOrder, ForwardKnobs, Knobs
from ..codegen.problem import Problem
from ..errors import NoCandidateError, UnsupportedArchitectureError
from . import legality
from .legality import Rejection
from .spec import ArchSpec


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The values each knob may take; their product, less what :mod:`.legality` rejects, is what a policy offers.

    Attributes:
        tiles: (block_m, warps_m) pairs.
        block_n: key rows of a step.
        warps_n: warps along keys and value columns.
        num_stages: K/V stages.
        k_slice: columns of K per step; 0 stands for all of them.
        v_slices: CTAs that share a row block.
        schedules: (persistent, cta_order) pairs.
        ctas_per_sm: launch bounds.
    """

    tiles: tuple[tuple[int, int], ...] = (
        (128, 4),
        (64, 4),
        (128, 8),
        (64, 2),
        (192, 6),
        (256, 8),
    )
    block_n: tuple[int, ...] = (64, 128, 32, 96, 48)
    warps_n: tuple[int, ...] = (1, 2)
    num_stages: tuple[int, ...] = (1, 2, 3)
    k_slice: tuple[int, ...] = (0, 64, 32)
    v_slices: tuple[int, ...] = (1, 2, 4)
    schedules: tuple[tuple[bool, CtaOrder], ...] = (
        (False, "rows_first"),
        (False, "heads_first"),
        (True, "heads_first"),
    )
    ctas_per_sm: tuple[int, ...] = (1, 2, 3, 4)

    @property
    def digest(self) -> str:
        """Changes whenever any knob's values do; part of a record's identity."""
        return digest16(self)


@dataclass(frozen=True, kw_only=True)
class Preference:
    """One row of a policy's default table: what to try first for value classes up to ``up_to``."""

    up_to: int
    block_m: int
    block_n: int
    warps_m: int
    num_stages: int
    q_in_registers: bool = False


# Tried in order, the first legal row whose `up_to` covers both head-dim classes wins. Which rows lead was measured on
# an H200 (docs/kernel_log.md); the smaller ones are for GPUs with less shared memory and follow FlashAttention-2's
# choices.
DEFAULT_PREFERENCES: tuple[Preference, ...] = (
    Preference(up_to=64, block_m=128, block_n=128, warps_m=4, num_stages=2),
    Preference(up_to=64, block_m=128, block_n=64, warps_m=4, num_stages=1),
    Preference(up_to=128, block_m=128, block_n=64, warps_m=4, num_stages=1),
    Preference(up_to=128, block_m=128, block_n=32, warps_m=4, num_stages=2),
    Preference(up_to=128, block_m=128, block_n=32, warps_m=4, num_stages=1),
    Preference(up_to=256, block_m=64, block_n=32, warps_m=4, num_stages=2, q_in_registers=True),
    Preference(up_to=256, block_m=64, block_n=64, warps_m=4, num_stages=1),
    Preference(up_to=256, block_m=64, block_n=32, warps_m=4, num_stages=1),
    Preference(up_to=512, block_m=128, block_n=64, warps_m=8, num_stages=2),
    Preference(up_to=512, block_m=64, block_n=64, warps_m=4, num_stages=1),
    Preference(up_to=512, block_m=64, block_n=32, warps_m=4, num_stages=1),
)


def _candidate(problem: Problem, family: Family, knobs: Knobs) -> Candidate:
    """A candidate of the problem's kind and padded classes."""
    return Candidate(
        family=family,
        op=problem.op,
        direction=problem.direction,
        dtype=problem.dtype,
        class_qk=problem.class_qk,
        class_v=problem.class_v,
        copy_bytes=problem.alignment_bytes,
        knobs=knobs,
    )


class Policy:
    """What one GPU architecture offers for a problem.

    Subclasses set the class attributes; an instance may carry another spec of the same architecture (an H200 under the
    H100 policy, an unknown GPU under the nearest one).

    Attributes:
        name: the policy's name, as ``device_type`` takes it.
        build_arch: the compute capability its kernels are built for, e.g. ``"80"``.
        families: kernel families it offers, in the order they are tried.
        spec: the GPU's limits and rates.
        space: the knobs' values.
        preferences: the default table, by rising ``up_to``.
    """

    name: ClassVar[str]
    build_arch: ClassVar[str]
    families: ClassVar[tuple[Family, ...]] = ("sm80",)
    default_spec: ClassVar[ArchSpec]
    space: ClassVar[SearchSpace] = SearchSpace()
    preferences: ClassVar[tuple[Preference, ...]] = DEFAULT_PREFERENCES

    def __init__(self, spec: ArchSpec | None = None) -> None:
        self.spec = spec if spec is not None else self.default_spec
        if self.spec.compute_capability < (8, 0):
            raise UnsupportedArchitectureError(
                f"compute capability must be at least 8.0, {self.spec.name} has "
                f"{self.spec.compute_capability[0]}.{self.spec.compute_capability[1]}"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name})"

    def candidates(self, problem: Problem) -> list[Candidate | Rejection]:
        """Every point of the search space, as a candidate or as the rejection that says why not.

        The order is that of the knobs in :class:`SearchSpace` and never changes between runs. Points that differ only
        in a knob the problem has no use for (slices of a narrow head, say) appear once.
        """
        found: list[Candidate | Rejection] = []
        for family in self.families:
            found.extend(self._sm80(problem, family))
        return found

    def legal(self, problem: Problem) -> list[Candidate]:
        """The candidates alone."""
        return [entry for entry in self.candidates(problem) if isinstance(entry, Candidate)]

    def default(self, problem: Problem) -> Candidate:
        """What serves a problem that nobody tuned: the preference table's row, shrunk until it is legal.

        Raises:
            NoCandidateError: nothing in the space is legal on this GPU.
        """
        cta_order: CtaOrder = "heads_first" if problem.causal else "rows_first"
        for row in self.preferences:
            if problem.class_v > row.up_to or problem.class_qk > row.up_to:
                continue
            for v_slices in self.space.v_slices:
                knobs = ForwardKnobs(
                    block_m=row.block_m,
                    block_n=row.block_n,
                    warps_m=row.warps_m,
                    num_stages=row.num_stages,
                    k_slice=problem.class_qk,
                    v_slices=v_slices,
                    cta_order=cta_order,
                    q_in_registers=row.q_in_registers,
                )
                candidate = _candidate(problem, "sm80", knobs)
                if legality.check(candidate, self.spec) is None:
                    return candidate
        for candidate in self.legal(problem):
            return candidate
        raise NoCandidateError(f"no candidate of {self!r} is legal for {problem.describe()}")

    def _sm80(self, problem: Problem, family: Family) -> list[Candidate | Rejection]:
        space = self.space
        k_slices = [s or problem.class_qk for s in space.k_slice if s < problem.class_qk]
        v_slices = [
            s
            for s in space.v_slices
            if s == 1 or problem.class_v // s >= legality.MIN_SLICE_COLUMNS
        ]
        warps_n = [
            w for w in space.warps_n if w == 1 or problem.class_v >= legality.MIN_SHARED_P_COLUMNS
        ]
        found: list[Candidate | Rejection] = []
        for (block_m, warps_m), block_n, n, stages, k, v, ctas in product(
            space.tiles,
            space.block_n,
            warps_n,
            space.num_stages,
            k_slices,
            v_slices,
            space.ctas_per_sm,
        ):
            for q_in_registers, qk_ahead in product((False, True), repeat=2):
                if qk_ahead and (stages != 2 or k != problem.class_qk or n > 1):
                    continue  # not a point of the space: see qk_ahead_needs_two_whole_stages
                knobs = ForwardKnobs(
                    block_m=block_m,
                    block_n=block_n,
                    warps_m=warps_m,
                    warps_n=n,
                    num_stages=stages,
                    q_in_registers=q_in_registers,
                    qk_ahead=qk_ahead,
                    k_slice=k,
                    v_slices=v,
                    ctas_per_sm=ctas,
                )
                base = _candidate(problem, family, knobs)
                rejection = legality.check(base, self.spec)
                if rejection is not None:
                    found.append(rejection)
                    continue
                found.extend(self._schedules(base))
        return found

    def _schedules(self, base: Candidate) -> list[Candidate]:
        knobs = base.forward
        return [
            replace(base, knobs=replace(knobs, persistent=persistent, cta_order=order))
            for persistent, order in self.space.schedules
        ]
