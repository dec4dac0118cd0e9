"""What a tuning record holds, and its JSON form.

A record remembers one (bucketed) problem on one GPU: every candidate that was tried, with its own timing or the reason
why it fell out, and the pick. So adding a candidate to the search space means measuring one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ..core.candidate import Candidate
from ..core.identity import digest16
from ..core.outcome import Outcome, outcome_from_json
from ..core.problem import Direction, Op, Problem
from ..errors import RecordError, UnsupportedProblemError
from ..kernels.configs import candidate_from_config, knob_schema
from ..kernels.registry import KERNELS
from .environment import Environment

SCHEMA = 2  # of the JSON form

Purpose = Literal["forward", "backward", "step"]


def space_schema(op: Op, direction: Direction) -> str:
    """Digest of what a candidate of one operation can say at all: the names of its knobs and their words.

    A change makes old records of that operation a hard miss, and of no other.
    """
    serving = (
        kernel.name
        for kernel in KERNELS.values()
        if any(service[:2] == (op, direction) for service in kernel.serves)
    )
    names = [f.name for f in fields(Candidate)]
    return digest16(SCHEMA, names, [(name, knob_schema(name)) for name in serving])


def is_present(document: Mapping[str, Any]) -> bool:
    """Whether a parsed record has the present form and speaks of the present knobs."""
    problem = document.get("problem")
    if document.get("schema") != SCHEMA or not isinstance(problem, Mapping):
        return False
    schema = space_schema(str(problem.get("op")), problem.get("direction", "forward"))
    return document.get("space_schema") == schema


def space_digest(candidates: list[Candidate]) -> str:
    """Digest of the candidates a policy offers for a problem, in any order."""
    return digest16(sorted(candidate.name for candidate in candidates))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One candidate's timing.

    Attributes:
        candidate_name: whose.
        median_us: median kernel time, microseconds.
        spread_us: half the distance between the quartiles, microseconds.
        samples: how many timings the median is of.
        ratio_to_best: this median over the best one's of the same run, from paired rounds; 1.0 for the best.
        environment: digest of the environment it was taken in.
    """

    candidate_name: str
    median_us: float
    spread_us: float
    samples: int
    ratio_to_best: float
    environment: str


@dataclass(frozen=True, kw_only=True)
class CandidateEntry:
    """What became of one candidate.

    Attributes:
        candidate: the candidate.
        kernel_digest: identity of its source; a change means that the timing no longer holds.
        outcome: Ok, or why it fell out.
        measurement: its timing, when it came so far.
        estimate_us: what the cost model said last, microseconds.
    """

    candidate: Candidate
    kernel_digest: str
    outcome: Outcome
    measurement: Measurement | None = None
    estimate_us: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "candidate": self.candidate.config,
            "kernel_digest": self.kernel_digest,
            "outcome": self.outcome.to_json(),
            "measurement": None if self.measurement is None else asdict(self.measurement),
            "estimate_us": self.estimate_us,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CandidateEntry:
        """Rebuild from :meth:`to_json`."""
        timing = data["measurement"]
        return cls(
            candidate=candidate_from_config(data["candidate"]),
            kernel_digest=data["kernel_digest"],
            outcome=outcome_from_json(data["outcome"]),
            measurement=None if timing is None else Measurement(**timing),
            estimate_us=data["estimate_us"],
        )


@dataclass(frozen=True, kw_only=True)
class TuningRecord:
    """The memory of one search.

    Attributes:
        problem: bucketed; its seqlens are the buckets that the record serves, not the lengths measured.
        measured_problem: the problem that was measured.
        purpose: what it was last tuned for: its direction by itself, or the training step of which it is half.
        arch: the policy's name.
        space_schema: see :func:`space_schema`.
        space_digest: see :func:`space_digest`.
        pick: name of the candidate that serves.
        default: name of the policy's own candidate.
        confirmed: whether a second, fresh process confirmed the gain over the default.
        entries: every candidate tried, one per name.
        environment: of the last measurement.
        environments: earlier environments that entries refer to, by digest.
        schema: version of this form.
    """

    problem: Problem
    measured_problem: Problem
    purpose: Purpose
    arch: str
    space_schema: str
    space_digest: str
    pick: str
    default: str
    confirmed: bool
    entries: tuple[CandidateEntry, ...]
    environment: Environment
    environments: Mapping[str, Environment] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.problem != self.problem.bucketed():
            raise RecordError(f"a record's problem must be bucketed, got {self.problem.describe()}")
        if self.purpose not in (self.problem.direction, "step"):
            raise RecordError(
                f"purpose must be {self.problem.direction!r} or 'step' for {self.problem.describe()}, "
                f"got {self.purpose!r}"
            )
        names = [entry.candidate.name for entry in self.entries]
        if len(names) != len(set(names)):
            raise RecordError("a record holds one entry per candidate, got duplicates")
        entry = self.entry(self.pick)
        if entry is None or not entry.outcome.ok:
            raise RecordError(f"the pick {self.pick!r} is not among the entries that passed")

    def entry(self, name: str) -> CandidateEntry | None:
        """The entry of a candidate, by name."""
        return next((e for e in self.entries if e.candidate.name == name), None)

    @property
    def picked(self) -> CandidateEntry:
        """The entry that serves."""
        entry = self.entry(self.pick)
        if entry is None:
            raise RecordError(f"the pick {self.pick!r} is not among the entries")
        return entry

    @property
    def candidate(self) -> Candidate:
        """The candidate that serves."""
        return self.picked.candidate

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form that :meth:`from_json` reads back."""
        return {
            "schema": self.schema,
            "problem": asdict(self.problem),
            "measured_problem": asdict(self.measured_problem),
            "purpose": self.purpose,
            "arch": self.arch,
            "space_schema": self.space_schema,
            "space_digest": self.space_digest,
            "pick": self.pick,
            "default": self.default,
            "confirmed": self.confirmed,
            "environment": self.environment.to_json(),
            "environments": {name: env.to_json() for name, env in self.environments.items()},
            "entries": [entry.to_json() for entry in self.entries],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TuningRecord:
        """Rebuild from :meth:`to_json`.

        Raises:
            RecordError: a field is missing, unknown or outside its limits.
        """
        try:
            return cls(
                schema=data["schema"],
                problem=Problem(**data["problem"]),
                measured_problem=Problem(**data["measured_problem"]),
                purpose=data["purpose"],
                arch=data["arch"],
                space_schema=data["space_schema"],
                space_digest=data["space_digest"],
                pick=data["pick"],
                default=data["default"],
                confirmed=data["confirmed"],
                environment=Environment.from_json(data["environment"]),
                environments={
                    name: Environment.from_json(env) for name, env in data["environments"].items()
                },
                entries=tuple(CandidateEntry.from_json(entry) for entry in data["entries"]),
            )
        except KeyError as error:
            raise RecordError(f"the record lacks the field {error}") from error
        except (TypeError, ValueError, AttributeError, UnsupportedProblemError) as error:
            raise RecordError(f"the record does not follow schema {SCHEMA}: {error}") from error
