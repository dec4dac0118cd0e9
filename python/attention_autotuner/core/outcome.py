"""Outcomes of candidates: typed, with the reason, and kept. Never None, never a sentinel time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

OUTCOMES: dict[str, type[Outcome]] = {}
"""Kind -> outcome, in the order of their definitions."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The evidence of a verification.

    Attributes:
        verifier: digest of the code that verified, see :func:`~..tuning.verify.verifier_digest`.
        gpu_name: the GPU that ran the kernel; ``cpu`` where none did.
        checks: the problems that it ran, each with the way that it was called and the seed of its inputs.
        repeats: launches on each input.
        same_bits: whether all launches on one input gave equal bits.
        ratios: output -> its largest error over the error that is allowed; at most 1.
    """

    verifier: str
    gpu_name: str
    checks: tuple[str, ...]
    repeats: int
    same_bits: bool
    ratios: Mapping[str, float]

    @property
    def largest(self) -> float:
        """The largest of the ratios."""
        return max(self.ratios.values(), default=0.0)

    def describe(self) -> str:
        """One line for people."""
        ratios = ", ".join(f"{name} {ratio:.2g}" for name, ratio in self.ratios.items())
        return (
            f"{len(self.checks)} checks of {self.repeats} launches on {self.gpu_name}, errors over the allowance: "
            f"{ratios}; verifier {self.verifier}"
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Proof:
        """Rebuild from what ``asdict`` gives.

        Raises:
            TypeError, ValueError: a field is missing, unknown or of another type.
        """
        ratios = {str(name): float(ratio) for name, ratio in dict(data["ratios"]).items()}
        return cls(**{**data, "checks": tuple(map(str, data["checks"])), "ratios": ratios})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Base of all outcomes.

    Attributes:
        kind: the class's name in lower case, its words joined by underscores.
        reason: why, in one sentence a person can act on; empty for :class:`Ok`.
        log: path of the kept log or detail, or empty.
    """

    kind: ClassVar[str] = "outcome"
    reason: str = ""
    log: str = ""

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()
        OUTCOMES[cls.kind] = cls

    @property
    def ok(self) -> bool:
        """True where the candidate may go on to the next stage."""
        return isinstance(self, Ok)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form that :func:`outcome_from_json` reads back."""
        return {"kind": self.kind, "reason": self.reason, "log": self.log}


@dataclass(frozen=True, kw_only=True)
class Ok(Outcome):
    """It passed the stage.

    Attributes:
        proof: what verification has shown, where that is the stage or was before it and is known.
    """

    proof: Proof | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """See :meth:`Outcome.to_json`."""
        said = super().to_json()
        if self.proof is not None:
            # Equal to what is read back, so that a record is not written again for nothing.
            said["proof"] = asdict(self.proof) | {"checks": list(self.proof.checks)}
        return said


class Infeasible(Outcome):
    """The candidate breaks a constraint of the architecture or of the problem."""


class BuildFailed(Outcome):
    """The compiler or linker refused it."""


class Spilled(Outcome):
    """It compiled, but spills registers inside its main loop."""


class Serialized(Outcome):
    """It compiled, but the compiler says that its asynchronous MMAs wait for one another."""


class LaunchFailed(Outcome):
    """The driver refused to load, prepare or launch it."""


class OutOfMemory(Outcome):
    """Device or host memory ran out."""


class Crashed(Outcome):
    """The process or the CUDA context died while it ran."""


class Wrong(Outcome):
    """Its output differs from the reference by more than the rule allows."""


class Nondeterministic(Outcome):
    """Two runs on the same input differ where equality was promised."""


class Leaked(Outcome):
    """It wrote outside its outputs."""


class TimedOut(Outcome):
    """It ran past its time limit."""


class Postponed(Outcome):
    """Its turn did not come before the budget of the search ended; nothing is known of it."""


def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """Rebuild an outcome from :meth:`Outcome.to_json`.

    Raises:
        TypeError, ValueError: the kind is unknown, or the proof is damaged.
    """
    kind = data.get("kind")
    if kind not in OUTCOMES:
        raise ValueError(f"unknown outcome kind {kind!r}; known: {sorted(OUTCOMES)}")
    said: dict[str, Any] = {"reason": data.get("reason", ""), "log": data.get("log", "")}
    if data.get("proof") is not None:
        said["proof"] = Proof.from_json(data["proof"])
    return OUTCOMES[kind](**said)
