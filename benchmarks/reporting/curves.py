"""TFLOP/s over sequence length, ours and the baselines', under the lines of what the GPU could do, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from attention_autotuner.arch.a100 import A100_SPEC
from attention_autotuner.arch.h100 import H100_SPEC, H200_SPEC
from attention_autotuner.arch.rtx4090 import RTX4090_SPEC

from ..contenders import PICK
from ..results import problem_of
from ..suites import column_label

SPECS = {spec.name: spec for spec in (A100_SPEC, RTX4090_SPEC, H100_SPEC, H200_SPEC)}
PANEL = (3.1, 2.3)  # inches
# Told apart by readers of every colour vision: Okabe and Ito, "Color Universal Design", 2008, without black and yellow.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#808080"  # readable on white and on black, as in the style
STYLE = Path(__file__).with_name("curves.mplstyle")
Points = dict[int, float]  # sequence length -> TFLOP/s


def limits_of(spec_name: str, bring_up: Mapping[str, Any] | None) -> dict[str, float]:
    """The tensor cores' limits in fp16, TFLOP/s: measured by a bring-up, or by the specification.

    Args:
        spec_name: of a result file.
        bring_up: the GPU's committed bring-up, where there is one.
    """
    measured = (bring_up or {}).get("ceilings", {})
    spec = SPECS.get(spec_name)
    limits = {}
    for instruction, name in (("mma.sync", "mma_fp16"), ("wgmma", "wgmma_fp16")):
        value = measured.get(name, {}).get("value")
        if value is not None:
            limits[f"{instruction}, measured"] = value / 1e12
        elif spec is not None:
            flops = getattr(spec, f"{name.removesuffix('_fp16')}_flops_per_clk_per_sm")
            if flops > 0:
                rate = flops * spec.num_sms * spec.sm_clock_mhz / 1e6
                limits[f"{instruction}, by the specification"] = rate
    return limits


def series_of(document: Mapping[str, Any]) -> dict[tuple[int, bool], dict[str, Points]]:
    """(head dim, causal) -> title -> points: our pick first, then the baselines in the same mode.

    Baselines that were timed on fewer than two lengths have no curve.
    """
    series: dict[tuple[int, bool], dict[str, Points]] = {}
    for row in document["rows"]:
        if PICK not in row["entries"]:
            continue  # of whole steps alone
        problem, mode = problem_of(row), row["modes"][0]
        curves = series.setdefault((problem.dim_qk, problem.causal), {})
        titles = {PICK: "ours"} | {f"{n} {mode}": t for n, t in document["baselines"].items()}
        for label, title in titles.items():
            if "tflops" in (entry := row["entries"].get(label, {})):
                curves.setdefault(title, {})[problem.seqlen_k] = entry["tflops"]
    return {
        place: {title: points for title, points in curves.items() if len(points) > 1}
        for place, curves in series.items()
    }


def draw(document: Mapping[str, Any], limits: Mapping[str, float]) -> str | None:
    """A grid's curves as one figure, a panel for each head dim and mask; None where there are none.

    Args:
        document: a result file of a grid.
        limits: lines to draw, in TFLOP/s.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    series = {place: curves for place, curves in series_of(document).items() if curves}
    if not series:
        return None
    dims = list(dict.fromkeys(dim for dim, _ in series))
    masks = list(dict.fromkeys(causal for _, causal in series))
    titles = list(dict.fromkeys(title for curves in series.values() for title in curves))
    ticks = {problem_of(row).seqlen_k: column_label(problem_of(row)) for row in document["rows"]}
    size = (PANEL[0] * max(len(dims), 2), PANEL[1] * len(masks) + 0.9)
    with mpl.rc_context({"svg.hashsalt": document["suite"]}, STYLE):
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(masks), len(dims), squeeze=False, sharex=True, sharey=True)
        handles: dict[str, Any] = {}
        for down, causal in enumerate(masks):
            for across, dim in enumerate(dims):
                axis = panels[down][across]
                axis.set_title(f"head dim {dim}, {'causal' if causal else 'no mask'}", loc="left")
                for index, title in enumerate(titles):
                    points = series.get((dim, causal), {}).get(title, {})
                    style = {"color": SERIES[index % 6], "marker": MARKERS[index % 6]}
                    (handles[title],) = axis.plot(list(points), list(points.values()), **style)
                for (title, tflops), dashes in zip(limits.items(), ("--", ":"), strict=False):
                    line = axis.axhline(tflops, color=GREY, linewidth=1.1, linestyle=dashes)
                    handles[f"{title}: {tflops:.0f}"] = line
                axis.grid(visible=True, linewidth=0.4, alpha=0.5)
                axis.set(xscale="log", ylim=(0, None))
                axis.set_xticks(list(ticks), labels=list(ticks.values()))
                axis.minorticks_off()
        for axis in panels[-1]:
            axis.set_xlabel("sequence length")
        for axes in panels:
            axes[0].set_ylabel("TFLOP/s")
        figure.legend(handles.values(), list(handles), loc="outside lower center", ncols=2)
        return _svg(figure, f"{document['title']}: TFLOP/s by sequence length")


def _svg(figure: Any, title: str) -> str:
    """A figure as one element with a title, without what would fetch or collide on a page."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
        text = file.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>|<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    return re.sub(
        r"<svg([^>]*)>", rf'<svg\1 role="img">\n <title>{escape(title)}</title>', text, count=1
    )
