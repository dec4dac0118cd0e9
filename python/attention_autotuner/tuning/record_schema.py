"""The content of a tuning record, and its JSON form.

A record remembers one (bucketed) problem on one GPU: every candidate that was tried, with its own timing or the reason
why it fell out, and the pick. So adding a candidate to the search space means measuring one kernel, and a change of one
kernel disturbs no entry of another.

Schema 2 held every record to the knobs of its whole operation and to the bytes of its kernel's source. It is still
read, and these bytes are still compared (``kernel_digest``): where they are the same nothing has changed, the knobs of
that kernel included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..codegen.code_digest import comparable
from ..core.candidate import Candidate
from ..core.identity import digest16, values_of
from ..core.outcome import Ok, Outcome, Proof, outcome_from_json
from ..core.problem import Problem
from ..errors import RecordError, UnsupportedProblemError
from ..kernels.configs import candidate_from_config, knob_schema, with_kernel
from ..kernels.registry import KERNELS
from .environment import Environment

SCHEMA = 3  # of the JSON form
READ = (2, SCHEMA)  # those that are read

Purpose = Literal["forward", "backward", "step"]


def space_digest(candidates: list[Candidate]) -> str:
    """Digest of the candidates a policy offers for a problem, in any order."""
    return digest16(sorted(candidate.name for candidate in candidates))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One candidate's timing.

    Attributes:
        median_us: median kernel time, microseconds.
        spread_us: half the distance between the quartiles, microseconds.
        samples: how many timings the median is of.
        ratio_to_best: this median over the best one's of the same run, from paired rounds; 1.0 for the best.
        environment: digest of the environment it was taken in.
        ratio_low, ratio_high: the interval that ``ratio_to_best`` is known to lie in; None in records from before it
            was kept.
    """

    median_us: float
    spread_us: float
    samples: int
    ratio_to_best: float
    environment: str
    ratio_low: float | None = None
    ratio_high: float | None = None

    @property
    def tied(self) -> bool:
        """True where it could not be told from the best of its run, as the interval is known and includes 1."""
        return self.ratio_low is not None and self.ratio_low <= 1.0


@dataclass(frozen=True, kw_only=True)
class CandidateEntry:
    """One candidate in a record, with its outcome.

    Attributes:
        candidate: the candidate.
        outcome: Ok, with the proof that it is right where one was kept, or why it fell out.
        source_digest: what its source says, see :func:`~.source_digest`; empty where it is
            known by ``kernel_digest`` alone.
        code_digest: its machine code, see :func:`~.code_digest`; None where it is not known, or was taken of
            the host's code too, as before there was ``code_digest.PREFIX``.
            The timing holds while either of the two is as it was.
        knob_schema: what its kernel's knobs could say when it was written; by default what they can say now.
        kernel_digest: identity of its source, byte by byte, in records of schema 2; else None.
        measurement: its timing, when it came so far.
        estimate_us: what the cost model said last, microseconds.
    """

    candidate: Candidate
    outcome: Outcome
    source_digest: str = ""
    code_digest: str | None = None
    knob_schema: str = ""
    kernel_digest: str | None = None
    measurement: Measurement | None = None
    estimate_us: float | None = None

    def __post_init__(self) -> None:
        if not self.knob_schema:
            object.__setattr__(self, "knob_schema", knob_schema(self.candidate.kernel))

    @property
    def proof(self) -> Proof | None:
        """The proof; None before proofs were kept, and where it was not verified."""
        return self.outcome.proof if isinstance(self.outcome, Ok) else None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "name": self.candidate.name,
            "candidate": self.candidate.config,
            "knob_schema": self.knob_schema,
            "source_digest": self.source_digest,
            "code_digest": self.code_digest,
            "outcome": self.outcome.to_json(),
            "measurement": None if self.measurement is None else asdict(self.measurement),
            "estimate_us": self.estimate_us,
            **({"kernel_digest": self.kernel_digest} if self.kernel_digest is not None else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CandidateEntry:
        """Rebuild from :meth:`to_json`; old names of fields and words are read as what they are now."""
        timing = data["measurement"]
        same = ("source_digest", "knob_schema", "estimate_us")
        return cls(
            candidate=candidate_from_config(data["candidate"]),
            outcome=outcome_from_json(data["outcome"]),
            code_digest=comparable(data["code_digest"]),
            kernel_digest=data.get("kernel_digest"),
            measurement=None if timing is None else Measurement(**timing),
            **{name: data[name] for name in same},
        )


@dataclass(frozen=True, kw_only=True)
class TuningRecord:
    """The memory of one search.

    Attributes:
        problem: bucketed; its seqlens are the buckets that the record serves, not the lengths measured.
        measured_problem: the problem that was measured.
        purpose: what it was last tuned for: its direction by itself, or the training step of which it is half.
        arch: the policy's name.
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
        assert entry is not None  # or there would be no record
        return entry

    @property
    def candidate(self) -> Candidate:
        """The candidate that serves."""
        return self.picked.candidate

    @property
    def ties(self) -> tuple[str, ...]:
        """Names of the candidates that the run of the pick could not tell from its best, among them the pick's."""
        picked = self.picked.measurement
        run = picked and picked.environment
        timed = ((e.candidate.name, e.measurement) for e in self.entries if e.measurement)
        return tuple(name for name, timing in timed if timing.tied and timing.environment == run)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form that :meth:`from_json` reads back."""
        return {
            "schema": self.schema,
            "problem": values_of(self.problem),
            "measured_problem": values_of(self.measured_problem),
            "purpose": self.purpose,
            "arch": self.arch,
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
        """Rebuild from :meth:`to_json`, of this schema or of one that is still read.

        Entries of kernels whose knobs cannot say any longer what they said are left out.

        Raises:
            RecordError: a field is missing, unknown or outside its limits.
        """
        data = migrated(data)
        try:
            entries = [_entry(entry) for entry in data["entries"]]
            names = {old: entry.candidate.name for old, entry in entries if entry is not None}
            environments = data["environments"].items()
            same = ("schema", "purpose", "arch", "space_digest", "confirmed")
            return cls(
                problem=Problem(**data["problem"]),
                measured_problem=Problem(**data["measured_problem"]),
                pick=names.get(data["pick"], data["pick"]),
                default=names.get(data["default"], data["default"]),
                environment=Environment.from_json(data["environment"]),
                environments={name: Environment.from_json(env) for name, env in environments},
                entries=tuple(entry for _, entry in entries if entry is not None),
                **{name: data[name] for name in same},
            )
        except KeyError as error:
            raise RecordError(f"the record lacks the field {error}") from error
        except (TypeError, ValueError, AttributeError, UnsupportedProblemError) as error:
            raise RecordError(f"the record does not follow schema {SCHEMA}: {error}") from error


def _entry(data: Mapping[str, Any]) -> tuple[str, CandidateEntry | None]:
    """An entry by the name that it was written under; None in place of one that its kernel can no longer say."""
    try:
        return data["name"], CandidateEntry.from_json(data)
    except (TypeError, ValueError):
        if data["knob_schema"] == present_schema(data["candidate"]):
            raise
        return data["name"], None


# --- what was written before ----------------------------------------------------------------------


def present_schema(config: object) -> str | None:
    """The present knob schema of a config's kernel; None for a config of no kernel there is."""
    if not isinstance(config, Mapping):
        return None
    try:
        return knob_schema(config["kernel"])
    except (KeyError, TypeError):
        return None


def migrated(document: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed record in its present form; of a schema that is not read, as it is.

    Raises:
        RecordError: it does not follow the schema that it names.
    """
    if document.get("schema") != 2:
        return dict(document)
    try:
        kept = {name: value for name, value in document.items() if name != "space_schema"}
        entries = [
            _migrated_entry(entry)
            for entry in document["entries"]
            if with_kernel(entry["candidate"])["kernel"] in KERNELS  # some are gone since
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"the record does not follow schema 2: {error}") from error
    return {**kept, "schema": SCHEMA, "entries": entries}


def _migrated_entry(data: Mapping[str, Any]) -> dict[str, Any]:
    config, timing = with_kernel(data["candidate"]), data["measurement"]
    if timing is not None:
        timing = {name: value for name, value in timing.items() if name != "candidate_name"}
    return {
        **data,
        "name": candidate_from_config(config).name,
        "candidate": config,
        "knob_schema": present_schema(config),
        "source_digest": "",
        "code_digest": None,
        "measurement": timing,
    }
