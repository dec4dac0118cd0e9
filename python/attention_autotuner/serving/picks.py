"""The layers that a pick may come from, in the order in which they are asked.

The user's tuning records, the records shipped with the package, the picks that its cost model predicts, the policy's
default. :mod:`.dispatch` asks for the GPU at hand; others may ask for one that need not be present.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..arch import Policy
from ..codegen.store import default_store
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..errors import RecordError, StoreError
from ..settings import Settings
from ..tuning.environment import Environment
from ..tuning.lookup import Hit, Miss, Query
from ..tuning.predicted import PredictedHit, PredictedPicks
from ..tuning.records import RecordStore
from ..tuning.shipped import ShippedRecords
from ..tuning.validity import built_here

_log = logging.getLogger(__name__)

Layer = Literal["record", "shipped", "predicted", "default"]
Found = Hit | PredictedHit

LAYERS: tuple[Layer, ...] = ("record", "shipped", "predicted", "default")
UNMEASURED: tuple[Layer, ...] = ("predicted", "default")
_WORDS: dict[Layer, str] = {"shipped": "shipped record", "predicted": "prediction"}  # in warnings


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A layer that was asked and does not serve.

    Attributes:
        layer: which.
        reason: what it lacks.
    """

    layer: Layer
    reason: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A decision.

    Attributes:
        candidate: what to run.
        layer: where it comes from: the user's record, a shipped record, a prediction of the cost model, or the policy's
            default.
        exact: whether the record or prediction is of this very bucket, rather than of a neighbour.
        unverified: soft fields of the record's environment that differ from the present one; of a prediction, ``spec``.
        reason: why the layers before it do not serve, or that none was asked.
        passed: these layers, in the order in which they were asked.
    """

    candidate: Candidate
    layer: Layer
    exact: bool = True
    unverified: tuple[str, ...] = ()
    reason: str = ""
    passed: tuple[Passed, ...] = ()


class Layers:
    """The layers under given settings; reads files, remembers no pick.

    Args:
        settings: where the user's records are, and whether any layer but the default is asked at all.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.records = RecordStore(settings.cache_dir / "records")
        self.shipped = ShippedRecords()
        self.predicted = PredictedPicks()

    def choose(
        self, problem: Problem, policy: Policy, environment: Environment, *, own: bool = True
    ) -> tuple[Pick, Found | None]:
        """The pick of the first layer that has one, with the record or prediction that it was found in.

        Args:
            problem: bucketed.
            policy: whose candidates, records and predictions.
            environment: that records are compared with, field by field; None is not compared.
            own: whether the user's own records count.

        Raises:
            NoCandidateError: the policy has nothing legal for it.
        """
        if self.settings.mode == "off":
            off = Pick(candidate=policy.default(problem), layer="default", reason="mode is off")
            return off, None
        query = Query(
            problem=problem,
            arch=policy.name,
            environment=environment,
            kernels=built_here(default_store(self.settings), environment),
            strict=self.settings.strict_versions,
        )

        def predict(query: Query) -> PredictedHit | Miss:
            return self.predicted.find(query.problem, policy, strict=query.strict)

        layers: list[tuple[Layer, Callable[[Query], Found | Miss]]] = [
            ("record", self.records.find),
            ("shipped", self.shipped.find),
            ("predicted", predict),
        ]
        passed: list[Passed] = []
        for layer, find in layers if own else layers[1:]:
            found = _ask(layer, find, query)
            if isinstance(found, str):
                passed.append(Passed(layer=layer, reason=found))
                continue
            return _pick(found.candidate, layer, passed, found), found
        return _pick(policy.default(problem), "default", passed), None


def _pick(
    candidate: Candidate, layer: Layer, passed: list[Passed], found: Found | None = None
) -> Pick:
    return Pick(
        candidate=candidate,
        layer=layer,
        exact=found is None or found.exact,
        unverified=() if found is None else found.unverified,
        reason="; ".join(map(str, passed)),
        passed=tuple(passed),
    )


def _ask(layer: Layer, find: Callable[[Query], Found | Miss], query: Query) -> Found | str:
    """What a layer has, or why it has nothing; one that cannot be read is logged and passed over."""
    try:
        found = find(query)
    except (RecordError, StoreError) as error:
        _log.warning("no %s is served: %s", _WORDS.get(layer, layer), error)
        return str(error)
    if isinstance(found, Miss):
        advice = found.advice and f"; {found.advice}"
        return f"{found.field} is {found.found}, wanted {found.expected}{advice}"
    # A promise to the caller, kept here whatever a file says.
    if query.problem.deterministic and not found.candidate.deterministic:
        name = found.candidate.name
        _log.warning(
            "no %s is served: its pick %s is not deterministic", _WORDS.get(layer, layer), name
        )
        return f"{layer}'s pick is not deterministic"
    return found
