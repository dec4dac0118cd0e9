"""The course of a search by its journal: when each candidate was built, verified, raced and dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.candidate import Candidate
from .journal import lines_of


@dataclass
class Course:
    """The course of one candidate; times are seconds since the search began.

    Attributes:
        built: the start and the end of its compilation; None where it was built before.
        verified: when its verification ended.
        raced: its first and last round; None where it was not timed.
        rounds: how many.
        failed: when it failed in the race.
    """

    built: tuple[float, float] | None = None
    verified: float | None = None
    raced: tuple[float, float] | None = None
    rounds: int = 0
    failed: float | None = None


@dataclass
class Timeline:
    """The course of a search.

    Attributes:
        courses: by candidate name.
        seconds: of the whole search.
    """

    courses: dict[str, Course] = field(default_factory=dict)
    seconds: float = 0.0


def timeline_of(path: Path, key: str, candidates: Iterable[Candidate]) -> Timeline:
    """The timeline of the last search that a journal has.

    Args:
        path: of the journal, which need not exist; lines of versions that wrote no times are passed over.
        key: of the problem and the environment, see :func:`~.journal.key_of`.
        candidates: whose courses are wanted; several may have a compiled kernel in common.

    Raises:
        StoreError: the journal cannot be read.
    """
    lines = _last_search(path, key)
    names: dict[str, list[str]] = {}
    for candidate in candidates:
        names.setdefault(candidate.compiled.name, []).append(candidate.name)
    if not lines:
        return Timeline()
    start = min(line["at"] - line.get("seconds", 0.0) for line in lines)
    timeline = Timeline(seconds=max(line["at"] for line in lines) - start)
    courses = {name: Course() for of_kernel in names.values() for name in of_kernel}
    for line in lines:
        at = line["at"] - start
        for name in names.get(line.get("built", ""), ()):
            courses[name].built = (at - line["seconds"], at)
        course = courses.get(_name(line.get("kernel", "")))
        if course is not None and "outcome" in line:
            course.verified = at
        elif course is not None and "raced" in line:
            course.failed = at
        for kernel in line.get("round", ()):
            raced = courses.get(_name(kernel))
            if raced is not None:
                raced.raced = (raced.raced[0] if raced.raced else at, at)
                raced.rounds += 1
    timeline.courses = {name: course for name, course in courses.items() if course != Course()}
    return timeline


def _name(kernel: str) -> str:
    """The candidate's name in a :func:`~.journal.kernel_id`."""
    return kernel.partition("@")[0]


def _last_search(path: Path, key: str) -> list[Mapping[str, Any]]:
    """The lines of the last search with times, up to its end."""
    searches: list[list[Mapping[str, Any]]] = [[]]
    for line in lines_of(path, key):
        if isinstance(line.get("at"), (int, float)):
            searches[-1].append(line)
            if line.get("end"):
                searches.append([])
    return next((lines for lines in reversed(searches) if len(lines) > 1), [])
