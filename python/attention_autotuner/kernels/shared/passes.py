"""A pass: one launch of a candidate whose tiles the knobs size, with what it needs of an SM and the rules it obeys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...arch.occupancy import KernelNeeds
from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, KernelKnobs, Rejection
from ...core.problem import Problem
from .rules import (
    CLASS_PREDICATES,
    COPY_PREDICATES,
    Rule,
    Violation,
    first_violation,
    needs_violation,
)

K = TypeVar("K", bound=KernelKnobs)


def launch_needs(
    knobs: Any, smem_bytes: int, fragment_registers: int, name: str = ""
) -> KernelNeeds:
    """The needs of a launch with the threads of its knobs, and with their launch bound where they have one."""
    return KernelNeeds(
        name=name,
        threads=knobs.num_threads,
        ctas_per_sm=getattr(knobs, "ctas_per_sm", 1),
        smem_bytes=smem_bytes,
        fragment_registers=fragment_registers,
    )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One launch of a candidate.

    Attributes:
        kernel: name of the kernel that it is a launch of; an entry may launch passes of several.
        subject: what its rules and formulas read: the candidate, or the pass with what it needs of the candidate.
        rules: what the kernel's headers can compile, by the name of the ``static_assert`` that is each one's twin.
        needs_of: gives the resources that the pass takes from an SM, of a subject that obeys the rules.
        symbol: pattern of the mangled name of its kernel, where a unit has several; empty where it has one.
        prefix: what reasons begin with.
    """

    kernel: str
    subject: Any
    rules: Mapping[str, Rule[Any]]
    needs_of: Callable[[Any], KernelNeeds]
    symbol: str = ""
    prefix: str = ""

    @property
    def needs(self) -> KernelNeeds:
        """The resources that the pass takes from an SM."""
        return self.needs_of(self.subject)

    @property
    def violation(self) -> Violation | None:
        """The first of its rules that it breaks, with the reason."""
        violation = first_violation(self.rules, self.subject)
        return None if violation is None else (violation[0], self.prefix + violation[1])

    def violation_on(self, spec: ArchSpec) -> Violation | None:
        """The first of its rules, or limit of a GPU, that it breaks."""
        return self.violation or needs_violation(self.needs, spec)


PassesOf = Callable[[Candidate], tuple[Pass, ...]]
"""Gives the launches of a candidate, in the order they run."""


def single_pass(
    candidate: Candidate,
    subject: Any,
    rules: Mapping[str, Rule[Any]],
    needs_of: Callable[[Any], KernelNeeds],
    symbol: str = "",
) -> tuple[Pass, ...]:
    """The launches of a candidate that has one."""
    return (
        Pass(
            kernel=candidate.kernel, subject=subject, rules=rules, needs_of=needs_of, symbol=symbol
        ),
    )


def kernel_violation(candidate: Candidate, passes: Iterable[Pass]) -> Violation | None:
    """The first rule of the kernel headers that a candidate breaks: None where it can be compiled."""
    violation = first_violation(CLASS_PREDICATES | COPY_PREDICATES, candidate)
    return violation or next(filter(None, (launch.violation for launch in passes)), None)


def check_passes(
    candidate: Candidate,
    passes_of: PassesOf,
    spec: ArchSpec,
    pruning: Mapping[str, Rule[Candidate]] | None = None,
) -> Rejection | None:
    """A candidate's rejection on a GPU by the first rule that it breaks; None where it may exist.

    Args:
        candidate: the candidate.
        passes_of: gives its launches. Their rules come first, the GPU's limits last.
        spec: the GPU.
        pruning: rules for what never pays, between the two.
    """
    passes = passes_of(candidate)
    violation = (
        kernel_violation(candidate, passes)
        or first_violation(pruning or {}, candidate)
        or next(filter(None, (needs_violation(launch.needs, spec) for launch in passes)), None)
    )
    return rejection_of(candidate, violation)


def rejection_of(candidate: Candidate, violation: Violation | None) -> Rejection | None:
    """A candidate's rejection for a rule that it breaks; None where it breaks none."""
    if violation is None:
        return None
    return Rejection(rejected=candidate, predicate=violation[0], reason=violation[1])


def points_of(
    problem: Problem,
    spec: ArchSpec,
    space: Iterable[K],
    passes_of: PassesOf,
    pruning: Mapping[str, Rule[Candidate]] | None = None,
) -> Iterator[K | Rejection]:
    """Every point of a space: knobs, or the rejection that says why not."""
    for knobs in space:
        yield check_passes(Candidate.of(problem, knobs), passes_of, spec, pruning) or knobs


def first_legal(
    problem: Problem,
    spec: ArchSpec,
    space: Iterable[K],
    passes_of: PassesOf,
    pruning: Mapping[str, Rule[Candidate]] | None = None,
) -> K | None:
    """The first point of a space that may exist; None where there is none."""
    points = points_of(problem, spec, space, passes_of, pruning)
    return next((point for point in points if not isinstance(point, Rejection)), None)
