"""Everything that is made of committed results beside the README: figures as files, and one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import html
from .drawing import standalone
from .sections import Results, Section, load, losses_section, race_section
from .small_sections import SMALL

TITLE = "attention-autotuner: results"
PAGE = "report.html"
FIGURES = "figures"
LEAD = (
    "Kernels are verified first, then ours and the others are timed in one process, interleaved in random order, round "
    "after round, with a cold L2. Speeds are medians of paired ratios with 95 % intervals: 2.00 means that we take "
    "half the time, and ▼ marks where we are slower by more than the interval. Click a column's head to sort by it."
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the command writes.

    Attributes:
        page: the HTML.
        figures: path under the figures' folder -> SVG.
    """

    page: str
    figures: Mapping[str, str]


def gpus(root: Path) -> list[Results]:
    """Every GPU's results.

    Args:
        root: folder of ``<gpu>/<benchmark>.json``.
    """
    folders = [folder for folder in sorted(root.glob("*")) if next(folder.glob("*.json"), None)]
    return [load(folder) for folder in folders]


def sections(results: Results) -> Iterator[Section]:
    """The parts of one GPU, in the order of the page."""
    races = results.races()
    made = [race_section(results, name, document) for name, document in races]
    lost = losses_section(results.gpu, races)
    yield from ([] if lost is None else [lost])
    yield from made
    for make in SMALL:
        found = make(results)
        if found is not None:
            yield found


def build(root: Path) -> Site:
    """Draw and write everything, as text.

    Args:
        root: folder of ``<gpu>/<benchmark>.json``.
    """
    contents, body, figures = [], [], {}
    for results in gpus(root):
        anchor = f"gpu-{results.gpu}"
        contents.append((anchor, results.name))
        body.append(f'<section id="{anchor}"><h2>{results.name}</h2></section>')
        for section in sections(results):
            contents.append((section.anchor, section.title))
            head = f"<h3>{section.title}</h3>"
            body.append(f'<section id="{section.anchor}">{head}\n{section.inner}\n</section>')
            for name, svg in section.figures.items():
                figures[f"{results.gpu}/{name}.svg"] = standalone(svg)
    if not body:
        body.append(html.paragraph("No results are committed yet."))
    return Site(page=html.page(TITLE, html.paragraph(LEAD), contents, body), figures=figures)
