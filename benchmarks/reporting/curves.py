"""TFLOP/s over sequence length, ours and the others', under the lines of what the GPU could do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from attention_autotuner.core.problem import Direction, Problem

from ..cases import column_label
from .drawing import FAINT, INK, MARKERS, SERIES, SMALL, canvas, legend_below, svg_of
from .duels import Document, is_grid
from .limits import Limit

PANEL = (3.1, 2.3)  # inches
Points = dict[int, float]  # sequence length -> TFLOP/s


def passes_of(document: Document) -> list[Direction]:
    """The passes that a grid has curves of; none for what is no grid."""
    if not is_grid(document):
        return []
    return list(dict.fromkeys(Problem(**row["problem"]).direction for row in document["rows"]))


def series_of(document: Document, way: Direction) -> dict[tuple[int, bool], dict[str, Points]]:
    """(head dim, causal) -> title -> points, of one pass of one grid: ours first, then the others.

    Others that were timed on fewer than two lengths have no curve.
    """
    found: dict[tuple[int, bool], dict[str, Points]] = {}
    for row in document["rows"]:
        contests: Mapping[str, Sequence[str]] = row.get("contests") or document["contests"]
        problem = Problem(**row["problem"])
        if row.get("way", problem.direction) != way:
            continue
        curves = found.setdefault((problem.dim_qk, problem.causal), {})
        _add(curves, "ours", problem, row["entries"].get("pick"))
        for peer, title in document["peers"].items():
            if peer in contests and contests[peer][0] == "pick":
                _add(curves, title, problem, row["entries"].get(peer))
    return {
        place: {title: points for title, points in curves.items() if len(points) > 1}
        for place, curves in found.items()
    }


def _add(
    curves: dict[str, Points], title: str, problem: Problem, entry: Mapping[str, Any] | None
) -> None:
    if entry is not None and isfinite(entry.get("tflops", float("nan"))):
        curves.setdefault(title, {})[problem.seqlen_k] = entry["tflops"]


def curves(
    document: Document, way: Direction, limits: Sequence[Limit], name: str, title: str
) -> str | None:
    """A grid's curves as one figure, a panel for each head dim and mask; None where there are none.

    Args:
        document: a result file.
        way: the pass.
        limits: lines to draw, in TFLOP/s.
        name: of the figure.
        title: for a reader who does not see it.
    """
    series = {place: found for place, found in series_of(document, way).items() if found}
    if not series:
        return None
    dims = list(dict.fromkeys(dim for dim, _ in series))
    masks = list(dict.fromkeys(causal for _, causal in series))
    titles = list(dict.fromkeys(title for found in series.values() for title in found))
    seqlens = sorted({s for found in series.values() for points in found.values() for s in points})
    width, height = PANEL[0] * max(len(dims), 2), PANEL[1] * len(masks) + 0.9
    with canvas(width, height) as figure:
        panels = figure.subplots(len(masks), len(dims), squeeze=False, sharex=True, sharey=True)
        handles: dict[str, Any] = {}
        for down, causal in enumerate(masks):
            for across, dim in enumerate(dims):
                axis = panels[down][across]
                axis.set_title(f"head dim {dim}, {'causal' if causal else 'no mask'}", loc="left")
                for index, each in enumerate(titles):
                    points = series.get((dim, causal), {}).get(each, {})
                    (handles[each],) = axis.plot(
                        list(points),
                        list(points.values()),
                        color=SERIES[index % len(SERIES)],
                        marker=MARKERS[index % len(MARKERS)],
                        markersize=4.5,
                    )
                for limit, style in zip(limits, ("--", ":"), strict=False):
                    handles[limit.title] = axis.axhline(
                        limit.tflops, color=INK, linewidth=1.1, linestyle=style
                    )
                axis.grid(visible=True)
        _frame(panels, seqlens, limits)
        named = {f"{each.title}: {each.tflops:.0f}": handles[each.title] for each in limits}
        named = {each: handles[each] for each in titles} | named
        legend_below(figure, list(named.values()), list(named), 2)
        return svg_of(figure, name, title)


def _frame(panels: Any, seqlens: Sequence[int], limits: Sequence[Limit]) -> None:
    first = panels[0][0]
    first.set_xscale("log", base=2)
    first.set_xticks(seqlens, labels=[column_label(_of_length(s)) for s in seqlens], minor=False)
    first.minorticks_off()
    top = max([each.tflops for each in limits], default=0.0)
    first.set_ylim(0, max(first.get_ylim()[1], top * 1.06))
    for axis in panels[-1]:
        axis.set_xlabel("sequence length", fontsize=SMALL)
    for row in panels:
        row[0].set_ylabel("TFLOP/s", fontsize=SMALL)
        for axis in row:
            axis.tick_params(color=FAINT)


def _of_length(seqlen: int) -> Problem:
    return Problem(seqlen_q=seqlen, seqlen_k=seqlen)
