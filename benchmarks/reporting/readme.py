"""The table of the READMEs: a row for each baseline and direction, the baseline that beats us in bold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..baselines.base import MODES
from ..results import ratio_text

BEGIN, END = "<!-- results -->", "<!-- /results -->"
WORDS = json.loads(Path(__file__).with_name("readme.json").read_text(encoding="utf-8"))
SUBJECTS, CAPTIONS = WORDS["subjects"], WORDS["captions"]  # suites in the order of the table
ENGLISH, CHINESE = WORDS["english"], WORDS["chinese"]
# Suites whose baselines stand beside those of the operation's grid.
APART = (
    "head_dims",
    "small_batches",
    "decode",
    "score_modifications",
    "flex_attention",
    "packed_sequences",
    "packed_tokens",
)
OWN = ("plain", "equal_lengths")  # baselines that are this package, too
HEADINGS = ("operation", "direction", "compared with", "shapes", "geometric mean", "least")


def _bold(ratio: float) -> str:
    return f"**{ratio_text(ratio)}**" if ratio < 1.0 else ratio_text(ratio)


def rows_of(documents: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of one GPU's result files: operation, mode, baseline, shapes, and our speed over it.

    A baseline stands once in each direction of an operation: from a grid where it was raced there, else from the
    layers of models, and from these too where one of them is slower. Where both passes were raced, whole steps, which
    are made of them, stand only where one is slower, and by more than the backward pass alone.
    """
    rows: dict[tuple[str, str, str], tuple[str, ...] | None] = {}  # None: left out
    for suite, document in ((suite, documents[suite]) for suite in SUBJECTS if suite in documents):
        operation = suite if suite in APART else SUBJECTS[suite].partition(",")[0]
        for name, figures in document["summary"].items():
            baseline, _, mode = name.partition(" ")
            title = document["baselines"].get(baseline)
            other = (
                title is None
                or baseline in OWN
                or baseline == "eager"  # the formula's other forms are ahead of it everywhere
                or (suite == "models" and baseline in ("fla", "compiled"))
            )
            place, slower = (operation, baseline, mode), figures["min"] < 1.0
            if other or mode == "autograd" or (place in rows and not slower):
                continue
            if rows.get(place) is not None:
                place = (suite, baseline, mode)
            passes = document["summary"].get(f"{baseline} backward") if mode == "step" else None
            worst = passes is None or (slower and figures["min"] < passes["min"])
            ratios = (figures["geometric_mean"], figures["min"])
            row = (SUBJECTS[suite], mode, title, str(figures["problems"]), *map(_bold, ratios))
            rows.pop(place, None)  # one that was left out stands where this suite's do
            rows[place] = row if worst else None
    operations = [operation for operation, _, _ in rows]
    order = sorted(rows, key=lambda place: (operations.index(place[0]), MODES.index(place[2])))
    return [shown for place in order if (shown := rows[place]) is not None]


def cells(row: tuple[str, ...], words: Mapping[str, str]) -> list[str]:
    """A row in one language, its baseline in bold where that beats us."""
    subject, mode, title, *figures = (words.get(cell, cell) for cell in row)
    return [subject, mode, f"**{title}**" if "*" in figures[1] else title, *figures]


def block(gpus: Mapping[str, Mapping[str, Mapping[str, Any]]], language: str) -> str:
    """The text between the markers.

    Args:
        gpus: folder -> suite -> document.
        language: ``en`` or ``zh``.
    """
    words = CHINESE if language == "zh" else ENGLISH
    paragraphs = []
    for documents in gpus.values():
        rows = rows_of(documents)
        if not rows:
            continue
        shown = [documents[suite] for suite in SUBJECTS if suite in documents]
        runs = [run for document in shown for run in document["runs"].values()]
        environment = max((run["environment"] for run in runs), key=lambda e: str(e["time_utc"]))
        gpu = environment["gpu_name"]
        caption = CAPTIONS[language].format(
            gpu=gpu, driver=environment["driver"], torch=environment["torch"]
        )
        table = [[words.get(heading, heading) for heading in HEADINGS], ["---"] * len(HEADINGS)]
        table += [cells(row, words) for row in rows]
        paragraphs += [caption, "\n".join(f"| {' | '.join(line)} |" for line in table)]
    return "\n\n".join(paragraphs)


def replaced(text: str, inner: str) -> str:
    """The text with what stands between its markers replaced.

    Raises:
        ValueError: it does not hold each marker once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must hold {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{inner}\n{END}{rest.split(END)[1]}"
