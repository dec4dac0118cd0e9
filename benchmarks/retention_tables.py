"""The README's tables of retention: a row for each shape, with times, their ratio, and memory where it was taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention_autotuner.core.problem import Problem

SHAPE = "batch, heads, seqlen, dims"
MIB = 2**20
NOT_TIMED = "not timed"


def shape_label(problem: Problem) -> str:
    """The row of a problem, e.g. ``8, 8, 2048, 256/512``."""
    p = problem
    return f"{p.batch}, {p.heads_q}, {p.seqlen_q}, {p.dim_qk}/{p.dim_v}"


def contest_table(document: Mapping[str, Any], contest: str, *, memory: bool = False) -> list[str]:
    """Markdown: every problem that a peer was timed on, gains and losses alike; empty where there is none.

    Args:
        document: a result file.
        contest: the peer's.
        memory: whether the peak memory of a call stands beside the times.
    """
    mine, theirs = document["contests"][contest]
    head = [SHAPE, "ours, us", "theirs, us", "speed"]
    if memory:
        head += ["ours, peak MiB", "theirs, peak MiB", "all scores, MiB"]
    lines = []
    for row in document["rows"]:
        entries = row["entries"]
        if theirs not in entries:
            continue
        cells = [shape_label(Problem(**row["problem"]))]
        cells += [_time(entries.get(label)) for label in (mine, theirs)]
        cells.append(_ratio(row["ratios"].get(contest)))
        if memory:
            cells += _memory(row.get("calls", {}).get(contest, {}))
        lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return []
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]


def _time(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    if "median_us" not in entry:
        return NOT_TIMED
    return f"{entry['median_us']:.0f}"


def reasons(document: Mapping[str, Any]) -> list[str]:
    """Why cells of a document's tables hold no time: a list in Markdown, empty where all have one."""
    lines: dict[str, None] = {}
    for contest in document["peers"]:
        sides = zip(("ours", contest), document["contests"][contest], strict=True)
        for whose, label in sides:
            for row in document["rows"]:
                entry = row["entries"].get(label, {"median_us": 0.0})
                if "median_us" not in entry:
                    shape = shape_label(Problem(**row["problem"]))
                    found = f"{entry['outcome']['kind']}: {entry['outcome']['reason']}"
                    lines.setdefault(f"- {shape}, {whose}: the check's answer is {found}")
    return ["", f"Why some are {NOT_TIMED}:", "", *lines] if lines else []


def _ratio(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    text = f"{found['ratio']:.2f}"
    return f"**{text}**" if found["ratio"] < 1.0 else text


def _memory(found: Mapping[str, Any]) -> list[str]:
    if "peak_bytes" not in found:
        return ["", "", ""]
    sizes = [found["peak_bytes"]["ours"], found["peak_bytes"]["theirs"], found["scores_bytes"]]
    return [f"{size / MIB:.0f}" for size in sizes]


def contests_section(
    document: Mapping[str, Any], title: str, legend: str, *, memory: bool
) -> list[str]:
    """A heading and a table for every peer that was timed."""
    lines = [f"### {title} on {document['environment']['gpu_name']}", "", legend]
    for contest, name in document["peers"].items():
        table = contest_table(document, contest, memory=memory)
        if contest in document["summary"]:
            lines += ["", f"Against {name}:", "", *table]
    return [*lines, *reasons(document)]


RETNET_LEGEND = (
    "`retnet_attn_func` with an explicit mask of a RetNet's values, fp16, not causal: microseconds of the tuned pick "
    "and of the same formula in PyTorch, our speed over it (bold where we are slower), and the device memory that a "
    "call takes at its highest, beside that of one tensor of all scores. All of a direction in one interleaved run "
    "with a cold L2."
)
RETENTION_LEGEND = (
    "`retention_func` with the usual decays, fp16, form `auto`, no states given or wanted: microseconds of ours and of "
    "the other's, both called as a program calls them, and our speed over it (bold where we are slower). All in one "
    "interleaved run with a cold L2."
)


def retnet_tables(document: Mapping[str, Any]) -> list[str]:
    """Of retention with an explicit mask."""
    title = "Retention with an explicit mask"
    return contests_section(document, title, RETNET_LEGEND, memory=True)


def retention_tables(document: Mapping[str, Any]) -> list[str]:
    """Of retention with decay."""
    return contests_section(document, "Retention with decay", RETENTION_LEGEND, memory=False)


def decode_table(document: Mapping[str, Any]) -> list[str]:
    """Of one token for a batch: the pick in both ways, beside the copy."""
    ways = document["rows"][0]["ways"]
    return [
        f"### Decoding with retention on {document['environment']['gpu_name']}",
        "",
        f"One token for every sequence of a batch ({document['problem']}), graph replays: time, bytes that must move "
        f"over that time, and its share of the {document['copy_gb_per_s']:.0f} GB/s of a copy in the same run.",
        "",
        "| state | us | GB/s | share of a copy |",
        "|---|---|---|---|",
        *(
            f"| {way} | {each['us']:.1f} | {each['gb_per_s']:.0f} | {each['share_of_copy']:.0%} |"
            for way, each in ways.items()
        ),
    ]
