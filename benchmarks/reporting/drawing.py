"""Figures that are the same bytes wherever they are drawn, and readable on white and on black.

Colours of text and lines are stand-ins while matplotlib draws; :func:`svg_of` replaces them by variables, which a file
by itself sets for light and dark readers and a page sets once for all.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, PAPER = "#0b0b01", "#0b0b02", "#0b0b03"
VARIABLES = {INK: "--ink", FAINT: "--faint", PAPER: "--paper"}
LIGHT = {"--ink": "#1b1f24", "--faint": "#9aa4af", "--paper": "#ffffff"}
DARK = {"--ink": "#e6edf3", "--faint": "#6e7781", "--paper": "#0d1117"}
# Told apart by readers of every colour vision: Okabe and Ito, "Color Universal Design", 2008, without black and yellow.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
FONTS = "'DejaVu Sans', Verdana, sans-serif"
SMALL, NORMAL = 9.0, 10.0  # points
_RC = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": NORMAL,
    "axes.titlesize": NORMAL,
    "axes.labelsize": NORMAL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "path.simplify": False,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
}


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """A figure of some inches, under the settings that every figure has; draw inside the block."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_RC):
        yield Figure(figsize=(width, height), layout="constrained")


def svg_of(figure: Figure, name: str, title: str) -> str:
    """A figure as text, to be called inside its :func:`canvas` block.

    Args:
        figure: drawn.
        name: its own among figures of one page: what its parts are called begins with it.
        title: what a reader who does not see it is told.
    """
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": name}), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
        text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font-family: [^;\"]*", f"font-family: {FONTS}", text)
    text = re.sub(r" transform=\"rotate\(-?0 [^)]*\)\"", "", text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"<[^>]*>", _rounded, text)
    return re.sub(
        r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>",
        lambda found: (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'{found[1]} role="img">\n <title>{escape(title)}</title>'
        ),
        text,
        count=1,
        flags=re.DOTALL,
    )


def _rounded(tag: re.Match[str]) -> str:
    """An element's coordinates to a hundredth of a point: the last digits are those of a solver's version."""
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", tag[0])


def standalone(svg: str) -> str:
    """A figure for a file of its own: with its size, and with colours for light and dark readers."""
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
    style = f"<style>svg{{{rules(LIGHT)}}}@media (prefers-color-scheme: dark){{svg{{{rules(DARK)}}}}}</style>"
    svg = svg.replace(' role="img">', f' width="{width}pt" height="{height}pt" role="img">', 1)
    return svg.replace("</title>", f"</title>\n {style}", 1)


def rules(colours: dict[str, str]) -> str:
    """Variables as CSS."""
    return ";".join(f"{name}:{value}" for name, value in colours.items())


def readable_on(rgb: Sequence[float]) -> str:
    """Black or white, whichever has the greater contrast on a colour (by the relative luminance of WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def legend_below(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int
) -> None:
    """One legend for all panels, under them."""
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
