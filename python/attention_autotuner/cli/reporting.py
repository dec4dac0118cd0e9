"""The command ``report``: a search as one page of HTML that needs nothing else."""

from __future__ import annotations

import argparse
from collections import Counter
from importlib.resources import files
from math import floor, log10
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ..arch import Policy, resolve
from ..codegen.files import write_atomic
from ..errors import RecordError
from ..serving.picks import CacheHierarchy
from ..settings import current
from ..tuning.environment import collect
from ..tuning.journal import key_of
from ..tuning.lookup import Hit
from ..tuning.timeline import Course, Timeline, timeline_of
from ..tuning.why import Explanation, explain
from .console import microseconds, print_json, print_line
from .inspecting import source_of
from .modelling import print_model_card
from .names import short_names
from .options import add_problem, command, option, problem_of

SIDE, MARGIN = 340.0, 44.0  # of the chart and of what surrounds it, in its own units
NICE = (1, 2, 5)  # leading digits of ticks
add_page = option("--output", type=Path, metavar="FILE", help="the page to write")
CARD = "how well the cost model does on searches: of your own records, or of files with one a line"
OTHERS = "searches to learn from besides; a problem's own are left out of what it is held against"
add_card = option("--model-card", type=Path, nargs="*", metavar="FILE", help=CARD)
add_others = option("--learn-from", type=Path, nargs="+", metavar="FILE", help=OTHERS)


@command("report", add_problem, add_page, add_card, add_others)
def run_report(arguments: argparse.Namespace) -> int:
    """Write a page about a search: what was tried, predicted against measured, and why each lost.

    Write the search that serves a problem, your own or a shipped one, as one page of HTML with its charts inside: the
    same record and journal give the same page. With --model-card, print a table instead: the regret of the cost model's
    first picks, its rank correlation and its error, by architecture, operation and direction. Needs no GPU.
    """
    others = arguments.learn_from or []
    if arguments.model_card is not None:
        return print_model_card(arguments.model_card, others, as_json=arguments.json)
    if others:
        arguments.usage_error("--learn-from goes with --model-card")
    if arguments.output is None:
        arguments.usage_error("the following arguments are required: --output, or --model-card")
    problem, policy = problem_of(arguments), resolve(arguments.device_type)
    hierarchy = CacheHierarchy(current())
    environment = hierarchy.environment_of(policy, collect())
    pick, hit = hierarchy.choose(problem, policy, environment)
    if hit is None:
        raise RecordError(
            f"there is no search to report: {source_of(pick, hit, policy)}: tune it first"
        )
    record = hit.record
    path = hierarchy.records.path(record.problem, record.arch, hit.gpu_name).with_suffix(".jsonl")
    key = key_of(record.measured_problem, record.environment)
    timeline = timeline_of(path, key, [entry.candidate for entry in record.entries])
    page = page_of(hit, policy, timeline, source_of(pick, hit, policy))
    write_atomic(arguments.output, page)
    arguments.output.chmod(0o644)  # it holds nothing private, and may be served
    if arguments.json:
        print_json({"page": str(arguments.output), "candidates": len(record.entries)})
    else:
        print_line(f"wrote {arguments.output}")
    return 0


def page_of(hit: Hit, policy: Policy, timeline: Timeline, source: str) -> str:
    """The page about a record.

    Args:
        hit: the record, as it was found.
        policy: whose candidates.
        timeline: of the search.
        source: one line on where it comes from.
    """
    record = hit.record
    explained = explain(record.measured_problem, policy, record)
    known = {entry.candidate.name for entry in record.entries}
    tried = [row for row in explained if row.name in known]
    rules = Counter(r.reason.split(":", 1)[0] for r in explained if r.fate == "rejected")
    text = files("attention_autotuner.cli").joinpath("report.html.jinja").read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"us": microseconds, "short": short_names}
    return environment.from_string(text).render(
        record=record,
        source=source,
        environment={k: v for k, v in record.environment.to_json().items() if v is not None},
        rows=[_row(row, timeline, record.default) for row in tried],
        fates=Counter(row.fate for row in explained).items(),
        rules=rules.most_common(),
        chart=chart_of(tried),
        seconds=timeline.seconds,
    )


def _row(row: Explanation, timeline: Timeline, default: str) -> dict[str, Any]:
    course = timeline.courses.get(row.name)
    spans = [] if course is None else _spans(course, timeline.seconds or 1.0)
    return {"why": row, "default": row.name == default, "spans": spans, "course": course}


def _spans(course: Course, seconds: float) -> list[dict[str, Any]]:
    """Bars of a course, in percent of the search, with what they say."""
    spans = []

    def add(kind: str, start: float, end: float, said: str) -> None:
        left, width = 100 * start / seconds, 100 * (end - start) / seconds
        spans.append({"kind": kind, "left": left, "width": width, "said": said})

    if course.built is not None:
        add("built", *course.built, f"compiled in {course.built[1] - course.built[0]:.1f} s")
    if (at := course.verified) is not None:
        add("verified", at, at, f"verified at {at:.1f} s")
    if course.raced is not None:
        rounds = f"timed in {course.rounds} rounds, the last at {course.raced[1]:.1f} s"
        add("raced", *course.raced, rounds)
    if (at := course.failed) is not None:
        add("failed", at, at, f"failed at {at:.1f} s")
    return spans


def chart_of(rows: list[Explanation]) -> dict[str, Any] | None:
    """Predicted against measured times, both on one logarithmic scale; None where fewer than two were measured."""
    points = [(r, r.estimate_us, r.median_us) for r in rows if r.estimate_us and r.median_us]
    if len(points) < 2:
        return None
    times = [us for _, *pair in points for us in pair]
    low, high = log10(min(times) / 1.1), log10(max(times) * 1.1)

    def place(us: float) -> float:
        return (log10(us) - low) / (high - low) * SIDE

    decades = range(floor(low), floor(high) + 1)
    ticks = [n * 10.0**d for d in decades for n in NICE if low <= log10(n) + d <= high]
    return {
        "side": SIDE,
        "margin": MARGIN,
        "ticks": [{"at": place(us), "said": f"{us:,.6g}"} for us in ticks],
        "points": [
            {
                "x": MARGIN + place(predicted),
                "y": SIDE - place(measured) + MARGIN / 4,
                "fate": row.fate,
                "said": f"{short_names(row.name)}: predicted {predicted:,.1f} us, measured {measured:,.1f} us",
            }
            for row, predicted, measured in points
        ],
    }
