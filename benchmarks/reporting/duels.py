"""Result files of races, read as one list of duels: ours against one other on one problem in one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from attention_autotuner.core.problem import Problem

from ..cases import column_label, row_label
from ..confidence import Verdict, interval, verdict
from ..retention_tables import shape_label
from ..rivals import AUTOGRAD, DETERMINISTIC, STEP

Document = Mapping[str, Any]
WHOLE = (STEP, AUTOGRAD)  # labels of ours that are forward and backward together
TITLES = {
    "attention_forward": "Attention, forward",
    "attention_backward": "Attention, backward and whole steps",
    "retnet": "Retention with an explicit mask",
    "retention": "Retention with decay",
}


@dataclass(frozen=True, kw_only=True)
class Duel:
    """One problem against one other.

    Attributes:
        case: how the problem is called in its table.
        row, column: its place in a grid of head dims and sequence lengths; both empty for other benchmarks.
        way: forward, backward, or step.
        peer: the other's name in the file.
        called: ours was called as a program calls it, through autograd.
        ours_us, theirs_us: medians, microseconds; None where there is no time.
        rate: what ours reached, in the file's unit; None without a time.
        ratio: our speed over the other's from paired rounds; None without one.
        low, high: its confidence interval.
        reason: why there is no ratio, or empty.
    """

    case: str
    row: str
    column: str
    way: str
    peer: str
    called: bool
    ours_us: float | None
    theirs_us: float | None
    rate: float | None
    ratio: float | None
    low: float
    high: float
    reason: str

    @property
    def verdict(self) -> Verdict | None:
        """Who is faster, where that was measured."""
        return None if self.ratio is None else verdict(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """All duels with one other in one way.

    Attributes:
        peer: the other's title.
        way: forward, backward, or step.
        problems: with a ratio.
        mean: geometric mean of our speed over the other's.
        least: the least of them, and ``least_at`` the case.
        faster, even, slower: how many of each verdict.
    """

    peer: str
    way: str
    problems: int
    mean: float
    least: float
    least_at: str
    faster: int
    even: int
    slower: int


def title_of(document: Document) -> str:
    """What a file is about."""
    return str(document.get("title") or TITLES[document["benchmark"]])


def is_grid(document: Document) -> bool:
    """Whether its problems are head dims by sequence lengths."""
    return str(document["benchmark"]).startswith(("attention_", "suite_paper"))


def duels_of(document: Document) -> list[Duel]:
    """Every duel of a file with another implementation, also those without a ratio, in the file's order."""
    found = []
    for row in document["rows"]:
        contests = row.get("contests") or document["contests"]
        for peer, (mine, theirs) in contests.items():
            if peer == DETERMINISTIC:
                continue
            if mine in row["entries"] and theirs in row["entries"]:
                found.append(_duel(document, row, peer, mine, theirs))
    return found


def _duel(document: Document, row: Mapping[str, Any], peer: str, mine: str, theirs: str) -> Duel:
    problem = Problem(**row["problem"])
    ours, other = row["entries"][mine], row["entries"][theirs]
    way = row.get("way") or ("step" if mine in WHOLE else problem.direction)
    measured = row["ratios"].get(peer)
    low, high = 0.0, 0.0
    if measured is not None:
        low, high = interval(measured["ratio"], measured["error"])
    grid = is_grid(document)
    return Duel(
        case=case_of(document, row),
        row=row_label(problem) if grid else "",
        column=column_label(problem) if grid else "",
        way=way,
        peer=peer,
        called=mine == AUTOGRAD,
        ours_us=ours.get("median_us"),
        theirs_us=other.get("median_us"),
        rate=_rate(problem, ours, document.get("unit", "tflops")),
        ratio=None if measured is None else measured["ratio"],
        low=low,
        high=high,
        reason="" if measured is not None else _reason(ours, other),
    )


def case_of(document: Document, row: Mapping[str, Any]) -> str:
    """How tables call a row's problem."""
    if "case" in row:
        return str(row["title"])
    problem = Problem(**row["problem"])
    if is_grid(document):
        return f"{row_label(problem)} {column_label(problem)}"
    return shape_label(problem)


def _rate(problem: Problem, entry: Mapping[str, Any], unit: str) -> float | None:
    if "median_us" not in entry:
        return None
    if unit == "gb_per_s":
        return float(problem.bytes_moved / entry["median_us"] / 1e3)
    return float(entry["tflops"])


def _reason(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for whose, entry in (("ours", ours), ("theirs", other)):
        if "median_us" not in entry:
            outcome = entry["outcome"]
            return f"{whose}: {outcome['kind'].replace('_', ' ')}: {outcome['reason']}".rstrip(": ")
    return "not timed in the same rounds"


def standings(document: Document) -> list[Standing]:
    """Each other's duels summed up."""
    groups: dict[tuple[str, str], list[Duel]] = {}
    for duel in duels_of(document):
        if duel.ratio is not None:
            groups.setdefault((duel.peer, duel.way), []).append(duel)
    return [
        _standing(document["peers"][peer], way, [(d, d.ratio) for d in each if d.ratio is not None])
        for (peer, way), each in groups.items()
    ]


def _standing(peer: str, way: str, each: Sequence[tuple[Duel, float]]) -> Standing:
    least, ratio = min(each, key=lambda pair: pair[1])
    verdicts = [duel.verdict for duel, _ in each]
    return Standing(
        peer=peer,
        way=way,
        problems=len(each),
        mean=geometric_mean([one for _, one in each]),
        least=ratio,
        least_at=least.case,
        faster=verdicts.count("faster"),
        even=verdicts.count("even"),
        slower=verdicts.count("slower"),
    )


def losses(document: Document) -> list[Duel]:
    """The duels that we lose, the worst first."""
    found = [d for d in duels_of(document) if d.verdict == "slower"]
    return sorted(found, key=lambda duel: duel.ratio or 0.0)


def place_of(document: Document) -> str:
    """Where and when a file's figures were taken, in one line; what was not recorded is left out."""
    found = document["environment"]
    parts = [str(found["gpu_name"])]
    names = {"driver": "driver", "nvcc": "CUDA", "cuda_runtime": "CUDA", "torch": "torch"}
    told: dict[str, str] = {}
    for field, name in names.items():
        if found.get(field):
            told.setdefault(name, f"{name} {found[field]}")
    parts += told.values()
    for field, unit in (("sm_clock_mhz", "MHz"), ("power_draw_w", "W")):
        known = [row["clocks"][field] for row in document.get("rows", []) if row.get("clocks")]
        values = [value for value in known if value is not None]
        if values:
            what = "SM clock" if unit == "MHz" else "power"
            parts.append(f"{what} after each race {min(values):.0f} to {max(values):.0f} {unit}")
    if found.get("time_utc"):
        parts.append(str(found["time_utc"]))
    earlier = earlier_rows(document)
    if earlier:
        parts.append(earlier)
    return ", ".join(parts)


def earlier_rows(document: Document) -> str | None:
    """Since when rows were taken that are older than the run that a file names; None where none is."""
    started = document["environment"].get("time_utc")
    times = [row["clocks"].get("time_utc") for row in document.get("rows", []) if row.get("clocks")]
    older = [time for time in times if time and started and time < started]
    return f"rows of an earlier run since {min(older)}" if older else None
