"""Everything that shows results, from the committed JSON: the README's part, pages of docs/ and docs/figures/.

    python -m benchmarks.report            # rewrites the READMEs between their markers, the page and the figures
    python -m benchmarks.report --check    # answers 1 when one of them is out of date

It draws with matplotlib (the extra ``report``) and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_autotuner.codegen.files import write_atomic
from attention_autotuner.core.problem import Problem

from .cases import column_label, row_label
from .confidence import ratio_text
from .reporting.chinese import chinese
from .reporting.duels import TITLES, earlier_rows, standings
from .reporting.guide import CASES, PEERS, cases_text, peers_text
from .reporting.heatmaps import WAYS, short
from .retention_tables import decode_table, retention_tables, retnet_tables
from .rivals import DETERMINISTIC, PICK, STEP

WHOLE_PAGE = (
    "All of this on one page, with every row and where we are slower: [docs/report.html](docs/report.html), to be "
    "opened in a browser."
)
GUIDE = (
    "benchmarks.md"  # of the documentation; has every table unfolded, where it holds the markers
)
CHINESE = ".zh-CN."  # in the name of a text whose results are translated
PICTURES = {"curves": "TFLOP/s by sequence length", "speedup": "Our speed over each other's"}
SUITE_LEGEND = (
    "Our speed over each other's in one interleaved run with a cold L2, untuned (what a call runs as it ships); bold "
    "where we are slower."
)
ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING = "No results are committed yet."


def attention_table(document: Mapping[str, Any], ours: str, contest: str | None) -> list[str]:
    """Markdown: one of ours in TFLOP/s and its speed over another's, by head dim and mask.

    Args:
        document: a result file.
        ours: the label of ours; rows without it have an empty cell.
        contest: whose ratio stands in brackets; None leaves the brackets out.
    """
    columns: dict[str, None] = {}
    cells: dict[str, dict[str, str]] = {}
    for row in document["rows"]:
        problem = Problem(**row["problem"])
        column = column_label(problem)
        columns.setdefault(column)
        cells.setdefault(row_label(problem), {})[column] = _cell(row, ours, contest)
    lines = [
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for label, found in cells.items():
        lines.append(f"| {label} | " + " | ".join(found.get(c, "") for c in columns) + " |")
    return lines


def _cell(row: Mapping[str, Any], ours: str, contest: str | None) -> str:
    figures = row["entries"].get(ours)
    if figures is None:
        return ""
    if "tflops" not in figures:
        return str(figures["outcome"]["kind"])
    text = f"{figures['tflops']:.0f}"
    if contest in row["ratios"]:
        ratio = row["ratios"][contest]["ratio"]
        text += f" (**{ratio_text(ratio)}**)" if ratio < 1.0 else f" ({ratio_text(ratio)})"
    return text


def _verdict(title: str, summary: Mapping[str, Any]) -> str:
    least = f"least {summary['min']:.3f} ({summary['min_at']})"
    return (
        f"Speed over {title}, {summary['problems']} problems: geometric mean "
        f"{summary['geometric_mean']:.3f}, {least}."
    )


def _verdicts(document: Mapping[str, Any]) -> list[str]:
    """A paragraph for each peer, and one for deterministic mode."""
    lines = []
    for peer, title in document["peers"].items():
        if peer in document["summary"]:
            lines += ["", _verdict(title, document["summary"][peer])]
    figures = document["summary"].get(DETERMINISTIC)
    if figures is not None:
        lines += [
            "",
            f"Deterministic mode takes {1 / figures['geometric_mean']:.3f} times as long as the pick, "
            f"{figures['problems']} problems' geometric mean, at most {1 / figures['min']:.3f} "
            f"({figures['min_at']}).",
        ]
    return lines


def _first(document: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of some contests that has figures."""
    return next((name for name in names if name in document["summary"]), None)


def _place(document: Mapping[str, Any]) -> str:
    """The environment, in one sentence."""
    found = document["environment"]
    cuda = found["nvcc"] or found["cuda_runtime"]  # what only serves kernels needs no compiler
    parts = [f"driver {found['driver']}", f"CUDA {cuda}", f"torch {found['torch']}"]
    clocks = [row["clocks"]["sm_clock_mhz"] for row in document["rows"] if row.get("clocks")]
    known = [clock for clock in clocks if clock is not None]
    if known:
        parts.append(f"SM clock after each race {min(known):.0f} to {max(known):.0f} MHz")
    parts.append(str(found["time_utc"]))
    earlier = earlier_rows(document)
    return ", ".join([found["gpu_name"], *parts, *([earlier] if earlier else [])]) + "."


def _legend(subject: str, title: str) -> str:
    return (
        f"TFLOP/s of {subject}, fp16, 16k tokens, hidden size 2048, by head dim and sequence length; in brackets "
        f"its speed over {title}, bold where it is slower. All in one interleaved run with a cold L2."
    )


def forward_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of attention forward, as Markdown."""
    peers: Mapping[str, str] = document["peers"]
    return [
        f"### Attention forward on {document['environment']['gpu_name']}",
        "",
        _legend("the tuned pick", next(iter(peers.values()))),
        "",
        *attention_table(document, PICK, _first(document, list(peers))),
        *_verdicts(document),
        "",
        _place(document),
    ]


def backward_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of attention backward, as Markdown: the backward pass alone, then whole steps."""
    peers: Mapping[str, str] = document["peers"]
    lines = [f"### Attention backward on {document['environment']['gpu_name']}"]
    for subject, ours in (("the tuned pick", PICK), ("forward and backward, both tuned", STEP)):
        names = [name for name in peers if document["contests"][name][0] == ours]
        contest = _first(document, names)
        if contest is not None:
            table = attention_table(document, ours, contest)
            lines += ["", _legend(subject, peers[contest]), "", *table]
    return [*lines, *_verdicts(document), "", _place(document)]


def retnet_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of retention with an explicit mask, as Markdown."""
    return [*retnet_tables(document), *_verdicts(document), "", _place(document)]


def retention_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of retention with decay, as Markdown."""
    return [*retention_tables(document), *_verdicts(document), "", _place(document)]


def decode_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of decoding, as Markdown."""
    return [*decode_table(document), "", _place(document)]


SECTIONS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "attention_forward": forward_section,
    "attention_backward": backward_section,
    "retnet": retnet_section,
    "retention": retention_section,
    "decode": decode_section,
}
"""Benchmark -> its part of the README. A result file of any other benchmark is not reported there, but for suites."""


def results_text(root: Path, figures: Collection[str] = (), *, folder: str | None = None) -> str:
    """What stands between the markers, for all result files under a folder ``<gpu>/<benchmark>.json``.

    Args:
        root: the folder.
        figures: the pictures that there are, by path.
        folder: where those are, seen from the text. None leaves them in ``docs`` and folds what races are beside their
            standings and curves.
    """
    parts = []
    for path in _files(root):
        document = json.loads(path.read_text(encoding="utf-8"))
        head, *rest = SECTIONS.get(path.stem, suite_section)(document)
        pictures = _pictures(path, figures, folder or "docs/figures")
        if folder is None and path.stem in TITLES:
            curves = [line for line in pictures if PICTURES["curves"] in line]
            others = [line for line in pictures if line and line not in curves]
            shown = [part for line in curves for part in ("", line)]
            folded = [part for line in others for part in ("", line)]
            rest = ["", *standings_table(document), *shown, "", *_folded([*folded, *rest])]
        else:
            rest = [*pictures, *rest]
        parts.append("\n".join([head, *rest]))
    if parts and folder is None:
        parts.append(WHOLE_PAGE)
    return "\n\n".join(parts) or NOTHING


def _folded(lines: Sequence[str]) -> list[str]:
    """Markdown that is shown on demand."""
    return ["<details><summary>Every case</summary>", *lines, "", "</details>"]


def _files(root: Path) -> list[Path]:
    """The result files that are reported, in order."""
    known = [path for name in SECTIONS for path in sorted(root.glob(f"*/{name}.json"))]
    return known + sorted(root.glob("*/suite_*.json"))


def _pictures(path: Path, figures: Collection[str], folder: str) -> list[str]:
    """Markdown of a file's pictures."""
    lines = []
    for kind, words in PICTURES.items():
        figure = f"{path.parent.name}/{path.stem}_{kind}.svg"
        if figure in figures:
            lines += ["", f"![{words} ({path.stem}, {path.parent.name})]({folder}/{figure})"]
    return lines


def suite_section(document: Mapping[str, Any]) -> list[str]:
    """A result file of a suite, as Markdown: its standing against each other, and where it was taken."""
    lines = [f"### {document['title']} on {document['environment']['gpu_name']}", "", SUITE_LEGEND]
    return [*lines, "", *standings_table(document), "", _place(document)]


def standings_table(document: Mapping[str, Any]) -> list[str]:
    """Markdown: our speed over each other's, all problems together; bold where we are slower."""
    lines = [
        "| our speed over | | problems | geometric mean | least | faster, even, slower |",
        "|---|---|---|---|---|---|",
    ]
    for each in standings(document):
        mean, least = (
            f"**{ratio_text(ratio)}**" if ratio < 1.0 else ratio_text(ratio)
            for ratio in (each.mean, each.least)
        )
        lines.append(
            f"| {short(each.peer)} | {WAYS[each.way]} | {each.problems} | {mean} | {least} ({each.least_at}) | "
            f"{each.faster}, {each.even}, {each.slower} |"
        )
    return lines


def replace_between_markers(text: str, inner: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with what stands between its markers replaced.

    Raises:
        ValueError: it does not hold each marker once, in order.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text must hold {begin} and {end} once each, in this order")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{inner}\n{end}{after}"


def outputs(options: argparse.Namespace) -> dict[Path, str]:
    """Path -> what must stand there, of every file that shows results."""
    from .reporting.site import PAGE, build

    site = build(options.results)
    found = {options.docs / PAGE: site.page}
    found |= {options.docs / "figures" / name: svg for name, svg in site.figures.items()}
    folded = results_text(options.results, site.figures)
    texts = {path: chinese(folded) if CHINESE in path.name else folded for path in options.readme}
    for path, inner in texts.items():
        if path.is_file() and (path == options.readme[0] or BEGIN in path.read_text("utf-8")):
            found[path] = replace_between_markers(path.read_text("utf-8"), inner)
    guide = options.docs / GUIDE
    if guide.is_file():
        unfolded = results_text(options.results, site.figures, folder="figures")
        text = replace_between_markers(guide.read_text(encoding="utf-8"), unfolded)
        text = replace_between_markers(text, cases_text(), *CASES)
        found[guide] = replace_between_markers(text, peers_text(), *PEERS)
    return found


def left_over(docs: Path, wanted: Mapping[Path, str]) -> list[Path]:
    """Figures of results that are gone."""
    return [path for path in sorted((docs / "figures").glob("*/*.svg")) if path not in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--results", type=Path, default=ROOT / "benchmarks" / "results")
    option("--docs", type=Path, default=ROOT / "docs", help="folder of report.html and figures/")
    option(
        "--readme",
        type=Path,
        nargs="*",
        default=[],
        help="the first must hold the markers; others are rewritten where they do",
    )
    option("--check", action="store_true", help="change nothing; 1 if something is out of date")
    options = parser.parse_args(arguments)
    wanted = outputs(options)
    gone = left_over(options.docs, wanted)
    late = [path for path, text in wanted.items() if not _holds(path, text)]
    if options.check:
        for path in [*late, *gone]:
            print(f"{path} is out of date: run python -m benchmarks.report")
        return 1 if late or gone else 0
    for path in late:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, wanted[path])
        print(f"rewrote {path}")
    for path in gone:
        path.unlink()
        print(f"removed {path}")
    return 0


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
