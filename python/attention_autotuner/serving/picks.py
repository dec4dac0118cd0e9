"""The cache hierarchy that a pick comes from: the user's tuning records, the shipped records, the policy's default.

:mod:`.dispatch` asks for the GPU of a call, :mod:`.exports` and the command line for one that need not be present.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..arch import Policy
from ..codegen.store import default_store
from ..core.candidate import Candidate
from ..core.memo import remembered
from ..core.problem import Problem
from ..errors import RecordError, StoreError
from ..settings import Settings
from ..tuning.environment import Environment
from ..tuning.lookup import Hit, Query
from ..tuning.records import FrozenRecords, RecordStore
from ..tuning.shipped import ShippedRecords, shipped_gpus
from ..tuning.validity import Miss, built_here

_log = logging.getLogger(__name__)

Layer = Literal["record", "shipped", "default"]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A level of the hierarchy that was asked and does not serve.

    Attributes:
        layer: its name.
        reason: why not.
    """

    layer: Layer
    reason: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A decision.

    Attributes:
        candidate: the kernel to run.
        layer: where it comes from: the user's record, a shipped record, or the policy's default.
        exact: true for a record of this very bucket, false for a neighbour's.
        unverified: soft fields of the record's environment that differ from the present one.
        reason: why the levels before it do not serve, or that none was asked.
        passed: these levels, in the order in which they were asked.
    """

    candidate: Candidate
    layer: Layer
    exact: bool = True
    unverified: tuple[str, ...] = ()
    reason: str = ""
    passed: tuple[Passed, ...] = ()


@remembered("picks.frozen")
def frozen_records(root: Path) -> FrozenRecords:
    """The records of a folder as they were when this process first asked."""
    return FrozenRecords(root)


class CacheHierarchy:
    """The levels under given settings; reads files, remembers no pick.

    Args:
        settings: where the user's records are, and whether any level but the default is asked at all.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        root = settings.cache_dir / "records"
        is_frozen = "frozen" in (settings.mode_of("forward"), settings.mode_of("backward"))
        self.records = RecordStore(root)
        self._frozen = frozen_records(root) if is_frozen else self.records
        self.shipped = ShippedRecords()

    def choose(
        self,
        problem: Problem,
        policy: Policy,
        environment: Environment,
        *,
        with_records: bool = True,
        unrecorded: Passed | None = None,
    ) -> tuple[Pick, Hit | None]:
        """The pick of the first level that has one, with the record that it was read from.

        Args:
            problem: as called.
            policy: whose candidates and records.
            environment: that records are compared with, field by field, see :meth:`environment_of`; None is not
                compared.
            with_records: ask the user's own records, too.
            unrecorded: what they answered for another problem of the bucket, so that they are not asked again.

        Raises:
            NoCandidateError: the policy has nothing legal for it.
        """
        mode = self.settings.mode_of(problem.direction)
        if mode == "off":
            default = policy.untuned(problem)
            off = Pick(candidate=default, layer="default", reason="mode is off")
            return off, None
        problem = self.asked(problem)
        query = Query(
            problem=problem,
            arch=policy.name,
            environment=environment,
            kernels=built_here(default_store(self.settings), environment),
            strict=self.settings.strict_versions,
            proven=self.settings.strict_proof,
        )
        levels: list[tuple[Layer, Callable[[Query], Hit | Miss]]] = [
            ("record", (self._frozen if mode == "frozen" else self.records).find),
            ("shipped", self.shipped.find),
        ]
        passed = [] if unrecorded is None else [unrecorded]
        for layer, find in levels if with_records and unrecorded is None else levels[1:]:
            answer = _ask(layer, find, query)
            if isinstance(answer, Hit):
                pick = _pick(answer.candidate, layer, passed)
                return replace(pick, exact=answer.exact, unverified=answer.unverified), answer
            passed.append(Passed(layer=layer, reason=answer))
        return _pick(policy.default(problem), "default", passed), None

    def asked(self, problem: Problem) -> Problem:
        """The problem whose pick serves a problem: one of rounded lengths, and where mode is frozen deterministic."""
        frozen = self.settings.mode_of(problem.direction) == "frozen"
        deterministic = problem.deterministic or (frozen and problem.direction == "backward")
        return replace(problem.rounded(), deterministic=deterministic)

    def gpus_of(self, policy: Policy) -> list[str]:
        """The driver's names of those GPUs of a policy's spec that records were measured on, in order."""
        measured = {record.environment.gpu_name for _, record in self.records.records()}
        return sorted(
            name
            for name in {*measured, *shipped_gpus()}
            if name is not None and any(part in name for part in policy.spec.device_names)
        )

    def environment_of(self, policy: Policy, present: Environment) -> Environment:
        """The environment that records are compared with: the present GPU's, or the name of one that is not here.

        Args:
            policy: whose spec says which GPUs it is for.
            present: this machine's; without a GPU, the first that :meth:`gpus_of` knows stands in for it.
        """
        if present.gpu_name is not None:
            return present
        return Environment(gpu_name=next(iter(self.gpus_of(policy)), policy.spec.name))


def _pick(candidate: Candidate, layer: Layer, passed: list[Passed]) -> Pick:
    reason = "; ".join(map(str, passed))
    return Pick(candidate=candidate, layer=layer, reason=reason, passed=tuple(passed))


def _ask(layer: Layer, find: Callable[[Query], Hit | Miss], query: Query) -> Hit | str:
    """The record that a level has, or why it has none; a level that cannot be read is logged and passed over."""
    name = "shipped record" if layer == "shipped" else layer
    try:
        answer = find(query)
    except (RecordError, StoreError) as error:
        _log.warning("no %s is served: %s", name, error)
        return str(error)
    if isinstance(answer, Miss):
        return answer.describe()
    # A promise to the caller, kept here whatever a file says.
    if query.problem.deterministic and not answer.candidate.deterministic:
        candidate = answer.candidate.name
        _log.warning("no %s is served: its pick %s is not deterministic", name, candidate)
        return f"{layer}'s pick is not deterministic"
    return answer
