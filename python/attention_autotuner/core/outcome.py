"""Outcomes of candidates: typed, with the reason, and kept. Never None, never a sentinel time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

OUTCOMES: dict[str, type[Outcome]] = {}
"""Kind -> outcome, in the order of their definitions."""


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


class Ok(Outcome):
    """It passed the stage."""


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
        ValueError: the kind is unknown.
    """
    kind = data.get("kind")
    if kind not in OUTCOMES:
        raise ValueError(f"unknown outcome kind {kind!r}; known: {sorted(OUTCOMES)}")
    return OUTCOMES[kind](reason=data.get("reason", ""), log=data.get("log", ""))
