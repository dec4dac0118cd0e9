"""One search by all ranks of a process group: each races its share, a few finalists race everywhere, the worst counts.

Every rank times its share of the candidates on its own GPU against the default, and at most :data:`FINALISTS` then on
all ranks. A finalist's ratio to the default is that of the rank where it is worst: what serves all suits the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from math import inf
from typing import Any

from ..arch.policy import Policy
from ..codegen.build import Progress
from ..codegen.render import RenderedKernel
from ..codegen.tools import Stop
from ..core.outcome import Ok, Outcome, Postponed
from ..core.problem import Problem
from ..errors import DistributedError, LeaseError
from .lookup import Hit, Query
from .pipeline import Built, Doubt, Pipeline, Raced, running
from .racing import TIE_CONFIDENCE, TIE_LOG_RATIO, Timing
from .ranks import Ranks
from .record_schema import TuningRecord
from .records import RecordStore
from .validity import Miss

FINALISTS = 4
SAME_ON_ALL_RANKS = ("effort", "budget_seconds", "always_tune", "strict_proof")  # of the settings
LEAST_ERROR = TIE_LOG_RATIO / TIE_CONFIDENCE  # of all but the best: two ranks' bests are none's
RaceNames = Callable[[Sequence[str]], list[Timing]]
Measuring = Callable[[], AbstractContextManager[object]]


def merge(outcomes: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """One outcome for each name that any rank checked: a failure, where one has it, else one with a proof."""
    merged: dict[str, Outcome] = {}
    for name, outcome in (item for by_name in outcomes for item in by_name.items()):
        both = (merged.get(name, outcome), outcome)
        merged[name] = min(both, key=lambda o: (o.ok, getattr(o, "proof", None) is None))
    return merged


def race_together(ranks: Ranks, names: Sequence[str], race: RaceNames) -> list[Timing]:
    """Race entries on all ranks.

    Args:
        ranks: of the group.
        names: in tie-breaking order, the default first; the same on all ranks.
        race: races some of them on this rank, which keep their order; ``Postponed`` is what came too late.

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
    late = timings[default].outcome
    if isinstance(late, Postponed):
        return [lost(name, late) for name in names]
    usable = [name for name in others if timings[name].outcome.ok and timings[default].outcome.ok]
    finalists = sorted(usable, key=lambda name: timings[name].ratio_to_best)[:FINALISTS]
    if finalists:
        finals = _raced(ranks, "finals", [default, *sorted(finalists, key=names.index)], race)
        final = {name: _worst(of_ranks) for name, of_ranks in finals.items()}
        if not any(isinstance(timing.outcome, Postponed) for timing in final.values()):
            timings |= final
    if not timings[default].outcome.ok:  # nothing to compare with: the next one takes its place
        return [*race_together(ranks, others, race), timings[default]]
    in_finals = {default, *finalists}
    best = min(timings[name].ratio_to_best for name in in_finals)
    results = []
    for name in names:
        timing, ratio = timings[name], timings[name].ratio_to_best / best
        error = timing.error or LEAST_ERROR if ratio != 1.0 else 0.0
        results.append(replace(timing, ratio_to_best=max(1.0, ratio), error=error))
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
    """A pipeline and records as a search takes them, shared by the ranks of a group while they are :meth:`joined`.

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
        self._ranks = None if group is None else Ranks(group)
        if self._ranks is not None:
            environment = pipeline.environment
            default = running(policy, environment).untuned(problem).compiled.name
            self.prefix = self._ranks.prefix
            self.pipeline = self._shared = _SharedPipeline(self._ranks, pipeline, default)
            self.records = _SharedRecords(self._ranks, records.root)
            gpu = [environment.gpu_name, environment.num_sms, pipeline.can_measure()]
            self._agreed = {"arguments and settings": [problem, policy.name, *asked], "GPUs": gpu}

    @contextmanager
    def joined(self, measuring: Measuring) -> Iterator[None]:
        """Search together inside the block.

        Args:
            measuring: gives the lease of this rank's GPU, or raises a ``LeaseError``.
        """
        if self._ranks is None:
            yield
            return
        self._shared.measuring = measuring
        with self._ranks:
            for step, value in self._agreed.items():
                self._ranks.agree(step, value)
            yield

    def exchange(self, step: str, value: Any) -> list[Any]:
        """The values of all ranks, see :meth:`.Ranks.exchange`; this process's own, where it is alone."""
        return [value] if self._ranks is None else self._ranks.exchange(step, value)

    def checked(
        self, outcomes: Mapping[str, Outcome], interrupted: bool
    ) -> tuple[dict[str, Outcome], bool]:
        """Merge what the ranks found, each in its share and by its clock; and whether any was interrupted."""
        answers = self.exchange("checks", [outcomes, interrupted])
        return merge([of_rank for of_rank, _ in answers]), any(cut for _, cut in answers)


class _SharedPipeline:
    """The pipeline of a rank: see :class:`~.pipeline.Pipeline`.

    It holds the lease of its GPU while it measures, and never while it waits for other ranks.
    """

    measuring: Measuring

    def __init__(self, ranks: Ranks, inner: Pipeline, default: str) -> None:
        self._ranks, self._inner, self._default = ranks, inner, default
        self.environment, self.gpu_id = inner.environment, inner.gpu_id
        self._turn = 0

    @property
    def deadline(self) -> float:
        """This rank's."""
        return self._inner.deadline

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._inner.deadline = deadline

    def can_measure(self) -> bool:
        """True where this rank can."""
        return self._inner.can_measure()

    def build(
        self,
        kernels: Sequence[RenderedKernel],
        progress: Progress,
        stop: Stop = lambda: False,
    ) -> Sequence[Built | Outcome]:
        """Build on the first rank of each host; the others wait and take what its store has."""

        def watched(done: int, total: int, name: str, seconds: float) -> None:
            self._ranks.check()
            progress(done, total, name, seconds)

        built: dict[str, Built | Outcome] = {}
        names = [kernel.name for kernel in kernels]
        if self._ranks.leads_host:
            built = dict(zip(names, self._inner.build(kernels, watched, stop), strict=True))
        failed: dict[str, Outcome] = {}
        mine = {name: result for name, result in built.items() if isinstance(result, Outcome)}
        for of_rank in self._ranks.exchange("build", mine):  # here the others wait
            failed = of_rank | failed
        if not self._ranks.leads_host:  # they do not begin what the first did not finish
            ready = [kernel for kernel in kernels if kernel.name not in failed]
            taken = self._inner.build(ready, watched, stop)
            built = dict(zip((kernel.name for kernel in ready), taken, strict=True))
        self.environment = self._inner.environment
        built |= failed
        results = [built[name] for name in names]
        said = [r if isinstance(r, Outcome) else (r.code_digest or "") for r in results]
        for index, of_ranks in enumerate(zip(*self._ranks.exchange("built", said), strict=True)):
            failures = [result for result in of_ranks if isinstance(result, Outcome)]
            if failures:
                results[index] = failures[0]
            elif len(set(of_ranks)) > 1:
                raise DistributedError(
                    f"the ranks have different machine code of {names[index]}: {', '.join(of_ranks)}"
                )
        return results

    def verify(self, problem: Problem, built: Built, *, deterministic: bool) -> Outcome:
        """Check a kernel in its turn, and the default; ``Ok`` without a proof leaves it to another rank."""
        self._ranks.check()
        if not built.path.name.startswith(self._default):
            self._turn += 1
            if self._turn % self._ranks.size != self._ranks.rank:
                return Ok()
        with self.measuring():
            return self._inner.verify(problem, built, deterministic=deterministic)

    def measure(self, problem: Problem, built: dict[str, Built], **options: Any) -> Raced:
        """Race on all ranks; half the time is the finals'. A history is of one rank, and counts for nothing here."""
        interrupted = False

        def watched(rounds: int, running: list[str]) -> None:
            self._ranks.check()
            options["on_round"](rounds, running)

        def race(names: Sequence[str]) -> list[Timing]:
            nonlocal interrupted
            try:
                with self.measuring():
                    timings, cut_short = self._inner.measure(
                        problem,
                        {name: built[name] for name in names},
                        budget_seconds=options["budget_seconds"] / 2,
                        keep=names[:1],
                        on_round=watched,
                    )
            except LeaseError as error:
                return [lost(name, Postponed(reason=str(error))) for name in names]
            interrupted |= cut_short
            late = Postponed(reason="the budget ended before it was timed")
            return [lost(t.name, late) if t.outcome.ok and not t.samples else t for t in timings]

        timings = race_together(self._ranks, list(built), race)
        self.environment = self._inner.environment
        timings = [lost(t.name, Ok()) if isinstance(t.outcome, Postponed) else t for t in timings]
        return timings, any(self._ranks.exchange("interrupts", interrupted))

    def measure_steps(
        self, problem: Problem, steps: Mapping[str, tuple[Built, Built]], **options: Any
    ) -> Raced:
        """Race whole steps on this rank."""
        with self.measuring():
            return self._inner.measure_steps(problem, steps, **options)

    def confirm_all(self, doubts: Sequence[Doubt]) -> Sequence[float | Outcome | None]:
        """The worst that any rank found: a failure, nothing, or the least ratio."""
        mine: list[float | Outcome | None] = [None] * len(doubts)
        with suppress(LeaseError), self.measuring():
            mine = list(self._inner.confirm_all(doubts))
        return [
            next((ratio for ratio in ratios if isinstance(ratio, Outcome)), None)
            or (None if None in ratios else min(ratios))
            for ratios in zip(*self._ranks.exchange("confirmation", mine), strict=True)
        ]


def lost(name: str, outcome: Outcome) -> Timing:
    """The timing of an entry that was not raced."""
    return Timing(
        name=name, outcome=outcome, median_us=inf, spread_us=0.0, samples=0, ratio_to_best=inf, error=inf
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
