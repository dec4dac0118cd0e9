"""Our picks against other implementations: paired rounds in one process, and the document that keeps the figures.

What is timed is what ``flash_attn_func`` would run, from the user's records, the shipped ones or the default. The
policy's default is in every race too: it is replaced only where this process, which did not tune, finds the pick at
least 1 % faster, so a comparison confirms records or takes them back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Protocol

from attention_autotuner import dispatch
from attention_autotuner.arch import Policy
from attention_autotuner.codegen.candidate import Candidate
from attention_autotuner.codegen.outcome import Outcome
from attention_autotuner.codegen.problem import Problem
from attention_autotuner.codegen.render import kernel_digest, render
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.exhaustive import geometric_mean
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.measure import CallableEntry, Entry, KernelEntry, Measurer
from attention_autotuner.tuning.pipeline import Built, Pipeline
from attention_autotuner.tuning.racing import Race, Timing
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.search import MIN_GAIN

from .peers import Peer

SCHEMA = 1
PICK, DEFAULT = "pick", "default"
CLOCKS = (
    "sm_clock_mhz",
    "power_draw_w",
    "temperature_c",
    "time_utc",
)  # of the environment, per row
BARS = {"attention_forward": {"sdpa_flash": {"geometric_mean": 1.05, "min": 0.97}}}
"""Benchmark -> peer -> what our speed over the peer's must reach."""

Say = Callable[[str], None]
Document = dict[str, Any]


class RacingMeasurer(Measurer, Protocol):
    """A measurer that keeps its last race."""

    race: Race | None


@dataclass(frozen=True, kw_only=True)
class Rivals:
    """Who meets on a problem.

    Attributes:
        problem: the problem.
        pick: what dispatch would run.
        layer: where that comes from.
        default: the policy's own, perhaps the same.
    """

    problem: Problem
    pick: Candidate
    layer: str
    default: Candidate

    def ours(self) -> list[Candidate]:
        """The default first: ties go to it."""
        return [self.default] if self.pick == self.default else [self.default, self.pick]


def rivals_of(problems: Sequence[Problem], policy: Policy, device: int = 0) -> list[Rivals]:
    """What dispatch would run for each problem, and the default beside it."""
    found = []
    for problem in problems:
        pick = dispatch.lookup(problem, policy, device=device)
        found.append(
            Rivals(
                problem=problem,
                pick=pick.candidate,
                layer=pick.layer,
                default=policy.default(problem),
            )
        )
    return found


def compare(
    meetings: Sequence[Rivals],
    peers: Mapping[str, Peer],
    pipeline: Pipeline,
    measurer: RacingMeasurer,
    *,
    seconds: float,
    environment: Callable[[], Environment],
    say: Say,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Race every meeting, in random order.

    Args:
        meetings: from :func:`rivals_of`.
        peers: whom to meet.
        pipeline: builds our kernels, in one batch, and verifies each on the problem before it is timed.
        measurer: times.
        seconds: of rounds a problem.
        environment: read after each race, for its clocks.
        say: told one line at a time.
        seed: of the order.

    Yields:
        One row of the document per meeting, as each is done.

    Raises:
        KeyboardInterrupt: a race was interrupted.
    """
    wanted = list(dict.fromkeys(one for each in meetings for one in each.ours()))
    results = pipeline.build([render(one) for one in wanted], lambda done, total, message: None)
    built = dict(zip(wanted, results, strict=True))
    order = list(meetings)
    random.Random(seed).shuffle(order)
    for each in order:
        row = _meet(each, peers, pipeline, measurer, built, seconds)
        found = environment().to_json()
        row["clocks"] = {name: found[name] for name in CLOCKS}
        say(describe(row))
        yield row


def _meet(
    rivals: Rivals,
    peers: Mapping[str, Peer],
    pipeline: Pipeline,
    measurer: RacingMeasurer,
    built: Mapping[Candidate, Built | Outcome],
    seconds: float,
) -> dict[str, Any]:
    problem = rivals.problem
    entries: list[Entry] = []
    outcomes: dict[str, Outcome] = {}
    for one in rivals.ours():
        result = built[one]
        if isinstance(result, Outcome):
            outcomes[one.name] = result
            continue
        outcomes[one.name] = pipeline.verify(problem, result)
        if outcomes[one.name].ok:
            entries.append(KernelEntry(name=one.name, path=result.path, problem=problem))
    refused = {name: peer.refusal(problem) for name, peer in peers.items()}
    entries += [
        CallableEntry(name=name, function=peer.make(problem))
        for name, peer in peers.items()
        if not refused[name]
    ]
    timings: dict[str, Timing] = {}
    if entries:
        names = [entry.name for entry in entries]
        raced = measurer.measure(problem, entries, budget_seconds=seconds, keep=names)
        if measurer.interrupted:
            raise KeyboardInterrupt
        timings = {timing.name: timing for timing in raced}
    pick, gain = _confirmed(rivals, timings, measurer.race)
    shown = {PICK: pick.name, **{name: name for name in peers}}
    if rivals.pick != rivals.default:
        # Beside the pick stands what it beat, or what it replaced.
        shown[DEFAULT] = rivals.default.name
    row: dict[str, Any] = {
        "problem": asdict(problem),
        "name": problem.describe(),
        "pick": pick.name,
        "layer": rivals.layer if pick == rivals.pick else "default",
        "default": rivals.default.name,
        "gain_over_default": gain,
        "entries": {},
        "ratios": {},
    }
    for label, name in shown.items():
        row["entries"][label] = _entry(
            problem, timings.get(name), outcomes.get(name), refused.get(name, "")
        )
    ours = timings.get(pick.name)
    for name in peers:
        theirs = timings.get(name)
        if measurer.race is not None and _timed(ours) and _timed(theirs):
            ratio, error = measurer.race.compare(name, pick.name)
            row["ratios"][name] = {"ratio": ratio, "error": error}
    return row


def _confirmed(
    rivals: Rivals, timings: Mapping[str, Timing], race: Race | None
) -> tuple[Candidate, float | None]:
    """The pick, or the default where the pick does not beat it here; and the pick's gain, where it is known."""
    if rivals.pick == rivals.default:
        return rivals.pick, None
    pick, default = timings.get(rivals.pick.name), timings.get(rivals.default.name)
    if race is None or not _timed(pick) or not _timed(default):
        return (rivals.default if _timed(default) else rivals.pick), None
    gain = race.compare(rivals.default.name, rivals.pick.name)[0] - 1.0
    return (rivals.pick if gain >= MIN_GAIN else rivals.default), gain


def _timed(timing: Timing | None) -> bool:
    return timing is not None and timing.outcome.ok and timing.samples > 0


def _entry(
    problem: Problem, timing: Timing | None, outcome: Outcome | None, refusal: str
) -> dict[str, Any]:
    """One implementation's own figures, or why there are none."""
    if refusal:
        return {"outcome": {"kind": "refused", "reason": refusal}}
    if timing is None or not isfinite(timing.median_us):
        failed = outcome if timing is None else timing.outcome
        return {
            "outcome": {"kind": "untimed", "reason": ""} if failed is None else failed.to_json()
        }
    return {
        "outcome": timing.outcome.to_json(),
        "median_us": timing.median_us,
        "spread_us": timing.spread_us,
        "samples": timing.samples,
        "tflops": problem.flops / timing.median_us / 1e6,
    }


def describe(row: Mapping[str, Any]) -> str:
    """One line about a row."""
    ours = row["entries"][PICK]
    if "tflops" not in ours:
        return f"{row['name']}: {ours['outcome']['kind']}: {ours['outcome']['reason']}"
    words = [f"{row['name']}: {ours['tflops']:.0f} TFLOP/s"]
    words += [f"{each['ratio']:.3f}x {peer}" for peer, each in row["ratios"].items()]
    return ", ".join([*words, f"{row['layer']} {row['pick']}"])


def summarise(
    benchmark: str, rows: Sequence[Mapping[str, Any]], peers: Sequence[str]
) -> dict[str, Any]:
    """Per peer: geometric mean and least of our speed over theirs, and the bars that are missed.

    A problem that the peer computed and we did not is a missed bar of its own.
    """
    found = {}
    for peer in peers:
        ratios = {
            row["name"]: row["ratios"][peer]["ratio"] for row in rows if peer in row["ratios"]
        }
        lost = [
            row["name"]
            for row in rows
            if "tflops" in row["entries"].get(peer, {}) and peer not in row["ratios"]
        ]
        if not ratios:
            continue
        least = min(ratios, key=lambda name: ratios[name])
        figures: dict[str, Any] = {
            "problems": len(ratios),
            "geometric_mean": geometric_mean(list(ratios.values())),
            "min": ratios[least],
            "min_at": least,
        }
        bars = BARS.get(benchmark, {}).get(peer, {})
        missed = [name for name, bar in bars.items() if figures[name] < bar]
        found[peer] = {**figures, "bars": bars, "missed": [*missed, *lost]}
    return found


def document(
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    peers: Mapping[str, Peer],
    policy: Policy,
    environment: Environment,
) -> Document:
    """What is written down."""
    return {
        "benchmark": benchmark,
        "schema": SCHEMA,
        "policy": policy.name,
        "spec": policy.spec.name,
        "peers": {name: peer.title for name, peer in peers.items()},
        "environment": environment.to_json(),
        "summary": summarise(benchmark, rows, list(peers)),
        "rows": list(rows),
    }


def settle(
    rows: Sequence[Mapping[str, Any]],
    policy: Policy,
    records: RecordStore,
    environment: Environment,
) -> list[TuningRecord]:
    """Write what the comparison found out about its records: confirmed, or the default after all.

    Returns:
        The records of the rows' problems, as they are now; problems without one are left out.
    """
    settled = []
    for row in rows:
        problem = Problem(**row["problem"])
        query = Query(
            problem=problem,
            arch=policy.name,
            environment=environment,
            kernel_digest=lambda one: kernel_digest(render(one)),
        )
        found = records.find(query)
        if not isinstance(found, Hit) or not found.exact:
            continue
        record = found.record
        if "tflops" in row["entries"][PICK] and record.entry(row["pick"]) is not None:
            record = records.put(replace(record, pick=row["pick"], confirmed=True))
        settled.append(record)
    return settled
