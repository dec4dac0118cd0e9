"""The protocol of a kernel family: all that the rest of the package needs of one without naming it.

A family is a folder here, a folder of the same name in ``templates/include``, and an entry in
:data:`~.registry.KERNELS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from ..arch.spec import ArchSpec
from ..core.candidate import Candidate, Family, KernelKnobs, Rejection, Service
from ..core.problem import Problem
from .shared.cells import FORWARD_COLUMNS
from .shared.coefficients import Coefficients
from .shared.estimates import Estimate, Usage
from .shared.passes import Pass
from .shared.rules import Rule

K = TypeVar("K", bound=KernelKnobs)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The C++ side of a kernel.

    Attributes:
        cpp_type: class template of the host side, in namespace ``attention_autotuner``, over a config.
        header: the one that has it, in the kernel's folder of headers.
        enough_ctas: of a backward: where a pass over keys has fewer CTAs, these share query heads. A constant of the
            kernel and not of the GPU at hand, as workspaces and the bits of results depend on it.
    """

    cpp_type: str
    header: str = "entry.cuh"
    enough_ctas: int | None = None


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A candidate's knobs in words that all kernels share.

    Attributes:
        tile: what candidates share that differ in pipelining, launch bounds or scheduling only.
        feed: what makes two candidates of one tile worth trying both: how they feed the MMAs and order the tiles.
        stratum: what candidates of one stratum of a sample share: tiles, warps and stages of every pass.
        cells: heading -> cell of the tables that the command line prints.
        persistent: the kernels loop over tiles around their main loop.
        companion: knobs that are worth measuring only beside another candidate's same ones, by name; see
            ``tuning.class_pools``.
    """

    tile: tuple[object, ...]
    feed: tuple[object, ...]
    stratum: tuple[object, ...]
    cells: Mapping[str, str]
    persistent: bool = False
    companion: object = None


class Kernel(Protocol[K]):
    """A kernel family.

    Attributes:
        knobs: its knob class, which has its name, its family and what it serves.
        cpp_type: class template of its entry points, where all candidates have one; others override :meth:`entry`.
        renamed: old -> new names of knobs and words, for records that were written before.
        pruning: named rules for what never pays, so that the space stays small enough to rank.
        headings: of the cells that candidates have in tables.
        spills_in_loop: whether every spill counts as one inside a loop: its loop holds no MMAs to find it by.
    """

    knobs: type[K]
    cpp_type: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}
    pruning: ClassVar[Mapping[str, Rule[Candidate]]] = {}
    spills_in_loop: ClassVar[bool] = False
    headings: ClassVar[tuple[str, ...]] = FORWARD_COLUMNS

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.knobs.kernel

    @property
    def family(self) -> Family:
        """The kernel's family."""
        return self.knobs.family

    @property
    def serves(self) -> frozenset[Service]:
        """The operations, directions and score modifications that it computes."""
        return self.knobs.serves

    def lacks(self, problem: Problem) -> tuple[str, ...] | None:
        """The modifications of a problem that it does not have; None where it does not compute the operation at all."""
        if (problem.op, problem.direction, problem.score) not in self.serves:
            return None
        return tuple(
            name for name in problem.compiled_modifications if name not in self.knobs.modifications
        )

    def serves_problem(self, problem: Problem) -> bool:
        """True where it computes a problem's operation with its modifications."""
        return self.lacks(problem) == ()

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        return Entry(cpp_type=self.cpp_type)

    def points(self, problem: Problem, spec: ArchSpec) -> Iterator[K | Rejection]:
        """Every point of a problem's space in a fixed order: legal knobs, or a rejection that says why not."""

    def default(self, problem: Problem, spec: ArchSpec) -> K | None:
        """The knobs that serve a problem without tuning; None where the kernel has none for it."""

    def passes(self, candidate: Candidate) -> tuple[Pass, ...]:
        """A candidate's launches that its knobs size, in the order they run."""

    def predict(
        self,
        problem: Problem,
        candidate: Candidate,
        spec: ArchSpec,
        usages: tuple[Usage, ...],
        fit: Coefficients,
    ) -> Estimate:
        """The time of a candidate, given what each of its passes takes from an SM and the fitted constants."""

    def workspace_bytes(self, problem: Problem, candidate: Candidate) -> int:
        """Bytes of device memory that a launch takes beside its tensors, known without a GPU and without a build.

        Of a call that wants no more than it must: without a final state, the gradient of gamma or that of r.
        """
        return 0

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""

    def columns(self, problem: Problem) -> tuple[str, ...]:
        """The headings of the cells that :meth:`describe` gives for a problem's candidates."""
        return self.headings
