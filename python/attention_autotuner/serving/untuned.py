"""Problems of calls that nobody measured a kernel for: the file that lists them, and a warning of many."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..codegen.files import append_line
from ..core.identity import values_of
from ..core.memo import Bounded
from ..core.problem import Problem
from ..core.problem_fields import problem_of_fields
from ..core.trust import parse_json
from ..errors import ProblemFileError, UnsupportedProblemError, UntunedError
from ..settings import Settings
from .picks import Passed, Pick

_log = logging.getLogger(__name__)

MAX_BUCKETS = 4096
STORM = 32  # kinds of problem without a measured pick after which a warning says so
MANY = (
    "%d kinds of problem have been served by kernels that nobody measured; tune those that matter "
    "(`attention-autotuner tune`, or with UNTUNED_LOG `tune --problems`), or pad sequences to fewer lengths"
)


def take_untuned(problem: Problem, arch: str, settings: Settings) -> None:
    """List a problem that no measured pick serves, and refuse it, where the settings want that.

    Raises:
        UntunedError: they want a measured pick.
    """
    if settings.mode_of(problem.direction) == "off":
        return
    if settings.untuned_log is not None:
        list_untuned(settings.untuned_log, problem)
    refuse_untuned(problem, arch, settings)


def refuse_untuned(problem: Problem, arch: str, settings: Settings) -> None:
    """Refuse a problem that no measured pick serves, where the settings want one.

    Raises:
        UntunedError: they want a measured pick.
    """
    if settings.strict_picks and settings.mode_of(problem.direction) != "off":
        raise UntunedError(
            f"no measured pick for {problem.describe()} on {arch}, and STRICT_PICKS is on: tune it "
            "(`attention-autotuner tune`), or let the default serve"
        )


def list_untuned(path: Path, problem: Problem) -> None:
    """Add a problem to a file, unless one of its bucket is there; a file that cannot be written is warned of.

    Several processes may do so: each line is whole, and at worst one is there twice.
    """
    try:
        known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if problem.bucketed() not in {listed.bucketed() for listed in _of_lines(path, known)}:
            append_line(path, json.dumps(values_of(problem)))
    except (OSError, TypeError, ValueError) as error:
        _log.warning("%s is not listed in %s: %s", problem.describe(), path, error)


class Buckets:
    """The record buckets that no record of the user's serves, and those that no measured pick serves at all.

    Defaults go by lengths inside a bucket, so that many decisions are of one: records are looked for once, and a
    warning of many kinds of problem counts buckets.
    """

    def __init__(self) -> None:
        self.unrecorded: Bounded[Any, Passed] = Bounded(MAX_BUCKETS)
        self._untuned: set[Any] = set()

    def clear(self) -> None:
        """Forget all, as records may have come."""
        self.unrecorded.clear()
        self._untuned.clear()

    def note(self, bucket: Any, pick: Pick) -> None:
        """Take in the pick of a problem in a bucket."""
        for passed in pick.passed:  # nothing where mode is off
            if passed.layer == "record":
                self.unrecorded.remember(bucket, passed)
        if pick.layer != "default" or not pick.passed or bucket in self._untuned:
            return
        self._untuned.add(bucket)
        if len(self._untuned) == STORM:
            _log.warning(MANY, STORM)


def read_problems(path: Path) -> list[Problem]:
    """Problems from a file: a JSON list of objects, or one on each line; one that is there twice is given once.

    Their fields are those of :class:`~..core.problem.Problem`, all optional; those left out are as
    :func:`~..core.problem_fields.problem_of_fields` says.

    Raises:
        ProblemFileError: the file holds something else, or a problem that no kernel here solves.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProblemFileError(f"{path} must hold JSON problems: {error}") from error
    if text.lstrip().startswith("["):
        items = _parsed(path, 1, text)
        problems = [_made(f"{path}: entry {n}", item) for n, item in enumerate(items, start=1)]
    else:
        problems = _of_lines(path, text.splitlines())
    if not problems:
        raise ProblemFileError(f"{path} must hold JSON problems: it is empty")
    return list(dict.fromkeys(problems))


def _of_lines(path: Path, lines: Iterable[str]) -> list[Problem]:
    """The problems of a file that has one on each line.

    Raises:
        ProblemFileError: a line holds something else.
    """
    return [
        _made(f"{path}:{number}", _parsed(path, number, line))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parsed(path: Path, line: int, text: str) -> Any:
    """The value of a JSON text that begins on a line of a file."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{line + error.lineno - 1}"
        raise ProblemFileError(
            f"{place}: it must be JSON, a list of problems or one on each line: {error.msg} at column {error.colno}"
        ) from error
    except ValueError as error:
        raise ProblemFileError(f"{path}:{line}: it must be JSON: {error}") from error


def _made(place: str, item: Any) -> Problem:
    """The problem of one entry of a file."""
    if not isinstance(item, dict):
        raise ProblemFileError(
            f"{place}: a problem must be an object of fields, got {json.dumps(item)}"
        )
    try:
        return problem_of_fields(item)
    except UnsupportedProblemError as error:
        raise ProblemFileError(f"{place}: {error}") from error
