"""The problems that are measured: grids of published comparisons and layers of models, each with its source.

A *case* is a forward shape; it is measured in one or more races, each in one or more modes. A suite is what is reported
together. ``suites.json`` holds the suites and spells the sources out, ``cases.csv`` holds the cases: a plus joins the
modes of one race, a space separates races. To add a case, add a row there: nothing else names it.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attention_autotuner.core.problem import DType, Problem, of_shape
from attention_autotuner.operations.registry import OPERATIONS

from .baselines.base import DIRECTION_OF, MODES, Mode

Races = tuple[tuple[Mode, ...], ...]
INFERENCE: Races = (("forward",),)
HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of one model or grid.

    Attributes:
        name: unique in its suite; on the command line and in results.
        title: in tables.
        source: where its numbers come from.
        shape: the forward problem.
        races: the modes of each race in which it is measured when no mode is asked for; with more than the forward
            pass it is trained, and may be measured in every mode.
    """

    name: str
    title: str
    source: str
    shape: Problem
    races: Races = INFERENCE

    def measured(self, modes: Sequence[Mode]) -> Races:
        """The races that are meant when some modes, or none, are asked for."""
        if not modes:
            return self.races
        possible = MODES if self.races != INFERENCE else ("forward",)
        return tuple((mode,) for mode in possible if mode in modes)

    def problem(self, mode: Mode, dtype: DType) -> Problem:
        """The problem that is measured in one mode."""
        return replace(self.shape, direction=DIRECTION_OF[mode], dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings of a search.

    Attributes:
        top_k: candidates that a problem adds to its class.
        class_limit: candidates of a class beside the defaults, for each mode; None is no limit.
        seconds: of timing rounds a problem.
    """

    top_k: int = 10
    class_limit: int | None = None
    seconds: float = 3.0


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cases that are reported together.

    Attributes:
        name: on the command line and of the result file.
        title: in tables.
        cases: in the order of the table.
        unit: what a table shows beside the time: ``tflops``, or ``gb_per_s`` where memory is the limit.
        baselines: what it is compared with when no others are asked for; empty for all of its operations.
        inspects: memory and differences of calls are taken beside their times.
        grid: cases are head dims by sequence lengths.
        dtype: of every tensor where no other is asked for.
        tuning: of a suite that is tuned: the defaults race, too, and records are confirmed or taken back.
        seconds: of timing rounds a race.
        bars: comparison -> what our speed must reach: a figure of the summary -> its bar.
        row_bars: the same for a case, by its name, or for every problem of some head dims, e.g. ``256/512``.
        tile_bars: comparison with ours on all tiles -> ``(factor, us)``: the most time of a case with documents is the
            factor times its share of tiles times the time on all tiles, and some us.
        lengths: of the sequences of its packed problems, which are not the typical ones of a problem.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    unit: str = "tflops"
    baselines: Sequence[str] = ()
    inspects: bool = False
    grid: bool = False
    dtype: DType = "fp16"
    tuning: Tuning | None = None
    seconds: float = 0.5
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    row_bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tile_bars: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    lengths: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A case in one race and dtype.

    Attributes:
        suite: the suite.
        case: the case.
        modes: how it is measured, all in one race; of one direction.
        problem: what is measured.
    """

    suite: Suite
    case: Case
    modes: tuple[Mode, ...]
    problem: Problem

    @property
    def key(self) -> str:
        """Its name in a result file."""
        return self.key_from(self.modes[0])

    def key_from(self, mode: Mode) -> str:
        """The name of a row of the same case whose modes begin with that one."""
        return f"{self.case.name} {mode} {self.problem.dtype}"


def row_label(problem: Problem) -> str:
    """The table row of a grid that a problem belongs to, e.g. ``d64 causal``."""
    dims = f"d{problem.dim_qk}" + (f"/{problem.dim_v}" if problem.dim_v != problem.dim_qk else "")
    return f"{dims} causal" if problem.causal else dims


def column_label(problem: Problem) -> str:
    """The table column of a grid, e.g. ``512`` or ``4k``."""
    seqlen = problem.seqlen_k
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


_SHAPE = re.compile(
    r"b(\d+) h(\d+)(?:/(\d+))? s(\d+)(?:x(\d+))? d(\d+)(?:/(\d+))?( causal)?"
    r"(?: window (-?\d+):(-?\d+))?((?: [a-z-]+)*)(?: packed (\d+)x(\d+))?"
)


def shape(text: str, **fields: Any) -> Problem:
    """A forward problem whose shape is written as :meth:`Problem.describe` writes it.

    Raises:
        ValueError: it is not written so.
    """
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no shape, e.g. 'b1 h32/8 s8192 d128 causal'")
    batch, heads, kv, seqlen, keys, dim, dim_v = (int(size or 0) for size in match.groups()[:7])
    problem = of_shape(
        (batch, heads, seqlen, dim, dim_v or dim),
        causal=bool(match[8]),
        window_size=(int(match[9] or -1), int(match[10] or -1)),
        modifications=tuple(match[11].replace("-", "_").split()),
        packed_rows=(int(match[12] or 0), int(match[13] or 0)),
        **fields,
    )
    return replace(problem, heads_kv=kv or heads, seqlen_k=keys or seqlen)


def _read_suites() -> Iterator[Suite]:
    """The suites in the order of their file, each with its rows of the table of cases."""
    settings = json.loads(HERE.joinpath("suites.json").read_text(encoding="utf-8"))
    with HERE.joinpath("cases.csv").open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for suite in settings["suites"]:
        named = suite.pop("cases_of", suite["name"])
        cases = tuple(
            Case(
                name=row["name"],
                title=row["title"],
                source=settings["sources"][row["source"]],
                shape=shape(
                    row["shape"], op=row["op"], mask=OPERATIONS[row["op"]].semantics.default_mask
                ),
                races=tuple(tuple(race.split("+")) for race in row["races"].split()),
            )
            for row in rows
            if row["suite"] == named
        )
        tuning = Tuning(**suite["tuning"]) if "tuning" in suite else None
        yield Suite(**{**suite, "cases": cases, "tuning": tuning})


SUITES = {suite.name: suite for suite in _read_suites()}
"""Name -> suite."""


def trials(
    suites: Sequence[str],
    *,
    modes: Sequence[Mode] = (),
    words: Sequence[str] = (),
    dims: Sequence[int] = (),
    dtype: DType | None = None,
) -> list[Trial]:
    """The trials of some suites, suite by suite.

    Args:
        suites: names.
        modes: only these, where a case can be measured so; without any, each case is measured as it usually is.
        words: each must be in the case's name or be a word of the problem's description.
        dims: ``dim_qk`` must be one of these; without any, all are taken.
        dtype: of every tensor; None is each suite's.

    Raises:
        ValueError: a suite is unknown, or nothing is left.
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise ValueError(f"no suite is named {unknown[0]!r}; there are {', '.join(SUITES)}")
    wanted = [
        Trial(suite=SUITES[name], case=case, modes=race, problem=problem)
        for name in suites
        for case in SUITES[name].cases
        for race in case.measured(modes)
        for problem in (case.problem(race[0], dtype or SUITES[name].dtype),)
        if all(word in case.name or word in problem.describe().split() for word in words)
        and (not dims or problem.dim_qk in dims)
    ]
    if not wanted:
        described = " ".join([*words, *(f"dim {dim}" for dim in dims)])
        raise ValueError(
            f"no case of {', '.join(suites)} is described by {described!r}"
            + (f" and is measured {' or '.join(modes)}" if modes else "")
        )
    return wanted
