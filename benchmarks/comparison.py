"""One race of our kernels and the baselines on one problem: paired rounds in one process, and the row that they give.

What is timed is what our functions would run, from the user's records, the shipped ones or the default. Where a suite
settles records, the policy's default is in the race too: it is replaced only where this process, which did not tune,
finds the pick at least 1 % faster. A backward problem's race also holds the pick of deterministic mode, the forward and
backward picks as one step, and our function as a program calls it, where a baseline is timed so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import NO_WINDOW, Problem
from attention_autotuner.errors import AttentionAutotunerError
from attention_autotuner.kernels.shared.schedule import tiles_of
from attention_autotuner.tuning.entries import Entry, entry_of
from attention_autotuner.tuning.isolated import crossing
from attention_autotuner.tuning.measure import InProcessMeasurer
from attention_autotuner.tuning.pipeline import Pipeline
from attention_autotuner.tuning.racing import Race, Timing
from attention_autotuner.tuning.rounds import classify
from attention_autotuner.tuning.stages import MIN_GAIN

from .baselines.base import Baseline, GuardedEntry, Mode
from .calls import Call, ForwardCall, StepCall, check_results, others_of, ours
from .contenders import (
    AUTOGRAD,
    CALL,
    DETERMINISTIC,
    PICK,
    STEP,
    Contenders,
    Results,
    Selection,
    flops_of,
    usable,
)

TILE = 128  # rows and keys of the tiles that documents are counted in
Inspect = Callable[[Problem, Call, str | None], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """A baseline in one mode of a race.

    Attributes:
        baseline: the implementation.
        mode: how it is timed.
        name: in the race and in results, e.g. ``sdpa_cudnn step``.
        ours: the label of ours that does the same work.
        reason: why it cannot be timed, or empty.
    """

    baseline: Baseline
    mode: Mode
    name: str
    ours: str
    reason: str


def opponents_of(
    problem: Problem, modes: Sequence[Mode], baselines: Sequence[Baseline]
) -> list[Opponent]:
    """The baselines of a problem's operation, in every mode in which each is timed."""
    return [
        Opponent(
            baseline=baseline,
            mode=mode,
            name=f"{baseline.name} {mode}",
            ours=baseline.ours(problem, mode),
            reason=baseline.available(problem),
        )
        for baseline in baselines
        if baseline.op == problem.op
        for mode in baseline.modes(modes)
    ]


class Comparison:
    """One problem's race and the row that it gives.

    Args:
        contenders: ours; every kernel of them is verified on the problem here.
        opponents: from :func:`opponents_of`.
        pipeline: verifies.
        built: what became of the kernels.
        device_type: for what is called as a program would call it.
        also: labels of ours that are timed though no baseline is compared with them.
        lengths: of packed sequences, where these are not typical.
    """

    def __init__(
        self,
        contenders: Contenders,
        opponents: Sequence[Opponent],
        pipeline: Pipeline,
        built: Results,
        device_type: str | None,
        also: Collection[str] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        self._contenders = contenders
        self._problem = contenders.problem
        self._opponents = {opponent.name: opponent for opponent in opponents}
        self._labels = {*also, *(opponent.ours for opponent in opponents)}
        self._device_type, self._lengths = device_type, lengths
        kernels = dict.fromkeys(contenders.raced(), self._problem)
        if contenders.forward is not None and STEP in self._labels:
            kernels[contenders.forward.pick] = contenders.forward.problem
        self._usable, outcomes = usable(kernels, built, pipeline)
        self._outcomes = {candidate.name: outcome for candidate, outcome in outcomes.items()}
        self._race: Race | None = None
        self._timings: dict[str, Timing] = {}

    def row(
        self, measurer: InProcessMeasurer, seconds: float, inspect: Inspect | None = None
    ) -> dict[str, Any]:
        """Run the race.

        Args:
            measurer: times.
            seconds: of rounds.
            inspect: returns what is not a time about a baseline's call and ours; see :func:`.calls.side_by_side`.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        check = partial(check_results, self._problem, self._device_type)
        theirs = [
            GuardedEntry(
                name,
                partial(other.baseline.entry, self._problem, other.mode, name),
                check if other.baseline.same else None,
            )
            for name, other in self._opponents.items()
            if not other.reason
        ]
        entries = [*self._ours(), *theirs]
        if entries:
            names = [entry.name for entry in entries]
            raced = measurer.measure(self._problem, entries, budget_seconds=seconds, keep=names)
            if measurer.interrupted:
                raise KeyboardInterrupt
            self._race = measurer.race
            self._timings = {timing.name: timing for timing in raced}
        row: dict[str, Any] = {}
        shown: dict[str, str] = {}
        for label, default_label, selection in self._contenders.selections():
            pick, gain = self._confirmed(selection)
            settled: dict[str, Any] = {
                "pick": pick.name,
                "layer": selection.layer if pick == selection.pick else "default",
            }
            if selection.pick != selection.default:
                settled |= {"default": selection.default.name, "gain_over_default": gain}
            row |= settled if label == PICK else {label: settled}
            shown[label] = pick.name
            if selection.pick != selection.default:
                # The pick stands with the default that it beat, or that replaced it.
                shown[default_label] = selection.default.name
        shown |= {name: name for name in (STEP, CALL, AUTOGRAD) if name in self._labels}
        shown |= {name: name for name in self._opponents}
        row["entries"] = {label: self._entry(label, name) for label, name in shown.items()}
        # All entries that are timed take part in every round.
        row["samples"] = max((timing.samples for timing in self._timings.values()), default=0)
        row["ratios"] = self._ratios(shown)
        if "document_ids" in self._problem.modifications:
            row["share_of_tiles"] = share_of_tiles(self._problem)
        if inspect is not None:
            row["calls"] = {
                guarded.name: self._inspected(inspect, guarded.entry)
                for guarded in theirs
                if isinstance(guarded.entry, Call) and _timed(self._timings.get(guarded.name))
            }
        return row

    def _inspected(self, inspect: Inspect, theirs: Call) -> dict[str, Any]:
        try:
            return inspect(self._problem, theirs, self._device_type)
        except (AttentionAutotunerError, RuntimeError) as error:
            return {"outcome": classify(error).to_json()}

    def _ours(self) -> Iterator[Entry]:
        for candidate in self._contenders.raced():
            if candidate in self._usable:
                libraries = [crossing(self._usable[candidate])]
                yield entry_of(candidate.name, libraries, self._problem)
        function, others = ours(self._problem, self._device_type), others_of(self._problem)
        for label, kind in ((CALL, ForwardCall), (AUTOGRAD, StepCall)):
            if label in self._labels:
                yield kind(name=label, function=function, others=others)
        if STEP not in self._labels or self._contenders.forward is None:
            return
        forward = self._usable.get(self._contenders.forward.pick)
        backward = self._usable.get(self._contenders.plain.pick)
        if forward is not None and backward is not None:
            yield entry_of(STEP, [crossing(forward), crossing(backward)], self._problem)

    def _confirmed(self, selection: Selection) -> tuple[Candidate, float | None]:
        """The pick, or the default where the pick does not beat it here; and the pick's gain, where it is known."""
        if selection.pick == selection.default:
            return selection.pick, None
        pick, default = (self._timings.get(c.name) for c in (selection.pick, selection.default))
        if self._race is None or not _timed(pick) or not _timed(default):
            return (selection.default if _timed(default) else selection.pick), None
        gain = self._race.compare(selection.default.name, selection.pick.name)[0] - 1.0
        return (selection.pick if gain >= MIN_GAIN else selection.default), gain

    def _ratios(self, shown: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Our speed over each other's, in FLOPs of what each computes, and the label of ours."""
        compared = {name: (opponent.ours, name) for name, opponent in self._opponents.items()}
        compared[DETERMINISTIC] = (DETERMINISTIC, PICK)
        ratios = {}
        for name, (label, other_label) in compared.items():
            mine, other = shown.get(label), shown.get(other_label)
            if self._race is None or mine is None or other is None:
                continue
            if _timed(self._timings.get(mine)) and _timed(self._timings.get(other)):
                ratio, error = self._race.compare(other, mine)
                opponent = self._opponents.get(name)
                if opponent is not None:
                    ratio *= self._work(label) / self._work(label, opponent)
                ratios[name] = {"ratio": ratio, "error": error, "ours": label}
        return ratios

    def _entry(self, label: str, name: str) -> dict[str, Any]:
        """One implementation's figures, or why there are none."""
        opponent, timing = self._opponents.get(label), self._timings.get(name)
        if opponent is not None and opponent.reason:
            return {"outcome": {"kind": "refused", "reason": opponent.reason}}
        if timing is None or not isfinite(timing.median_us):
            failed = self._outcomes.get(name) if timing is None else timing.outcome
            kind, reason = ("untimed", "") if failed is None else (failed.kind, failed.reason)
            # Of a compiler's messages the first line says why; what follows can be pages of its input.
            return {"outcome": {"kind": kind, "reason": reason.partition("\n")[0]}}
        work = self._work(label if opponent is None else opponent.ours, opponent)
        figures = {name: getattr(timing, name) for name in ("median_us", "spread_us")}
        return {**figures, "tflops": work / timing.median_us / 1e6}

    def _work(self, label: str, opponent: Opponent | None = None) -> float:
        """FLOPs of one of ours, or of an opponent that does the same as it."""
        problem = self._problem if opponent is None else opponent.baseline.work_of(self._problem)
        return flops_of(problem, label, self._lengths if problem == self._problem else ())


def share_of_tiles(problem: Problem) -> float:
    """The tiles of :data:`TILE` x :data:`TILE` that a causal problem with documents visits, over those without."""
    visited, all_tiles = (
        sum(tiles_of(of, block=TILE, step=TILE, by_queries=True))
        for of in (problem, replace(problem, modifications=(), window_size=NO_WINDOW))
    )
    return visited / all_tiles


def _timed(timing: Timing | None) -> bool:
    return timing is not None and timing.outcome.ok and timing.samples > 0


def describe(problem: Problem, row: Mapping[str, Any]) -> str:
    """One line about a problem's row."""
    entry = row["entries"][PICK]
    if "tflops" not in entry:
        return f"{problem.describe()}: {entry['outcome']['kind']}: {entry['outcome']['reason']}"
    words = [f"{problem.describe()}: {entry['tflops']:.0f} TFLOP/s"]
    words += [f"{ratio['ratio']:.3f}x {name}" for name, ratio in row["ratios"].items()]
    return ", ".join([*words, f"{row['layer']} {row['pick']}"])
