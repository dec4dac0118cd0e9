"""Policies: from a problem to the candidates worth considering on one GPU, in a fixed order.

One of them needs no tuning: the default.
"""

from __future__ import annotations

import copy
from typing import ClassVar

from ..core.candidate import Candidate, Family, Rejection
from ..core.problem import Problem
from ..errors import NoKernelError, UnsupportedArchitectureError
from .spec import ArchSpec

FAMILIES: tuple[Family, ...] = ("sm90", "sm80")  # in the order in which they are tried


def runs_on(family: Family, compute_capability: tuple[int, int]) -> bool:
    """True where a family's kernels run on a GPU: those with PTX on any newer one, others on theirs alone."""
    return compute_capability == (9, 0) if family == "sm90" else compute_capability >= (8, 0)


def check_capability(name: str, compute_capability: tuple[int, int]) -> None:
    """Check that a GPU has cp.async, and mma.sync on bf16.

    Args:
        name: of the GPU.
        compute_capability: (major, minor).

    Raises:
        UnsupportedArchitectureError: it is older.
    """
    if compute_capability < (8, 0):
        major, minor = compute_capability
        raise UnsupportedArchitectureError(
            f"compute capability must be at least 8.0, {name} has {major}.{minor}"
        )


class Policy:
    """The candidates of one GPU architecture for a problem.

    Subclasses set the class attributes; an instance may carry another spec of the same architecture (an H200 under the
    H100 policy, an unknown GPU under the nearest one).

    Attributes:
        name: the policy's name, as ``device_type`` takes it.
        build_arch: the compute capability its kernels are built for, e.g. ``"80"``.
        families: kernel families it offers, in the order they are tried.
        spec: the GPU's limits and rates.
    """

    name: ClassVar[str]
    build_arch: ClassVar[str]
    families: tuple[Family, ...] = ("sm80",)
    default_spec: ClassVar[ArchSpec]

    def __init__(self, spec: ArchSpec | None = None) -> None:
        self.spec = spec if spec is not None else self.default_spec
        check_capability(self.spec.name, self.spec.compute_capability)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name})"

    def candidates(self, problem: Problem) -> list[Candidate | Rejection]:
        """Every point of the problem's search space, as a candidate or as the rejection that says why not.

        The order is that of the knobs in the space and never changes between runs.
        """
        from ..kernels import registry  # stands above this layer, which knows no kernel by name

        return registry.candidates(problem, self.families, self.spec)

    def legal(self, problem: Problem) -> list[Candidate]:
        """The candidates alone."""
        return [entry for entry in self.candidates(problem) if isinstance(entry, Candidate)]

    def served(self, problem: Problem) -> list[Candidate]:
        """The legal candidates, and the default that a call takes, which is of rounded lengths and may be another."""
        legal, default = self.legal(problem), self.untuned(problem)
        return legal if default in legal else [*legal, default]

    def untuned(self, problem: Problem) -> Candidate:
        """The candidate that serves a call without tuning: the default for the rounded lengths of its problem.

        Raises:
            NoKernelError: nothing in the space is legal on this GPU.
        """
        return self.default(problem.rounded())

    def default(self, problem: Problem) -> Candidate:
        """The candidate for exactly these lengths: the first row of the default table that is legal here.

        Raises:
            NoKernelError: nothing in the space is legal on this GPU.
        """
        from ..kernels import registry

        chosen = registry.default(problem, self.families, self.spec)
        if chosen is not None:
            return chosen
        for candidate in self.legal(problem):
            return candidate
        op, direction = problem.op, problem.direction
        known = registry.families(op, direction)
        if set(known).isdisjoint(self.families):
            raise NoKernelError(
                f"no kernel of {self.spec.name} computes {op} {direction}: it runs kernels of "
                f"{', '.join(self.families)}, and {op} {direction} has those of {', '.join(known)}"
            )
        raise NoKernelError(f"no candidate of {self.spec.name} is legal for {problem.describe()}")

    def on(self, compute_capability: tuple[int, int]) -> Policy:
        """The policy with the families that a GPU of some capability runs: itself where it runs all."""
        running = tuple(f for f in self.families if runs_on(f, compute_capability))
        if running == self.families:
            return self
        restricted = copy.copy(self)
        restricted.families = running
        return restricted

    def on_gpu(self, name: str | None, compute_capability: tuple[int, int]) -> Policy:
        """The policy :meth:`on` a GPU that runs a family of it at least.

        Raises:
            UnsupportedArchitectureError: it runs none.
        """
        restricted = self.on(compute_capability)
        if not restricted.families:
            major, minor = compute_capability
            raise UnsupportedArchitectureError(
                f"kernels of {self.spec.name} ({', '.join(self.families)}) do not run on {name}, "
                f"which has compute capability {major}.{minor}"
            )
        return restricted
