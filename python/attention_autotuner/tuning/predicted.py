"""Picks that come with the package and were never measured: the cost model's, one read-only JSON file per policy.

They stand behind everything that was measured. A file has one choice for a handful of shapes of each class; a problem
is served by that of its bucket or of the nearest one, as with records. fp16 and bf16 share their choices: the same
instructions take the same time.

What a prediction is held to is what it was made of: the knobs that a candidate can have, and the limits of the policy
that asks. It is not held to the text of the kernels, as a record is: nothing was timed that a change of the text could
make untrue, and a tile that suits a GPU by its counts still does. A choice that was made for another shape or another
spec serves where the model, asked anew, still prefers it to the default.

Where measurements speak against the model, a file has no candidate of its own: what serves is the default of the very
problem that is asked for.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ..arch.policy import Policy
from ..core.candidate import Candidate
from ..core.identity import digest16, slug
from ..core.problem import DType, Problem
from ..errors import RecordError, UnsupportedProblemError
from ..kernels import legality
from ..kernels.configs import candidate_from_config
from ..kernels.cost_model import estimate
from .lookup import Miss, distance
from .record_migration import present_schema

SCHEMA = 2
DTYPES: tuple[DType, ...] = ("fp16", "bf16")  # that share choices; files speak of the first
COLUMNS = (
    "batch", "heads_q", "heads_kv", "seqlen", "kernel", "estimate_us", "default_us", "runner_up_us",
)  # fmt: skip
SMS_TOLERANCE = (
    0.25  # share of the SMs that a GPU may have more or less than the spec that was predicted for
)

_Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class PredictedPick:
    """A choice of the cost model for one shape.

    Attributes:
        problem: bucketed.
        candidate: the model's own; None where the policy's default serves.
        estimate_us: the model's time of what serves, microseconds, after the build where it was built.
        default_us: that of the policy's default.
        runner_up_us: that of the next best of those it chose among; None where there was no other.
    """

    problem: Problem
    candidate: Candidate | None
    estimate_us: float
    default_us: float
    runner_up_us: float | None


@dataclass(frozen=True, kw_only=True)
class PredictedHit:
    """A prediction that serves.

    Attributes:
        pick: as the file has it; of a neighbouring bucket unless ``exact``.
        candidate: what serves the problem that was asked for.
        exact: whether the prediction is of this very bucket.
        unverified: ``("spec",)`` where the policy's spec is not the one that was predicted for; else empty.
        layer: always ``predicted``.
    """

    pick: PredictedPick
    candidate: Candidate
    exact: bool
    unverified: tuple[str, ...] = ()
    layer: Literal["predicted"] = "predicted"

    @property
    def is_default(self) -> bool:
        """Whether the policy's default serves: the file's choice, or, of a neighbour, what the model prefers here."""
        return self.pick.candidate is None or self.pick.candidate.knobs != self.candidate.knobs

    @property
    def gpu_name(self) -> None:
        """None: it was measured nowhere."""

    @property
    def median_us(self) -> None:
        """None: nothing was measured."""

    @property
    def estimate_us(self) -> float:
        """What the cost model says, microseconds, of the bucket that was predicted."""
        return self.pick.estimate_us


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Shapes of one class.

    Attributes:
        picks: their choices.
        stale: what the knobs of a kernel can say now, and what they could when it was chosen, where they differ; the
            choices of such kernels are left out.
    """

    picks: tuple[PredictedPick, ...]
    stale: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class _File:
    """A policy's file, parsed."""

    source: str
    spec_digest: str
    num_sms: int
    groups: Mapping[_Key, tuple[_Group, ...]]


class PredictedPicks:
    """The read-only predictions of the package, one file per policy, parsed when first asked for.

    Args:
        folder: where the files are; by default the package's own ``tuned/predicted`` data.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._files: dict[str, _File | None] = {}

    def find(
        self, problem: Problem, policy: Policy, *, strict: bool = False
    ) -> PredictedHit | Miss:
        """The prediction for a problem, else for the nearest bucket, else why not.

        Args:
            problem: as called.
            policy: whose predictions, by its name; what they name must be legal under its spec.
            strict: a spec that differs from the one that was predicted for is a miss.

        Raises:
            RecordError: the policy's file is damaged.
            NoCandidateError: the default is to serve, and the policy has none.
        """
        file = self._load(policy.name)
        if file is None:
            return Miss(field="policy", expected=policy.name, found="without predictions")
        sms = policy.spec.num_sms
        if abs(sms / file.num_sms - 1.0) > SMS_TOLERANCE:
            return Miss(field="num_sms", expected=str(sms), found=str(file.num_sms))
        spec = spec_digest(policy)
        unverified = () if spec == file.spec_digest else ("spec",)
        if strict and unverified:
            return Miss(field="spec", expected=spec, found=file.spec_digest)
        wanted = replace(problem.bucketed(), dtype=DTYPES[0])
        missed: Miss | None = None
        near: list[tuple[tuple[float, bool, int], PredictedPick]] = []
        for group in file.groups.get(_key(wanted), ()):
            if group.stale is not None:
                now, then = group.stale
                missed = Miss(field="knob_schema", expected=now, found=then)
            for pick in group.picks:
                apart = distance(wanted, pick.problem)
                if apart is not None:
                    # As many heads in fewer batches are no way apart.
                    near.append(((apart, pick.problem != wanted, len(near)), pick))
        for _, pick in sorted(near, key=lambda one: one[0]):
            exact = pick.problem == wanted
            candidate = _serving(pick, problem, policy, sure=exact and not unverified)
            rejection = legality.check(candidate, policy.spec)
            if rejection is None and candidate.family in policy.families:
                return PredictedHit(
                    pick=pick, candidate=candidate, exact=exact, unverified=unverified
                )
            missed = missed or Miss(
                field="candidate",
                expected=f"legal on {policy.spec.name}",
                found=f"{candidate.name}: {rejection.reason if rejection else 'its family is not run'}",
            )
        described = problem.bucketed().describe()
        return missed or Miss(field="problem", expected=described, found="no prediction")

    def picks(self, policy: str) -> tuple[PredictedPick, ...]:
        """All choices of a policy, in the order of its file, of fp16; none for a policy without a file.

        Raises:
            RecordError: the file is damaged.
        """
        file = self._load(policy)
        groups = [] if file is None else [one for each in file.groups.values() for one in each]
        return tuple(pick for group in groups for pick in group.picks)

    def _load(self, policy: str) -> _File | None:
        if policy not in self._files:
            root = (
                resources.files("attention_autotuner.tuned").joinpath("predicted")
                if self._folder is None
                else self._folder
            )
            source = root.joinpath(f"{slug(policy)}.json")
            self._files[policy] = (
                _parse(str(source), source.read_bytes(), policy) if source.is_file() else None
            )
        return self._files[policy]


def spec_digest(policy: Policy) -> str:
    """Digest of every number that a prediction for a policy's GPU rests on."""
    return digest16(policy.spec)


def _key(problem: Problem) -> _Key:
    """What a problem shares with every prediction that may serve it."""
    p = problem
    return (p.op, p.direction, p.mask, p.form, p.causal, p.padded_dim_qk, p.padded_dim_v)


def _serving(pick: PredictedPick, problem: Problem, policy: Policy, *, sure: bool) -> Candidate:
    """What serves a problem by a choice that was made for it, or, unless ``sure``, for one like it."""
    if pick.candidate is None:
        return policy.default(problem)
    own = replace(pick.candidate, dtype=problem.dtype)
    if not sure and legality.check(own, policy.spec) is None:
        default, spec = policy.default(problem), policy.spec
        if estimate(problem, default, spec).us < estimate(problem, own, spec).us:
            return default
    return own


def _parse(source: str, text: bytes, policy: str) -> _File:
    """A file's content.

    Raises:
        RecordError: it is no JSON, of another schema, or a field is missing, unknown or outside its limits.
    """
    try:
        document = json.loads(text.decode())
        if document["schema"] != SCHEMA or document["policy"] != policy:
            raise RecordError(
                f"the predicted picks {source} are damaged: schema {SCHEMA} of {policy} expected, got "
                f"{document['schema']!r} of {document['policy']!r}"
            )
        if tuple(document["columns"]) != COLUMNS:
            raise ValueError(f"columns must be {COLUMNS}, got {document['columns']}")
        groups: dict[_Key, list[_Group]] = defaultdict(list)
        for data in document["groups"]:
            stale = _stale_kernels(data)
            picks = tuple(_picks(data, stale))
            if data["picks"]:
                group = _Group(picks=picks, stale=next(iter(stale.values()), None))
                groups[_key(Problem(dtype=DTYPES[0], **data["class"]))].append(group)
        return _File(
            source=source,
            spec_digest=document["spec"]["digest"],
            num_sms=int(document["spec"]["num_sms"]),
            groups={key: tuple(each) for key, each in groups.items()},
        )
    except (ValueError, KeyError, TypeError, IndexError, UnsupportedProblemError) as error:
        raise RecordError(
            f"the predicted picks {source} are damaged: {type(error).__name__}: {error}"
        ) from error


def _stale_kernels(group: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
    """The kernels of a group whose knobs can say something else by now: place -> what now, what then."""
    pairs = zip(group["kernels"], group["knob_schemas"], strict=True)
    schemas = enumerate((str(present_schema(config)), str(then)) for config, then in pairs)
    return {place: (now, then) for place, (now, then) in schemas if now != then}


def _picks(group: Mapping[str, Any], stale: Collection[int]) -> list[PredictedPick]:
    """The choices of a group, but for stale kernels: what its shapes share stands once, with its kernels."""
    kernels = {
        place: candidate_from_config(config)
        for place, config in enumerate(group["kernels"])
        if place not in stale
    }
    found = []
    for values in group["picks"]:
        row = dict(zip(COLUMNS, values, strict=True))
        if row["kernel"] in stale:
            continue
        problem = Problem(
            dtype=DTYPES[0],
            **group["class"],
            batch=row["batch"],
            heads_q=row["heads_q"],
            heads_kv=row["heads_kv"],
            seqlen_q=row["seqlen"],
            seqlen_k=row["seqlen"],
        )
        if problem != problem.bucketed():
            raise ValueError(f"a prediction's problem must be bucketed, got {problem.describe()}")
        place = row["kernel"]
        candidate = None if place is None else kernels[place]
        if candidate is not None and candidate != Candidate.of(problem, candidate.knobs):
            raise ValueError(f"{candidate.name} does not serve {problem.describe()}")
        found.append(
            PredictedPick(
                problem=problem,
                candidate=candidate,
                estimate_us=float(row["estimate_us"]),
                default_us=float(row["default_us"]),
                runner_up_us=row["runner_up_us"],
            )
        )
    return found
