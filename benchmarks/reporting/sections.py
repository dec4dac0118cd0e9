"""The parts of the page: one for each kind of result file, made only where the file is there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..confidence import half_width, ratio_text
from . import html
from .curves import curves, passes_of
from .duels import (
    Document,
    Duel,
    duels_of,
    losses,
    place_of,
    standings,
    title_of,
)
from .heatmaps import WAYS, heatmap, short
from .html import Cell, number, words
from .limits import limits_of

RACES = ("attention_forward", "attention_backward", "retnet", "retention")
UNITS = {"tflops": "TFLOP/s", "gb_per_s": "GB/s"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        anchor: its own on the page.
        title: its heading.
        inner: HTML.
        figures: name -> SVG, of those that are files as well.
    """

    anchor: str
    title: str
    inner: str
    figures: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All committed files of one GPU.

    Attributes:
        gpu: the folder's name.
        files: name without ending -> content.
    """

    gpu: str
    files: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The GPU's name as its driver tells it."""
        for content in self.files.values():
            found = (content.get("environment") or {}).get("gpu_name")
            if found:
                return str(found)
        return self.gpu

    def races(self) -> list[tuple[str, Document]]:
        """Files of races, in the order of the page."""
        names = [name for name in RACES if name in self.files]
        names += sorted(name for name in self.files if name.startswith("suite_"))
        return [(name, self.files[name]) for name in names]


def load(folder: Path) -> Results:
    """Read one GPU's folder of results.

    Args:
        folder: ``results/<gpu>``.
    """
    files = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }
    return Results(gpu=folder.name, files=files)


def race_section(results: Results, name: str, document: Document) -> Section:
    """A race: figures, standings, every row, and where it was taken."""
    title = title_of(document)
    place = place_of(document)
    figures: dict[str, str] = {}
    parts = []
    limits = limits_of(
        document["spec"], results.files.get("bring_up"), results.files.get("kernel_log")
    )
    for way in passes_of(document):
        kind = f"{name}_{way}_curves" if "suite" in document else f"{name}_curves"
        lines = curves(document, way, limits, kind, f"{title}, {way}: TFLOP/s by sequence length")
        if lines is not None:
            figures[kind] = lines
            parts.append(html.picture(lines, f"Medians of the {way} pass. {place}."))
    heat = heatmap(document, f"{name}_speedup", f"{title}: our speed over each other's")
    if heat is not None:
        figures[f"{name}_speedup"] = heat
        parts.append(html.picture(heat, f"Medians of paired rounds. {place}."))
    parts.append(_standings(document))
    parts.append(html.details(f"Every row ({len(document['rows'])})", _rows(document)))
    parts.append(_reasons(document))
    parts.append(_environment(document))
    return Section(
        anchor=f"{results.gpu}-{name}".replace("_", "-"),
        title=title,
        inner="\n".join(part for part in parts if part),
        figures=figures,
    )


def _standings(document: Document) -> str:
    heads = [
        "against",
        "pass",
        "problems",
        "geometric mean",
        "least",
        "at",
        "faster",
        "even",
        "slower",
    ]
    rows = [
        [
            words(short(each.peer)),
            words(WAYS[each.way]),
            number(each.problems),
            _speed(each.mean, lost=each.mean < 1.0),
            _speed(each.least, lost=each.least < 1.0),
            words(each.least_at),
            number(each.faster),
            number(each.even),
            Cell(text=str(each.slower), key=each.slower, kind="loss" if each.slower else ""),
        ]
        for each in standings(document)
    ]
    return html.table(heads, rows) if rows else ""


def _speed(ratio: float, *, lost: bool, width: str = "") -> Cell:
    text = f"{ratio_text(ratio)} {width}".rstrip()
    text = f"{html.LOSS} {text}" if lost else text
    return Cell(text=text, key=ratio, kind="loss" if lost else "")


def _rows(document: Document) -> str:
    unit = document.get("unit", "tflops")
    duels = duels_of(document)
    titles = {duel.peer: short(document["peers"][duel.peer]) for duel in duels}
    heads = ["case", "pass", "ours, µs", UNITS[unit]]
    others = list(dict.fromkeys(titles.values()))
    for other in others:
        heads += [f"{other}, µs", "our speed over it"]
    groups: dict[tuple[str, str], dict[str, Duel]] = {}
    for duel in duels:
        groups.setdefault((duel.case, pass_of(duel)), {})[titles[duel.peer]] = duel
    rows = []
    for (case, words_of_pass), met in groups.items():
        first = next((duel for duel in met.values() if duel.ours_us), next(iter(met.values())))
        cells = [words(case), words(words_of_pass), number(first.ours_us, 1), number(first.rate)]
        for other in others:
            cells += _against(met.get(other))
        rows.append(cells)
    return html.table(heads, rows) if rows else ""


def pass_of(duel: Duel) -> str:
    """What was timed of ours, in words."""
    return f"{WAYS[duel.way]}, called" if duel.called else WAYS[duel.way]


def _against(duel: Duel | None) -> list[Cell]:
    if duel is None:
        return [Cell(text=""), Cell(text="")]
    ratio = Cell(text="")
    if duel.ratio is not None:
        width = half_width(duel.ratio, duel.low, duel.high)
        ratio = _speed(duel.ratio, lost=duel.verdict == "slower", width=width)
    return [number(duel.theirs_us, 1), ratio]


def _reasons(document: Document) -> str:
    """Why cells are empty, each reason once with how often."""
    found: dict[str, list[str]] = {}
    for duel in duels_of(document):
        if duel.reason:
            peer = short(document["peers"][duel.peer])
            found.setdefault(f"{peer}, {WAYS[duel.way]}: {duel.reason}", []).append(duel.case)
    lines = [f"{reason} ({'; '.join(cases)})" for reason, cases in found.items()]
    lines += [f"{key}: {reason}" for key, reason in document.get("unmeasured", {}).items()]
    if not lines:
        return ""
    return html.details(f"What has no time, and why ({len(lines)})", html.bullets(lines))


def _environment(document: Document) -> str:
    """All that was recorded about where figures were taken."""
    runs = document.get("runs") or {"": document}
    parts = []
    for run in runs.values():
        found = {**(run.get("environment") or {}), **(run.get("libraries") or {})}
        rows = [[words(name), words(str(value))] for name, value in found.items() if value]
        parts.append(html.table(["environment", "value"], rows))
    return html.details("Environment", "\n".join(parts))


def losses_section(gpu: str, races: Sequence[tuple[str, Document]]) -> Section | None:
    """Every duel that we lose, of all files."""
    rows = []
    for _, document in races:
        for duel in losses(document):
            ratio = duel.ratio or 1.0
            width = half_width(ratio, duel.low, duel.high)
            cells = [_speed(ratio, lost=True, width=width), words(title_of(document))]
            cells += [words(duel.case), words(pass_of(duel))]
            cells += [words(short(document["peers"][duel.peer])), number(duel.ours_us, 1)]
            rows.append([*cells, number(duel.theirs_us, 1)])
    if not rows:
        return None
    heads = ["our speed", "benchmark", "case", "pass", "over", "ours, µs", "theirs, µs"]
    rows.sort(key=lambda row: row[0].key or 0.0)
    against = Counter(f"{row[4].text}, {row[3].text} ({row[1].text})" for row in rows)
    inner = html.bullets([f"{whom}: {count}" for whom, count in against.items()])
    inner += html.details(f"All {len(rows)}, the furthest behind first", html.table(heads, rows))
    return Section(anchor=f"{gpu}-losses", title="Where we are slower", inner=inner, figures={})
