"""One search by all ranks of a process group: each races its share, a few finalists race everywhere, the worst counts.

Every rank times its share of the candidates on its own GPU against the default, and at most :data:`FINALISTS` then on
all ranks. A finalist's ratio to the default is that of the rank where it is worst: what serves all suits the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf, log
from typing import Any

from ..arch.policy import Policy
from ..codegen.render import RenderedKernel
from ..core.outcome import LaunchFailed, Ok, Outcome
from ..core.problem import Problem
from ..errors import DistributedError
from .lookup import Hit, Query
from .pipeline import Built, Doubt, Pipeline, running
from .racing import TIE_CONFIDENCE, TIE_LOG_RATIO, Timing
from .ranks import Ranks
from .record_schema import TuningRecord
from .records import RecordStore
from .validity import Miss

FINALISTS = 4
RaceNames = Callable[[Sequence[str]], list[Timing]]


def merge(outcomes: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """One outcome for each name that any rank checked: a failure, where one has it."""
    merged: dict[str, Outcome] = {}
    for by_name in outcomes:
        merged |= {n: outcome for n, outcome in by_name.items() if merged.get(n, Ok()).ok}
    return merged


def race_together(ranks: Ranks, names: Sequence[str], race: RaceNames) -> list[Timing]:
    """Race entries on all ranks.

    Args:
        ranks: of the group.
        names: in tie-breaking order, the default first; the same on all ranks.
        race: races some of them on this rank, which keep their order.

    Returns:
        One timing per name, fastest first, the same on all ranks; times are those of the rank where the entry is worst
        against the default.

    Raises:
        DistributedError: a rank failed or is gone, or the ranks do not come to the same.
    """
    ranks.agree("candidates", list(names))
    if not names:
        return []
    default, *others = names
    shards = _raced(ranks, "shards", [default, *others[ranks.rank :: ranks.size]], race)
    timings = {name: _worst(of_ranks) for name, of_ranks in shards.items()}
    usable = [name for name in others if timings[name].outcome.ok and timings[default].outcome.ok]
    finalists = sorted(usable, key=lambda name: timings[name].ratio_to_best)[:FINALISTS]
    if finalists:
        finals = _raced(ranks, "finals", [default, *sorted(finalists, key=names.index)], race)
        timings |= {name: _worst(of_ranks) for name, of_ranks in finals.items()}
    if not timings[default].outcome.ok:  # nothing to compare with: the next one takes its place
        return [*race_together(ranks, others, race), timings[default]]
    in_finals = {default, *finalists}
    best = min(timings[name].ratio_to_best for name in in_finals)
    results = []
    for name in names:
        timing, ratio = timings[name], timings[name].ratio_to_best / best
        close = log(ratio) <= max(TIE_LOG_RATIO, TIE_CONFIDENCE * timing.error)
        tied = timing.outcome.ok and name in in_finals and close
        results.append(replace(timing, ratio_to_best=max(1.0, ratio), tied=tied))
    results.sort(
        key=lambda t: (not t.outcome.ok, t.name not in in_finals, not t.tied, not t.tied and t.ratio_to_best)
    )  # fmt: skip
    ranks.agree("decision", [[t.name, t.ratio_to_best, t.outcome.kind] for t in results])
    return results


def _raced(
    ranks: Ranks, step: str, names: Sequence[str], race: RaceNames
) -> dict[str, list[Timing]]:
    """The timings of all ranks by name; their ratios are to the default, the first name."""
    timings = {timing.name: timing for timing in race(names)}
    base = timings[names[0]]
    mine = [
        vars(replace(t, ratio_to_best=t.ratio_to_best / base.ratio_to_best if base.outcome.ok else inf))
        for t in timings.values()
    ]  # fmt: skip
    by_name: dict[str, list[Timing]] = {}
    for of_rank in ranks.exchange(step, mine):
        for data in of_rank:
            by_name.setdefault(data["name"], []).append(Timing(**data))
    return by_name


def _worst(timings: Sequence[Timing]) -> Timing:
    """The timing of the rank where an entry failed, or else of that where it is slowest against the default."""
    return max(timings, key=lambda t: (not t.outcome.ok, t.ratio_to_best, t.median_us))


class SharedSearch:
    """A pipeline and records as a search takes them, shared by the ranks of a group inside a ``with`` block.

    Args:
        group: the process group; None leaves both as they are.
        pipeline: of this rank.
        records: of this rank; the first rank of each host writes.
        problem: what is searched for.
        policy: the policy whose default every rank checks.
        asked: the other arguments of the search, which must be the same on all ranks.
    """

    def __init__(
        self,
        group: Any,
        pipeline: Pipeline,
        records: RecordStore,
        problem: Problem,
        policy: Policy,
        asked: Sequence[Any],
    ) -> None:
        self.prefix, self.pipeline, self.records = "", pipeline, records
        self._stack = ExitStack()
        self._ranks = None if group is None else Ranks(group)
        if self._ranks is not None:
            environment = pipeline.environment
            default = running(policy, environment).default(problem).compiled.name
            self.prefix = self._ranks.prefix
            self.pipeline = _SharedPipeline(self._ranks, pipeline, default)
            self.records = _SharedRecords(self._ranks, records.root)
            gpu = [environment.gpu_name, environment.num_sms, pipeline.can_measure()]
            self._agreed = [problem, policy.name, *asked], gpu

    def __enter__(self) -> None:
        if self._ranks is not None:
            with self._stack as stack:
                stack.enter_context(self._ranks)
                for step, value in zip(
                    ("arguments and settings", "GPUs"), self._agreed, strict=True
                ):
                    self._ranks.agree(step, value)
                self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _SharedPipeline:
    """The pipeline of a rank: see :class:`~.pipeline.Pipeline`."""

    def __init__(self, ranks: Ranks, inner: Pipeline, default: str) -> None:
        self._ranks, self._inner, self._default = ranks, inner, default
        self.environment = inner.environment
        self._turn = 0
        self._checked: dict[str, Outcome] = {}  # by this rank

    def can_measure(self) -> bool:
        """True where this rank can."""
        return self._inner.can_measure()

    def build(
        self, kernels: Sequence[RenderedKernel], progress: Callable[[int, int, str], None]
    ) -> Sequence[Built | Outcome]:
        """Build on the first rank of each host; the others wait and take what its store has."""

        def watched(done: int, total: int, message: str) -> None:
            self._ranks.check()
            progress(done, total, message)

        builds = self._ranks.leads_host
        results = self._inner.build(kernels, watched) if builds else ()
        self._ranks.exchange("build", None)  # here the others wait
        results = list(results if builds else self._inner.build(kernels, watched))
        self.environment = self._inner.environment
        said = [r if isinstance(r, Outcome) else (r.code_digest or "") for r in results]
        for index, of_ranks in enumerate(zip(*self._ranks.exchange("built", said), strict=True)):
            failures = [result for result in of_ranks if isinstance(result, Outcome)]
            if failures:
                results[index] = failures[0]
            elif len(set(of_ranks)) > 1:
                name, codes = kernels[index].name, ", ".join(of_ranks)
                raise DistributedError(f"the ranks have different machine code of {name}: {codes}")
        return results

    def verify(self, problem: Problem, built: Built, *, deterministic: bool) -> Outcome:
        """Check a kernel in its turn, and the default; the ranks that it falls to tell before the race."""
        self._ranks.check()
        if not built.path.name.startswith(self._default):
            self._turn += 1
            if self._turn % self._ranks.size != self._ranks.rank:
                return Ok()
        outcome = self._inner.verify(problem, built, deterministic=deterministic)
        self._checked[_key(built)] = outcome
        return outcome

    def measure(
        self,
        problem: Problem,
        built: dict[str, Built],
        *,
        budget_seconds: float,
        keep: Collection[str],
        on_round: Callable[[int, list[str]], None],
    ) -> tuple[list[Timing], bool]:
        """Race on all ranks what the ranks that checked it found right; half the time is the finals'."""
        interrupted = False

        def watched(rounds: int, running: list[str]) -> None:
            self._ranks.check()
            on_round(rounds, running)

        def race(names: Sequence[str]) -> list[Timing]:
            nonlocal interrupted
            timings, cut_short = self._inner.measure(
                problem,
                {name: built[name] for name in names},
                budget_seconds=budget_seconds / 2,
                keep=names[:1],
                on_round=watched,
            )
            interrupted |= cut_short
            return timings

        checked = merge(self._ranks.exchange("checks", self._checked))
        unknown = LaunchFailed(reason="no rank checked it")
        outcomes = {name: checked.get(_key(kernel), unknown) for name, kernel in built.items()}
        usable = [name for name, outcome in outcomes.items() if outcome.ok]
        timings = race_together(self._ranks, usable, race)
        self.environment = self._inner.environment
        failed = [lost(name, outcome) for name, outcome in outcomes.items() if not outcome.ok]
        return timings + failed, any(self._ranks.exchange("interrupts", interrupted))

    def measure_steps(
        self, problem: Problem, steps: Mapping[str, tuple[Built, Built]], *, budget_seconds: float
    ) -> tuple[list[Timing], bool]:
        """Race whole steps on this rank."""
        return self._inner.measure_steps(problem, steps, budget_seconds=budget_seconds)

    def confirm_all(self, doubts: Sequence[Doubt]) -> Sequence[float | Outcome | None]:
        """The worst that any rank found: a failure, nothing, or the least ratio."""
        mine = list(self._inner.confirm_all(doubts))
        return [
            next((ratio for ratio in ratios if isinstance(ratio, Outcome)), None)
            or (None if None in ratios else min(ratios))
            for ratios in zip(*self._ranks.exchange("confirmation", mine), strict=True)
        ]


def _key(built: Built) -> str:
    """A built kernel with its launch knobs, which several candidates may have in common but for them."""
    return f"{built.path.name} {sorted(built.launch_knobs.items())}"


def lost(name: str, outcome: Outcome) -> Timing:
    """The timing of an entry that was not raced."""
    return Timing(
        name=name, outcome=outcome, median_us=inf, spread_us=0.0, samples=0, ratio_to_best=inf, error=inf, tied=False
    )  # fmt: skip


class _SharedRecords(RecordStore):
    """Records that count where all ranks have the same, and that one rank of each host writes."""

    def __init__(self, ranks: Ranks, root: Any) -> None:
        super().__init__(root)
        self._ranks = ranks

    def find(self, query: Query) -> Hit | Miss:
        """See :meth:`~.records.RecordStore.find`."""
        answer = super().find(query)
        mine = []
        if isinstance(answer, Hit):
            mine = [answer.record.pick, *(e.candidate.name for e in answer.record.entries)]
        of_ranks = self._ranks.exchange("record", mine)
        if all(of_rank == mine for of_rank in of_ranks):
            return answer
        return Miss(field="ranks", expected="the same record on all ranks", recorded=str(of_ranks))

    def put(self, record: TuningRecord) -> TuningRecord:
        """See :meth:`~.records.RecordStore.put`."""
        if self._ranks.leads_host:
            record = super().put(record)
        self._ranks.agree("pick", record.pick)
        return record
