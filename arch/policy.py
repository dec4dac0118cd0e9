"""Policies: from a problem to the candidates worth considering on one GPU, in a fixed order.

One of them needs no tuning: the default.
"""

from __future__ import annotations

import copy
from typing import ClassVar

from ..codegen.candidate import Candidate, Family
from ..codegen.problem import Problem
from ..errors import NoCandidateError, UnsupportedArchitectureError
from . import (
    backward_defaults,
    backward_space,
    forward_space,
    retention_space,
    wgmma_backward_space,
    wgmma_retention_space,
    wgmma_space,
)
from .backward_defaults import BackwardPreferences
from .backward_space import BackwardSpace
from .forward_space import FORWARD_PREFERENCES, ForwardPreference, ForwardSpace
from .legality import Rejection
from .retention_space import RetentionSpace
from .spec import ArchSpec
from .wgmma_backward_space import WgmmaBackwardSpace
from .wgmma_retention_space import WgmmaChunkSpace
from .wgmma_space import WgmmaSpace

FAMILIES: tuple[Family, ...] = ("sm90", "sm80")  # in the order in which they are tried


def runs_on(family: Family, compute_capability: tuple[int, int]) -> bool:
    """Whether a family's kernels run on a GPU: those with PTX on any newer one, others on theirs alone."""
    return compute_capability == (9, 0) if family == "sm90" else compute_capability >= (8, 0)


class Policy:
    """What one GPU architecture offers for a problem.

    Subclasses set the class attributes; an instance may carry another spec of the same architecture (an H200 under the
    H100 policy, an unknown GPU under the nearest one).

    Attributes:
        name: the policy's name, as ``device_type`` takes it.
        build_arch: the compute capability its kernels are built for, e.g. ``"80"``.
        families: kernel families it offers, in the order they are tried.
        spec: the GPU's limits and rates.
        forward_space, backward_space, retention_space: the knobs' values.
        wgmma_space, wgmma_backward_space, wgmma_chunk_space: those of family ``sm90``.
        forward_preferences, backward_preferences: the default tables, by rising ``up_to``.
    """

    name: ClassVar[str]
    build_arch: ClassVar[str]
    families: tuple[Family, ...] = ("sm80",)
    default_spec: ClassVar[ArchSpec]
    forward_space: ClassVar[ForwardSpace] = ForwardSpace()
    forward_preferences: ClassVar[tuple[ForwardPreference, ...]] = FORWARD_PREFERENCES
    backward_space: ClassVar[BackwardSpace] = BackwardSpace()
    backward_preferences: ClassVar[BackwardPreferences] = BackwardPreferences()
    retention_space: ClassVar[RetentionSpace] = RetentionSpace()
    wgmma_space: ClassVar[WgmmaSpace] = WgmmaSpace()
    wgmma_backward_space: ClassVar[WgmmaBackwardSpace] = WgmmaBackwardSpace()
    wgmma_chunk_space: ClassVar[WgmmaChunkSpace] = WgmmaChunkSpace()

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
        """Every point of the problem's search space, as a candidate or as the rejection that says why not.

        The order is that of the knobs in the space and never changes between runs.
        """
        found: list[Candidate | Rejection] = []
        for family in self.families:
            if family == "sm90" and problem.op == "retention":
                found += wgmma_retention_space.offered(
                    problem, self.wgmma_chunk_space, self.retention_space.chunks, self.spec
                )
            elif family == "sm90" and problem.direction == "backward":
                found += wgmma_backward_space.offered(problem, self.wgmma_backward_space, self.spec)
            elif family == "sm90":
                found += wgmma_space.offered(problem, self.wgmma_space, self.spec)
            elif problem.op == "retention":
                found += retention_space.offered(
                    problem, family, self.retention_space, self.forward_space, self.spec
                )
            elif problem.direction == "forward":
                found += forward_space.offered(problem, family, self.forward_space, self.spec)
            else:
                found += backward_space.offered(problem, family, self.backward_space, self.spec)
        return found

    def legal(self, problem: Problem) -> list[Candidate]:
        """The candidates alone."""
        return [entry for entry in self.candidates(problem) if isinstance(entry, Candidate)]

    def default(self, problem: Problem) -> Candidate:
        """What serves a problem that nobody tuned: the first row of the default table that is legal here.

        Raises:
            NoCandidateError: nothing in the space is legal on this GPU.
        """
        for family in self.families:
            found = self._preferred(problem, family)
            if found is not None:
                return found
        for candidate in self.legal(problem):
            return candidate
        raise NoCandidateError(f"no candidate of {self!r} is legal for {problem.describe()}")

    def on(self, compute_capability: tuple[int, int]) -> Policy:
        """The policy with the families that a GPU of some capability runs: itself where it runs all."""
        running = tuple(f for f in self.families if runs_on(f, compute_capability))
        if running == self.families:
            return self
        restricted = copy.copy(self)
        restricted.families = running
        return restricted

    def _preferred(self, problem: Problem, family: Family) -> Candidate | None:
        if family == "sm90" and problem.op == "retention":
            return wgmma_retention_space.preferred(
                problem, self.wgmma_chunk_space, self.retention_space.chunks, self.spec
            )
        if family == "sm90" and problem.direction == "backward":
            return wgmma_backward_space.preferred(problem, self.wgmma_backward_space, self.spec)
        if family == "sm90":
            return wgmma_space.preferred(problem, self.wgmma_space, self.spec)
        if problem.op == "retention":
            return retention_space.preferred(
                problem,
                family,
                self.retention_space,
                self.forward_space,
                self.forward_preferences,
                self.spec,
            )
        if problem.direction == "forward":
            return forward_space.preferred(
                problem, family, self.forward_space, self.forward_preferences, self.spec
            )
        return backward_defaults.preferred(
            problem, family, self.backward_space, self.backward_preferences, self.spec
        )
