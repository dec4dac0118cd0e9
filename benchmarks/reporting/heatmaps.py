"""Our speed over each other's, as coloured tables: gains and losses in opposite colours, losses marked as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING

from ..confidence import ratio_text
from ..retention_tables import SHAPE
from .drawing import INK, SMALL, canvas, readable_on, svg_of
from .duels import Document, Duel, duels_of, is_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

COLOURS = "PuOr"  # orange to purple through white: a diverging map for every colour vision
STEPS = 41  # of the bar
LIMIT = 2.0  # ratios beyond this, or below its inverse, have the last colour
CELL_WIDTH, WIDE_CELL_WIDTH, CELL_HEIGHT = 0.62, 1.3, 0.33  # inches
LETTER = 0.082  # inches of one letter of a label
LOSS = "▼"
WAYS = {"forward": "forward", "backward": "backward", "step": "forward + backward"}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One coloured table.

    Attributes:
        title: above it, in two lines.
        rows, columns: labels.
        across: what the columns are, or empty.
        cells: (row, column) -> the duel there.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    across: str
    cells: Mapping[tuple[str, str], Duel]


def panels_of(document: Document) -> list[Panel]:
    """A file's duels as tables: head dims by lengths for each other, or cases by others."""
    duels = [duel for duel in duels_of(document) if duel.ratio is not None or duel.reason]
    titles = document["peers"]
    if is_grid(document):
        columns = tuple(dict.fromkeys(duel.column for duel in duels))
        groups: dict[tuple[str, str], list[Duel]] = {}
        for duel in duels:
            groups.setdefault((duel.peer, duel.way), []).append(duel)
        found = [
            _panel(
                f"{WAYS[way]}, our speed over\n{short(titles[peer])}",
                {(duel.row, duel.column): duel for duel in each},
                columns,
                "sequence length",
            )
            for (peer, way), each in groups.items()
        ]
    else:
        rows = "" if "suite" in document else f"\nrows: {SHAPE}"
        found = [
            _panel(
                f"{_told(ways)}our speed over each{rows}",
                {(_row(d, ways), wrapped(short(titles[d.peer]))): d for d in each if d.peer in met},
                tuple(wrapped(short(titles[peer])) for peer in met),
                "",
            )
            for ways, met, each in _alike(duels)
        ]
    return [panel for panel in found if any(d.ratio is not None for d in panel.cells.values())]


def _alike(
    duels: Sequence[Duel],
) -> list[tuple[tuple[str, ...], tuple[str, ...], list[Duel]]]:
    """Duels of cases that meet the same others: their ways, the others that have a ratio somewhere, and all of them."""
    cases: dict[tuple[str, str], list[Duel]] = {}
    for duel in duels:
        cases.setdefault((duel.case, duel.way), []).append(duel)
    groups: dict[tuple[str, ...], list[Duel]] = {}
    for each in cases.values():
        groups.setdefault(tuple(duel.peer for duel in each), []).extend(each)
    found = []
    for peers, each in groups.items():
        timed = {duel.peer for duel in each if duel.ratio is not None}
        ways = tuple(dict.fromkeys(duel.way for duel in each))
        found.append((ways, tuple(peer for peer in peers if peer in timed), each))
    return found


def _told(ways: Sequence[str]) -> str:
    """The way of a panel that has only one."""
    return f"{WAYS[ways[0]]}, " if len(ways) == 1 else ""


def _row(duel: Duel, ways: Sequence[str]) -> str:
    """A case, and how it was measured where its panel holds more ways than one."""
    return duel.case if len(ways) == 1 else f"{duel.case}, {WAYS[duel.way]}"


def _panel(
    title: str, cells: Mapping[tuple[str, str], Duel], columns: tuple[str, ...], across: str
) -> Panel:
    rows = tuple(dict.fromkeys(row for row, _ in cells))
    return Panel(title=title, rows=rows, columns=columns, across=across, cells=cells)


def short(title: str) -> str:
    """A title without the way, which stands beside it already."""
    for tail in (
        ", forward + backward through autograd",
        ", forward + backward",
        ", forward",
        ", backward",
    ):
        if title.endswith(tail):
            through = " through autograd" if "autograd" in tail else ""
            return title.removesuffix(tail) + through
    return title


def wrapped(title: str, width: int = 15) -> str:
    """A title in lines that a column has room for."""
    lines: list[str] = [""]
    for word in title.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def heatmap(document: Document, name: str, title: str) -> str | None:
    """A file's coloured tables as one figure; None where it holds no ratio.

    Args:
        document: a result file.
        name: of the figure.
        title: for a reader who does not see it.
    """
    panels = panels_of(document)
    if not panels:
        return None
    wide = is_grid(document)
    cell = CELL_WIDTH if wide else WIDE_CELL_WIDTH
    margins = [LETTER * max(map(len, panel.rows)) + 0.35 for panel in panels]
    most = max(len(panel.columns) for panel in panels)
    widths = [
        margin + max(cell * most, LETTER * max(map(len, panel.title.split("\n"))))
        for margin, panel in zip(margins, panels, strict=True)
    ]
    across = 2 if len(panels) > 1 and max(widths) < 5.6 else 1
    down = ceil(len(panels) / across)
    heads = 1.1 + 0.16 * max(c.count("\n") for p in panels for c in p.columns)
    heights = [CELL_HEIGHT * len(panel.rows) + heads for panel in panels]
    parts = [slice(i * across, (i + 1) * across) for i in range(down)]
    tall = [max(heights[part]) for part in parts]
    rows = [max(len(panel.rows) for panel in panels[part]) for part in parts]
    width = max(max(widths) * across, 6.4)
    with canvas(width, sum(tall) + 0.8) as figure:
        axes = figure.subplots(down, across, squeeze=False, height_ratios=rows).flatten()
        for axis, panel in zip(axes, panels, strict=False):
            _draw(axis, panel, most)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        bar = figure.colorbar(
            _scale(),
            ax=list(axes),
            location="bottom",
            shrink=0.6,
            aspect=40,
            pad=0.02,
            extend="both",
        )
        if bar.solids is not None:  # or the paper shows between the steps
            bar.solids.set_edgecolor("face")
        ticks = (0.5, 0.7, 1.0, 1.4, 2.0)
        bar.set_ticks([log2(t) for t in ticks], labels=[f"{t:g}" for t in ticks])
        bar.set_label(_legend(width - max(margins)))
        return svg_of(figure, name, title)


def _legend(room: float) -> str:
    """What colours and marks say, in lines that fit into so many inches."""
    words = ("our speed over the other's", f"({LOSS}, bold and framed: we are slower)")
    line = " ".join(words)
    return line if LETTER * len(line) <= room else "\n".join(words)


def _scale() -> ScalarMappable:
    """Colours of logarithms of ratios, to base 2."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    # With more steps than this, matplotlib would draw the bar as an image of pixels.
    colours = colormaps[COLOURS].resampled(STEPS)
    return ScalarMappable(Normalize(-log2(LIMIT), log2(LIMIT)), colours)


def _colour(ratio: float) -> tuple[float, float, float, float]:
    """Of one ratio."""
    from matplotlib import colormaps

    return colormaps[COLOURS](0.5 + log2(ratio) / log2(LIMIT) / 2.0)


def _draw(axis: Axes, panel: Panel, columns: int) -> None:
    from matplotlib.patches import Rectangle

    for down, row in enumerate(panel.rows):
        for across, column in enumerate(panel.columns):
            duel = panel.cells.get((row, column))
            ratio = None if duel is None else duel.ratio
            if ratio is None:
                text = "" if duel is None else "no time"
                axis.text(across, down, text, ha="center", va="center", fontsize=SMALL)
                continue
            colour = _colour(ratio)
            lost = duel is not None and duel.verdict == "slower"
            axis.add_patch(
                Rectangle((across - 0.48, down - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0)
            )
            if lost:
                axis.add_patch(
                    Rectangle(
                        (across - 0.46, down - 0.42),
                        0.92,
                        0.84,
                        fill=False,
                        edgecolor=readable_on(colour),
                    )
                )
            axis.text(
                across,
                down,
                f"{LOSS} {ratio_text(ratio)}" if lost else ratio_text(ratio),
                ha="center",
                va="center",
                fontsize=SMALL,
                fontweight="bold" if lost else "normal",
                color=readable_on(colour),
            )
    _label(axis, panel, columns)


def _label(axis: Axes, panel: Panel, columns: int) -> None:
    """Titles and labels; as wide as the panel with the most columns, so that all cells are as wide."""
    axis.set_title(panel.title, loc="left", color=INK)
    axis.set_xlabel(panel.across)
    axis.set_xticks(range(len(panel.columns)), labels=list(panel.columns))
    axis.set_yticks(range(len(panel.rows)), labels=list(panel.rows))
    axis.set_xlim(-0.5, columns - 0.5)
    axis.set_ylim(len(panel.rows) - 0.5, -0.5)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
