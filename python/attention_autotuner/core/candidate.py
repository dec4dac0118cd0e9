"""The candidate: one way to solve a problem, as a kernel with every knob set.

A candidate depends on padded head dims only, never on the true dims or lengths, so one compiled candidate serves every
problem that pads to them. Which candidates are legal on which GPU is for their kernel to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from .identity import LATER, plain, values_of
from .modifications import in_order
from .problem import Direction, DType, Form, Mask, Op, Operands, Problem, Score, score_of

Family = Literal["sm80", "sm90"]
Service = tuple[Op, Direction, Score]  # what a kernel computes
K = TypeVar("K", bound="KernelKnobs")


def launch_knob(default: int, **metadata: bool) -> Any:
    """The field of a knob that is no part of the code: launches pass it in the field of the params that has its name.

    One artifact serves candidates that differ in such knobs alone; records keep them apart. Metadata may be ``LATER``.
    """
    return field(default=default, metadata={"launch": True, **metadata})


class KernelKnobs:
    """Base of every kernel's knobs: a frozen dataclass of what there is to choose about it.

    Attributes:
        kernel: name of the kernel that they configure, a key of ``kernels.registry.KERNELS``.
        family: ``sm80``: mma.sync, ldmatrix, cp.async; runs on compute capability 8.0 and newer. ``sm90``: wgmma and
            TMA; runs on 9.0 alone.
        serves: the operations, directions and score modifications that the kernel computes.
        modifications: those of ``COMPILED`` that it can be compiled with.
    """

    kernel: ClassVar[str]
    family: ClassVar[Family]
    serves: ClassVar[frozenset[Service]]
    modifications: ClassVar[frozenset[str]] = frozenset()

    @property
    def launch_knobs(self) -> dict[str, int]:
        """The launch knobs that differ from their defaults, by name."""
        named = {x.name: x.default for x in fields(self) if x.metadata.get("launch")}  # type: ignore[arg-type]
        return {name: value for name in named if (value := getattr(self, name)) != named[name]}

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest launch."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The knobs' part of a candidate's name, unique, readable, and valid in C++ and file names."""
        raise NotImplementedError

    @property
    def deterministic(self) -> bool:
        """True where two runs on equal inputs give equal bits."""
        return True

    @property
    def form(self) -> Form:
        """The form that retention forward is computed in; ``auto`` where there is no choice."""
        return "auto"

    @property
    def operands(self) -> Operands:
        """As in :class:`~.problem.Problem`."""
        return "nn"


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A candidate, or a pass that candidates would share, that a policy will not offer.

    Attributes:
        rejected: the candidate, or of what candidates would share the fields, with the knobs that the rule is about.
        predicate: the name of the rule that said no.
        reason: the constraint with the values that broke it.
    """

    rejected: Candidate | dict[str, Any]
    predicate: str
    reason: str

    @property
    def config(self) -> dict[str, Any]:
        """The fields of what was rejected, as JSON-ready values."""
        return self.rejected.config if isinstance(self.rejected, Candidate) else self.rejected


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel with every knob set.

    Attributes:
        op, direction, dtype: as in :class:`~.problem.Problem`.
        padded_dim_qk, padded_dim_v: padded head dims that the kernel is compiled for, elements.
        copy_bytes: width of global reads: 16, or 2 for tensors without 16-byte alignment.
        mask: as in :class:`~.problem.Problem`.
        knobs: the :class:`KernelKnobs` of one kernel, which they name.
        key_bounds: as in :class:`~.problem.Problem`.
        modifications: names of ``COMPILED`` that the kernel is compiled with.

    Raises:
        TypeError: the knobs are of a kernel that does not compute this.
    """

    op: Op = "attention"
    direction: Direction = "forward"
    dtype: DType
    padded_dim_qk: int
    padded_dim_v: int
    copy_bytes: Literal[2, 16] = 16
    mask: Mask = "none"
    knobs: Any
    key_bounds: bool = field(default=False, metadata=LATER)
    modifications: tuple[str, ...] = field(default=(), metadata=LATER)

    def __post_init__(self) -> None:
        # Records have lists.
        object.__setattr__(self, "modifications", in_order(self.modifications))
        lacking = sorted(set(self.modifications) - self.knobs.modifications)
        if lacking:
            raise TypeError(f"{self.knobs.kernel} does not have the score modifications {lacking}")
        score = score_of(self.op, self.mask)
        if (self.op, self.direction, score) not in self.knobs.serves:
            raise TypeError(
                f"{self.knobs.kernel} does not compute {self.op} {self.direction} with {score} scores, got "
                f"{type(self.knobs).__name__}"
            )

    @classmethod
    def of(cls, problem: Problem, knobs: KernelKnobs) -> Candidate:
        """A candidate of a problem's kind and padded head dims.

        Raises:
            TypeError: the knobs are of a kernel that does not compute it.
        """
        return cls(**fields_of(problem), knobs=knobs)

    @property
    def kernel(self) -> str:
        """Name of its kernel."""
        name: str = self.knobs.kernel
        return name

    @property
    def family(self) -> Family:
        """The family of its kernel."""
        family: Family = self.knobs.family
        return family

    @property
    def launch_knobs(self) -> dict[str, int]:
        """The launch knobs that differ from their defaults, by name; see ``launch_knob``."""
        knobs: dict[str, int] = self.knobs.launch_knobs
        return knobs

    @property
    def compiled(self) -> Candidate:
        """The candidate that its artifact is named after, which is itself with all launch knobs at their defaults."""
        known: dict[str, Any] = {x.name: x.default for x in fields(self.knobs)}
        changed = self.launch_knobs
        return self.launched({name: known[name] for name in changed}) if changed else self

    def launched(self, knobs: Mapping[str, int]) -> Candidate:
        """The candidate with some launch knobs.

        Raises:
            TypeError: its kernel has no such knob.
        """
        return replace(self, knobs=replace(self.knobs, **knobs))

    @property
    def score(self) -> Score:
        """The score modification that it is compiled with."""
        return score_of(self.op, self.mask)

    @property
    def form(self) -> Form:
        """The form that retention forward is computed in; ``auto`` where there is no choice."""
        form: Form = self.knobs.form
        return form

    @property
    def operands(self) -> Operands:
        """As in :class:`~.problem.Problem`."""
        operands: Operands = self.knobs.operands
        return operands

    @property
    def deterministic(self) -> bool:
        """True where two runs on equal inputs give equal bits."""
        return bool(self.knobs.deterministic)

    @property
    def name(self) -> str:
        """A readable, unique name made from every field; also a valid C++ and file-system identifier."""
        mask = [] if self.mask == "none" else [self.mask]
        words = [
            self.op,
            self.direction,
            *mask,
            *(["bounds"] if self.key_bounds else []),
            *self.modifications,
            self.family,
            self.dtype,
            f"d{self.padded_dim_qk}x{self.padded_dim_v}",
            self.knobs.label,
            f"c{self.copy_bytes}",
        ]
        return "_".join(words)

    @property
    def config(self) -> dict[str, Any]:
        """The kernel's name, its family and all fields, as JSON-ready values; the knobs are nested."""
        named = {"kernel": self.kernel, "family": self.family}
        return named | values_of(self) | {"knobs": plain(self.knobs)}


def knobs_as(kind: type[K]) -> Callable[[Candidate], K]:
    """A function that returns the knobs of one kernel's candidates; a TypeError for a candidate of another kernel."""

    def knobs_of(candidate: Candidate) -> K:
        if not isinstance(candidate.knobs, kind):
            raise TypeError(f"{candidate.name} has no {kind.__name__}")
        return candidate.knobs

    return knobs_of


def fields_of(problem: Problem) -> dict[str, Any]:
    """The fields of a candidate that its problem decides: all but the knobs."""
    return {
        "op": problem.op,
        "direction": problem.direction,
        "dtype": problem.dtype,
        "padded_dim_qk": problem.padded_dim_qk,
        "padded_dim_v": problem.padded_dim_v,
        "copy_bytes": problem.alignment_bytes,
        "mask": problem.mask,
        **({"key_bounds": True} if problem.key_bounds else {}),
        **({"modifications": names} if (names := problem.compiled_modifications) else {}),
    }


def rejected(
    problem: Problem, kind: type[KernelKnobs], knobs: dict[str, Any], violation: tuple[str, str]
) -> Rejection:
    """The rejection of all candidates of a problem that would have some knobs.

    Args:
        problem: what they would compute.
        kind: the knobs' class.
        knobs: those that the rule is about, by name.
        violation: the rule's name and its reason.
    """
    config = {"kernel": kind.kernel, "family": kind.family} | fields_of(problem) | {"knobs": knobs}
    return Rejection(rejected=config, predicate=violation[0], reason=violation[1])
