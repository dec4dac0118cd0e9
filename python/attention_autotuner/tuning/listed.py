"""Tuning a list of problems, and measuring what the pick of a bucket costs at other lengths inside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ..arch import Policy, resolve
from ..core.candidate import Candidate
from ..core.problem import Problem, bucket_seqlen
from ..errors import UnsupportedArchitectureError
from .arguments import check_listener, check_problem, settings_of
from .bring_up import Machine
from .journal import Journal
from .pipeline import LocalPipeline, Pipeline, running
from .printing import printed
from .progress import Listener, Progress
from .racing import Timing
from .ranking import ranked
from .records import JOURNALS, RecordStore
from .result import finite
from .shortlist import shortlist
from .stages import Engine, built_of, source_digests
from .sweep import Sweep, SweepResult
from .sweep_plan import RACE_SECONDS, TOP_K, make_plan

SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)  # of a bucket; the first stands for the shortest length
_ONE_AT_A_TIME = "; without one, tune problems one at a time, which ranks them by the cost model"
SHORT = 16  # a length of the first bucket stays as it is: a step of decoding is one


def tune_problems(
    problems: Iterable[Problem],
    device_type: str | Policy | type[Policy] | None = None,
    *,
    budget_seconds: float | None = None,
    listener: Listener | None = None,
    records: RecordStore | None = None,
    pipeline: Pipeline | None = None,
) -> SweepResult:
    """Find the fastest kernels for many problems, which share their builds, and remember them.

    Races begin while kernels are still built. What was tuned before is not tuned again, unless the settings say so, and
    a list that ended early goes on from there.

    Args:
        problems: the first ones come first; of those of one bucket the first counts.
        device_type: see :func:`tune`.
        budget_seconds: wall time for all of it. None takes the setting.
        listener: told about progress.
        records: see :func:`tune`.
        pipeline: see :func:`tune`.

    Raises:
        UnsupportedArgumentError: one is no problem, or there is no function as listener.
        UnsupportedArchitectureError: the policy is unknown, or there is no GPU to measure on.
        NoCandidateError: a problem has no legal candidate on this GPU.
        SettingsError, ToolchainError, StoreError, ArtifactError: as :func:`tune`.
    """
    check_listener(listener)
    settings = settings_of(TOP_K, budget_seconds=budget_seconds)
    engine = _engine(device_type, records, pipeline, settings, listener, advice=_ONE_AT_A_TIME)
    first: dict[Problem, Problem] = {}
    for problem in problems:
        check_problem(problem)
        first.setdefault(problem.bucketed(), problem)
    budget, jobs = settings.budget_seconds or inf, Machine(settings=settings).jobs()
    plan = make_plan(list(first.values()), engine.policy, budget_seconds=budget, jobs=jobs)
    return Sweep(
        plan=plan,
        policy=engine.policy,
        pipeline=engine.pipeline,
        records=engine.records,
        budget_seconds=budget,
        fresh=settings.always_tune,
        printing=settings.print_tuning,
        progress=engine.progress,
    ).run()


@dataclass(frozen=True, kw_only=True)
class LengthCost:
    """The cost of a bucket's pick at one length.

    Attributes:
        seqlen_q, seqlen_k: the lengths.
        pick_us: the pick's time, microseconds; None where it does not run.
        best: the fastest candidate there.
        best_us: its time.
        cost: how much slower the pick is than the best, from paired rounds, e.g. 0.04.
        low, high: the interval that this is known to lie in; it includes 0 where they are tied.
    """

    seqlen_q: int
    seqlen_k: int
    pick_us: float | None
    best: str
    best_us: float
    cost: float | None
    low: float | None
    high: float | None


def bucket_cost(
    problem: Problem,
    pick: Candidate,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    top_k: int = TOP_K,
    listener: Listener | None = None,
    pipeline: Pipeline | None = None,
) -> tuple[LengthCost, ...]:
    """Race the pick of a problem's bucket at lengths inside it against what promises most there; records nothing.

    Args:
        problem: any of the bucket.
        pick: what serves it.
        device_type: as ``tune`` takes it; pipeline, too.
        top_k: how many candidates are raced at each length beside the default and the pick.
        listener: told about progress.
        pipeline: see device_type.

    Raises:
        UnsupportedArchitectureError, NoCandidateError, SettingsError, ToolchainError, StoreError, ArtifactError,
            LeaseError: as ``tune``.
    """
    engine = _engine(device_type, None, pipeline, settings_of(top_k), listener)
    policy, pools = engine.policy, dict[Problem, dict[Candidate, None]]()
    for at in (_at(problem, share) for share in SHARES):
        offered = ranked(at, policy)
        chosen = shortlist(offered, policy.untuned(at), top_k)
        pools[at] = dict.fromkeys([pick, *(candidate for candidate, _ in chosen)])
    candidates = dict.fromkeys(candidate for pool in pools.values() for candidate in pool)
    built = built_of(candidates, engine.pipeline, engine.on_built)
    digests, anchors = source_digests(candidates), {pick, *map(policy.untuned, pools)}
    rows = {c: engine.prepared(c, built[c], digests[c], default=c in anchors) for c in candidates}
    costs = []
    for place, (at, pool) in enumerate(pools.items()):
        engine.progress.tell("race", place, len(pools), at.describe())
        raced, interrupted = engine.race(at, [rows[candidate] for candidate in pool], RACE_SECONDS)
        if interrupted:
            raise KeyboardInterrupt
        costs.append(_cost(at, pick, {row.candidate: row.timing for row in raced}))
    return tuple(costs)


def _cost(at: Problem, pick: Candidate, timings: dict[Candidate, Any]) -> LengthCost:
    timed = {c: t for c, t in timings.items() if isinstance(t, Timing) and t.outcome.ok}
    best, fastest = next((c, t) for c, t in timed.items() if t.ratio_to_best == 1.0)
    of_pick = timed.get(pick)
    ends: list[float | None] = [None] * 3
    if of_pick is not None:
        ratios = (of_pick.ratio_to_best, of_pick.ratio_low, of_pick.ratio_high)
        ends = [ratio - 1.0 for ratio in ratios]
    return LengthCost(
        seqlen_q=at.seqlen_q,
        seqlen_k=at.seqlen_k,
        pick_us=None if of_pick is None else finite(of_pick.median_us),
        best=best.name,
        best_us=fastest.median_us,
        cost=ends[0],
        low=ends[1],
        high=ends[2],
    )


def _at(problem: Problem, share: float) -> Problem:
    """The problem at a share of its bucket's lengths."""

    def length(seqlen: int) -> int:
        if seqlen <= SHORT:
            return seqlen
        return max(SHORT + 1, int(share * bucket_seqlen(seqlen)) + (share == 0.5))

    return replace(problem, seqlen_q=length(problem.seqlen_q), seqlen_k=length(problem.seqlen_k))


class _Unwritten(Engine):
    """An engine that neither reads nor writes journals."""

    def journal(self, problem: Problem, suffix: str = JOURNALS[0]) -> Journal:
        return Journal(None, "")


def _engine(
    device_type: str | Policy | type[Policy] | None,
    records: RecordStore | None,
    pipeline: Pipeline | None,
    settings: Any,
    listener: Listener | None,
    advice: str = "",
) -> Engine:
    policy = resolve(device_type)
    pipeline = pipeline or LocalPipeline(policy, settings)
    if not pipeline.can_measure():
        raise UnsupportedArchitectureError(
            f"there is no GPU to measure on, or no torch to drive it{advice}"
        )
    return _Unwritten(
        policy=running(policy, pipeline.environment),
        pipeline=pipeline,
        records=records or RecordStore(settings.cache_dir / "records"),
        progress=Progress(
            printed(listener) if settings.print_tuning else listener, settings.budget_seconds
        ),
    )
