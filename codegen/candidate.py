"""The candidate: one way to solve a problem, as a kernel family and its compile-time knobs.

A candidate depends on the padded classes of the head dims only, never on the true dims or lengths, so one compiled
candidate serves every problem of its class. Which candidates are legal on which GPU is for ``arch`` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from .knobs import (
    KNOBS,
    BackwardKnobs,
    ForwardKnobs,
    Knobs,
    ParallelKnobs,
    knobs_from_config,
    knobs_to_config,
)
from .problem import Direction, DType, Form, Mask, Op, Problem
from .retention_knobs import ChunkwiseKnobs, RecurrentKnobs, WgmmaChunkwiseKnobs
from .wgmma_knobs import WgmmaBackwardKnobs, WgmmaForwardKnobs

Family = Literal["sm80", "sm90"]

_Kind = TypeVar("_Kind")

_SM90: tuple[type[Knobs], ...] = (WgmmaForwardKnobs, WgmmaBackwardKnobs, WgmmaChunkwiseKnobs)
_FORMS: dict[type[Knobs], Form] = {
    ParallelKnobs: "parallel",
    ChunkwiseKnobs: "chunkwise",
    WgmmaChunkwiseKnobs: "chunkwise",
    RecurrentKnobs: "recurrent",
}


def family_of(kind: type[Knobs]) -> Family:
    """The family whose kernels a knob class describes."""
    return "sm90" if kind in _SM90 else "sm80"


def families(op: Op, direction: Direction) -> tuple[Family, ...]:
    """The families that an operation's kernels come in."""
    return tuple(dict.fromkeys(map(family_of, KNOBS[op, direction])))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel family with every knob set.

    Attributes:
        family: ``sm80``: mma.sync, ldmatrix, cp.async; runs on compute capability 8.0 and newer. ``sm90``: wgmma and
            tensor maps; runs on 9.0 alone.
        op, direction, dtype: as in :class:`~.problem.Problem`.
        class_qk, class_v: padded head dims that the kernel is compiled for, elements.
        copy_bytes: width of global reads: 16, or 2 for tensors without 16-byte alignment.
        mask: as in :class:`~.problem.Problem`.
        knobs: of the operation, the direction and, for retention forward, the form.

    Raises:
        TypeError: the knobs are another operation's or family's.
    """

    family: Family
    op: Op = "attention"
    direction: Direction = "forward"
    dtype: DType
    class_qk: int
    class_v: int
    copy_bytes: Literal[2, 16] = 16
    mask: Mask = "none"
    knobs: Knobs

    def __post_init__(self) -> None:
        wanted = KNOBS[self.op, self.direction]
        if type(self.knobs) not in wanted:
            names = " or ".join(kind.__name__ for kind in wanted)
            raise TypeError(
                f"{self.op} {self.direction} takes {names}, got {type(self.knobs).__name__}"
            )
        if family_of(type(self.knobs)) != self.family:
            raise TypeError(f"{type(self.knobs).__name__} is not of family {self.family}")

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
            mask=problem.mask,
            knobs=knobs,
        )

    @property
    def forward(self) -> ForwardKnobs:
        """The knobs of attention's or retnet's forward.

        Raises:
            TypeError: it is another kind of candidate.
        """
        return self._knobs_as(ForwardKnobs)

    @property
    def backward(self) -> BackwardKnobs:
        """The knobs of attention's or retnet's backward.

        Raises:
            TypeError: it is another kind of candidate.
        """
        return self._knobs_as(BackwardKnobs)

    def _knobs_as(self, kind: type[_Kind]) -> _Kind:
        if not isinstance(self.knobs, kind):
            raise TypeError(f"{self.name} has no {kind.__name__}")
        return self.knobs

    @property
    def form(self) -> Form:
        """How retention forward is computed; ``auto`` where there is no choice."""
        return _FORMS.get(type(self.knobs), "auto")

    @property
    def deterministic(self) -> bool:
        """Whether two runs on equal inputs give equal bits."""
        return self.knobs.deterministic

    @property
    def name(self) -> str:
        """A readable, unique name made from every field; also a valid C++ and file-system identifier."""
        mask = [] if self.mask == "none" else [self.mask]
        parts = [
            self.op,
            self.direction,
            *mask,
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
