"""The candidate: one way to solve a problem, as a kernel family and its compile-time knobs.

A candidate depends on the padded classes of the head dims only, never on the true dims or lengths, so one compiled
candidate serves every problem of its class. Which candidates are legal on which GPU is for ``arch`` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from .knobs import (
    KNOBS,
    BackwardKnobs,
    ForwardKnobs,
    Knobs,
    knobs_from_config,
    knobs_to_config,
)
from .problem import Direction, DType, Op, Problem

Family = Literal["sm80"]

FAMILIES: tuple[str, ...] = ("sm80",)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel family with every knob set.

    Attributes:
        family: ``sm80``: mma.sync, ldmatrix, cp.async; runs on compute capability 8.0 and newer.
        op, direction, dtype: as in :class:`~.problem.Problem`.
        class_qk, class_v: padded head dims that the kernel is compiled for, elements.
        copy_bytes: width of global reads: 16, or 2 for tensors without 16-byte alignment.
        knobs: of the operation and direction, see :mod:`.knobs`.

    Raises:
        TypeError: the knobs are another operation's.
    """

    family: Family
    op: Op = "attention"
    direction: Direction = "forward"
    dtype: DType
    class_qk: int
    class_v: int
    copy_bytes: Literal[2, 16] = 16
    knobs: Knobs

    def __post_init__(self) -> None:
        wanted = KNOBS[self.op, self.direction]
        if type(self.knobs) is not wanted:
            raise TypeError(
                f"{self.op} {self.direction} takes {wanted.__name__}, got {type(self.knobs).__name__}"
            )

    @classmethod
    def of(cls, problem: Problem, family: Family, knobs: Knobs) -> Candidate:
        """A candidate of a problem's kind and padded classes.

        Raises:
            TypeError: the knobs are another operation's.
        """
        return cls(
            family=family,
            op=problem.op,
            direction=problem.direction,
            dtype=problem.dtype,
            class_qk=problem.class_qk,
            class_v=problem.class_v,
            copy_bytes=problem.alignment_bytes,
            knobs=knobs,
        )

    @property
    def forward(self) -> ForwardKnobs:
        """The knobs of a forward candidate.

        Raises:
            TypeError: it is of another direction.
        """
        if not isinstance(self.knobs, ForwardKnobs):
            raise TypeError(f"{self.name} has no forward knobs")
        return self.knobs

    @property
    def backward(self) -> BackwardKnobs:
        """The knobs of a backward candidate.

        Raises:
            TypeError: it is of another direction.
        """
        if not isinstance(self.knobs, BackwardKnobs):
            raise TypeError(f"{self.name} has no backward knobs")
        return self.knobs

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return self.knobs.deterministic

    @property
    def name(self) -> str:
        """A readable, unique name made from every field; also a valid C++ and file-system identifier."""
        parts = [
            self.op,
            self.direction,
            self.family,
            self.dtype,
            f"d{self.class_qk}x{self.class_v}",
            self.knobs.label,
            f"c{self.copy_bytes}",
        ]
        return "_".join(parts)

    @property
    def config(self) -> dict[str, Any]:
        """All fields by name, in declaration order, as JSON-ready values; the knobs are nested."""
        config = {field.name: getattr(self, field.name) for field in fields(self)}
        return config | {"knobs": knobs_to_config(self.knobs)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Candidate:
        """Rebuild a candidate from :attr:`config`.

        Raises:
            TypeError: a field is unknown or missing, or the operation has no knobs.
        """
        missing = {field.name for field in fields(cls)} - config.keys()
        if missing:
            raise TypeError(f"a candidate's config lacks {', '.join(sorted(missing))}")
        knobs = knobs_from_config(config["op"], config["direction"], config["knobs"])
        return cls(**{**config, "knobs": knobs})
