"""Our picks against other implementations: paired rounds in one process.

What is timed is what our functions would run, from the user's records, the shipped ones or the default. The
policy's default is in every race too: it is replaced only where this process, which did not tune, finds the pick at
least 1 % faster, so a comparison confirms records or takes them back. A backward problem's race also holds the pick of
deterministic mode and, where a peer is timed so, the forward and backward picks as one step, or our function as a
program calls it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, Protocol

from attention_autotuner.codegen.render import render
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import AttentionAutotunerError
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.measure import Entry, KernelEntry, Measurer, StepEntry
from attention_autotuner.tuning.pipeline import Built, Pipeline
from attention_autotuner.tuning.racing import Race, Timing
from attention_autotuner.tuning.stages import MIN_GAIN
from attention_autotuner.tuning.verify import classify

from .calls import OTHERS, Call, ForwardCall, StepCall, ours
from .peer import GuardedEntry, Peer
from .rivals import AUTOGRAD, CALL, DETERMINISTIC, PICK, STEP, Meeting, Rivals, forward_of

CLOCKS = (
    "sm_clock_mhz",
    "power_draw_w",
    "temperature_c",
    "time_utc",
)  # of the environment, per row

Say = Callable[[str], None]
Results = Mapping[Candidate, Built | Outcome]
Inspect = Callable[[Problem, Call, str | None], dict[str, Any]]


class RacingMeasurer(Measurer, Protocol):
    """A measurer that keeps its last race."""

    race: Race | None


def compare(
    meetings: Sequence[Meeting],
    peers: Mapping[str, Peer],
    pipeline: Pipeline,
    measurer: RacingMeasurer,
    *,
    seconds: float,
    device_type: str | None,
    environment: Callable[[], Environment],
    say: Say,
    seed: int = 0,
    inspect: Inspect | None = None,
) -> Iterator[dict[str, Any]]:
    """Race every meeting, in random order.

    Args:
        meetings: of ours, one a problem.
        peers: whom to meet.
        pipeline: builds our kernels, in one batch, and verifies each on the problem before it is timed.
        measurer: times.
        seconds: of rounds a problem.
        device_type: for what is called as a program would call it.
        environment: read after each race, for its clocks.
        say: told one line at a time.
        seed: of the order.
        inspect: answers what is not a time about a peer's call and ours, after their race; see :mod:`.side_by_side`.

    Yields:
        One row of the document per meeting, as each is done.

    Raises:
        KeyboardInterrupt: a race was interrupted.
    """
    wanted = list(dict.fromkeys(one for each in meetings for one in each.candidates()))
    results = pipeline.build([render(one) for one in wanted], lambda done, total, message: None)
    built = dict(zip(wanted, results, strict=True))
    order = list(meetings)
    random.Random(seed).shuffle(order)
    for each in order:
        asked = {name: peer for name, peer in peers.items() if peer.asked(each.problem)}
        row = MeetingRace(each, asked, pipeline, built, device_type).row(measurer, seconds, inspect)
        found = environment().to_json()
        row["clocks"] = {name: found[name] for name in CLOCKS}
        say(describe(row))
        yield row


class MeetingRace:
    """One meeting's race and the row that it gives.

    Args:
        meeting: of ours; every kernel of it is verified on the problem here.
        peers: those asked for the problem.
        pipeline: verifies.
        built: what became of the kernels.
        device_type: for what is called as a program would call it.
        also: labels of ours that are timed though no peer is held against them.
    """

    def __init__(
        self,
        meeting: Meeting,
        peers: Mapping[str, Peer],
        pipeline: Pipeline,
        built: Results,
        device_type: str | None,
        also: Collection[str] = (),
    ) -> None:
        self._meeting = meeting
        self._also = also
        self._problem = meeting.problem
        self._peers = peers
        self._device_type = device_type
        self._refused = {name: peer.refusal(self._problem) for name, peer in peers.items()}
        self._outcomes: dict[str, Outcome] = {}
        self._usable: dict[Candidate, Built] = {}
        kernels = {one: self._problem for _, _, each in meeting.rivals() for one in each.ours()}
        if meeting.opening is not None and self._is_met(STEP):
            kernels[meeting.opening.pick] = meeting.opening.problem
        for one, problem in kernels.items():
            result = built[one]
            outcome = (
                result
                if isinstance(result, Outcome)
                else pipeline.verify(problem, result, deterministic=one.deterministic)
            )
            self._outcomes[one.name] = outcome
            if outcome.ok and not isinstance(result, Outcome):
                self._usable[one] = result
        self._race: Race | None = None
        self._timings: dict[str, Timing] = {}

    def row(
        self, measurer: RacingMeasurer, seconds: float, inspect: Inspect | None = None
    ) -> dict[str, Any]:
        """Run the race."""
        theirs = list(self._theirs())
        entries = [*self._ours(), *theirs]
        if entries:
            names = [entry.name for entry in entries]
            raced = measurer.measure(self._problem, entries, budget_seconds=seconds, keep=names)
            if measurer.interrupted:
                raise KeyboardInterrupt
            self._race = measurer.race
            self._timings = {timing.name: timing for timing in raced}
        row: dict[str, Any] = {"problem": asdict(self._problem), "name": self._problem.describe()}
        shown: dict[str, str] = {}
        for label, beside, rivals in self._meeting.rivals():
            pick, gain = self._confirmed(rivals)
            settled = {
                "pick": pick.name,
                "layer": rivals.layer if pick == rivals.pick else "default",
                "default": rivals.default.name,
                "gain_over_default": gain,
            }
            row |= settled if label == PICK else {label: settled}
            shown[label] = pick.name
            if rivals.pick != rivals.default:
                # Beside the pick stands what it beat, or what it replaced.
                shown[beside] = rivals.default.name
        shown |= {name: name for name in (STEP, CALL, AUTOGRAD, *self._peers) if self._stands(name)}
        row["entries"] = {label: self._entry(label, name) for label, name in shown.items()}
        row["ratios"] = self._ratios(shown)
        if inspect is not None:
            row["calls"] = {
                each.name: self._inspected(inspect, each.entry)
                for each in theirs
                if isinstance(each.entry, Call) and _timed(self._timings.get(each.name))
            }
        return row

    def _inspected(self, inspect: Inspect, theirs: Call) -> dict[str, Any]:
        try:
            return inspect(self._problem, theirs, self._device_type)
        except (AttentionAutotunerError, RuntimeError) as error:
            return {"outcome": classify(error).to_json()}

    def _ours(self) -> Iterator[Entry]:
        """A kernel that serves in both modes runs once."""
        kernels = [one for _, _, each in self._meeting.rivals() for one in each.ours()]
        for one in dict.fromkeys(kernels):
            if one in self._usable:
                yield KernelEntry(name=one.name, path=self._usable[one].path, problem=self._problem)
        function, others = ours(self._problem, self._device_type), OTHERS[self._problem.op]
        for label, kind in ((CALL, ForwardCall), (AUTOGRAD, StepCall)):
            if self._is_met(label):
                yield kind(name=label, function=function, others=others)
        backward, opening = self._meeting.plain.pick, self._meeting.opening
        if opening is None:
            return
        both = (self._usable.get(opening.pick), self._usable.get(backward))
        if self._is_met(STEP) and both[0] is not None and both[1] is not None:
            yield StepEntry(
                name=STEP, forward=both[0].path, backward=both[1].path, problem=self._problem
            )

    def _theirs(self) -> Iterator[GuardedEntry]:
        for name, peer in self._peers.items():
            if not self._refused[name]:
                yield GuardedEntry(peer, self._problem)

    def _is_met(self, label: str) -> bool:
        return label in self._also or any(p.against == label for p in self._peers.values())

    def _stands(self, name: str) -> bool:
        return name in self._peers or self._is_met(name)

    def _confirmed(self, rivals: Rivals) -> tuple[Candidate, float | None]:
        """The pick, or the default where the pick does not beat it here; and the pick's gain, where it is known."""
        if rivals.pick == rivals.default:
            return rivals.pick, None
        pick, default = (self._timings.get(one.name) for one in (rivals.pick, rivals.default))
        if self._race is None or not _timed(pick) or not _timed(default):
            return (rivals.default if _timed(default) else rivals.pick), None
        gain = self._race.compare(rivals.default.name, rivals.pick.name)[0] - 1.0
        return (rivals.pick if gain >= MIN_GAIN else rivals.default), gain

    def _ratios(self, shown: Mapping[str, str]) -> dict[str, dict[str, float]]:
        """Our speed over theirs, by contest."""
        found = {}
        for contest, labels in contests(self._peers).items():
            mine, other = (shown.get(label) for label in labels)
            if self._race is None or mine is None or other is None:
                continue
            if _timed(self._timings.get(mine)) and _timed(self._timings.get(other)):
                ratio, error = self._race.compare(other, mine)
                found[contest] = {"ratio": ratio, "error": error}
        return found

    def _entry(self, label: str, name: str) -> dict[str, Any]:
        """One implementation's own figures, or why there are none."""
        timing, refusal = self._timings.get(name), self._refused.get(name, "")
        if refusal:
            return {"outcome": {"kind": "refused", "reason": refusal}}
        if timing is None or not isfinite(timing.median_us):
            failed = self._outcomes.get(name) if timing is None else timing.outcome
            return {
                "outcome": {"kind": "untimed", "reason": ""} if failed is None else failed.to_json()
            }
        against = self._peers[label].against if label in self._peers else label
        return {
            "outcome": timing.outcome.to_json(),
            "median_us": timing.median_us,
            "spread_us": timing.spread_us,
            "samples": timing.samples,
            "tflops": _flops(self._problem, against) / timing.median_us / 1e6,
        }


def contests(peers: Mapping[str, Peer]) -> dict[str, tuple[str, str]]:
    """Whose speed is held against whose: contest -> labels of ours and of theirs.

    Beside the peers stands our own deterministic mode, against the pick.
    """
    found = {name: (peer.against, name) for name, peer in peers.items()}
    return {**found, DETERMINISTIC: (DETERMINISTIC, PICK)}


def _flops(problem: Problem, label: str) -> int:
    whole = label in (STEP, AUTOGRAD)
    return problem.flops + (forward_of(problem).flops if whole else 0)


def _timed(timing: Timing | None) -> bool:
    return timing is not None and timing.outcome.ok and timing.samples > 0


def describe(row: Mapping[str, Any]) -> str:
    """One line about a row."""
    ours = row["entries"][PICK]
    if "tflops" not in ours:
        return f"{row['name']}: {ours['outcome']['kind']}: {ours['outcome']['reason']}"
    words = [f"{row['name']}: {ours['tflops']:.0f} TFLOP/s"]
    words += [f"{each['ratio']:.3f}x {contest}" for contest, each in row["ratios"].items()]
    return ", ".join([*words, f"{row['layer']} {row['pick']}"])
