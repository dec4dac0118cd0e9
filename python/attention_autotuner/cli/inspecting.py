"""Commands that only look: ``candidates``, ``render``, ``why``. They need no compiler and no GPU."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from ..arch import Policy, Rejection
from ..arch.resources import smem_bytes
from ..codegen.candidate import Candidate
from ..codegen.files import write_atomic
from ..codegen.problem import Problem
from ..codegen.render import kernel_digest, render
from ..settings import current
from ..tuning.cost_model import rank
from ..tuning.environment import collect
from ..tuning.lookup import Hit, Miss, Query
from ..tuning.records import RecordStore
from ..tuning.shipped import ShippedRecords
from ..tuning.why import Explanation, explain
from .console import finite, microseconds, print_json, print_line, print_table
from .knob_cells import knob_headings, knobs
from .options import (
    Commands,
    add_choice,
    add_json,
    add_problem,
    chosen,
    policy_of,
    positive,
    problem_json,
    problem_of,
)

SHOWN = 20  # rows of a table for people, unless --limit says otherwise


def register_candidates(commands: Commands) -> None:
    """Add the command ``candidates``."""
    parser = commands.add_parser(
        "candidates",
        help="rank the legal candidates of a problem, and say why others are not legal",
        description="Rank the legal candidates of a problem by the cost model. Needs no GPU.",
    )
    add_problem(parser)
    parser.add_argument("--limit", type=positive, default=SHOWN, metavar="N", help="rows to print")
    add_json(parser)
    parser.set_defaults(run=run_candidates)


def run_candidates(arguments: argparse.Namespace) -> int:
    """Print candidates and rejections."""
    problem, policy = problem_of(arguments), policy_of(arguments)
    offered = policy.candidates(problem)
    legal = [entry for entry in offered if isinstance(entry, Candidate)]
    rejections = [entry for entry in offered if isinstance(entry, Rejection)]
    ranked = rank(problem, legal, policy.spec)
    if arguments.json:
        print_json(
            {
                "problem": problem_json(problem),
                "candidates": [
                    {
                        "name": candidate.name,
                        "family": candidate.family,
                        "config": candidate.config,
                        "smem_bytes": smem_bytes(candidate),
                        "estimate_us": finite(estimate.us),
                        "limiter": estimate.limiter,
                    }
                    for candidate, estimate in ranked
                ],
                "rejections": [
                    {"config": rejection.config, "reason": rejection.reason}
                    for rejection in rejections
                ],
            }
        )
        return 0
    rows = [
        [
            str(place),
            *knobs(candidate),
            str(-(-smem_bytes(candidate) // 1024)),
            str(estimate.occupancy),
            microseconds(estimate.us),
            estimate.limiter,
        ]
        for place, (candidate, estimate) in enumerate(ranked[: arguments.limit], start=1)
    ]
    title = (
        f"{problem.describe()} on {policy.spec.name}: best {len(rows)} of {len(ranked)} candidates"
    )
    columns = knob_headings(problem)
    headings = ["#", *columns, "smem KiB", "CTAs/SM", "estimate us", "limiter"]
    print_table(title, headings, rows)
    counts = Counter(rejection.predicate for rejection in rejections)
    print_table(
        f"{len(rejections)} rejected",
        ["rule", "rejected"],
        [[predicate, str(count)] for predicate, count in counts.most_common()],
    )
    return 0


def register_render(commands: Commands) -> None:
    """Add the command ``render``."""
    parser = commands.add_parser(
        "render",
        help="print or write the CUDA source of candidates",
        description="Render candidates into CUDA translation units. Needs no compiler.",
    )
    add_problem(parser)
    add_choice(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write <name>.cu files instead of printing"
    )
    add_json(parser)
    parser.set_defaults(run=run_render)


def run_render(arguments: argparse.Namespace) -> int:
    """Print or write rendered kernels."""
    problem, policy = problem_of(arguments), policy_of(arguments)
    kernels = [render(candidate) for candidate, _ in chosen(arguments, problem, policy)]
    files: dict[str, str] = {}
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        for kernel in kernels:
            path = arguments.output / f"{kernel.name}.cu"
            write_atomic(path, kernel.text)
            files[kernel.name] = str(path)
    if arguments.json:
        print_json(
            {
                "problem": problem_json(problem),
                "kernels": [
                    {
                        "name": kernel.name,
                        "kernel_digest": kernel_digest(kernel),
                        "file": files.get(kernel.name),
                        "text": kernel.text,
                    }
                    for kernel in kernels
                ],
            }
        )
    elif files:
        for path in files.values():
            print_line(path)
    else:
        sys.stdout.write("\n".join(kernel.text for kernel in kernels))
    return 0


def register_why(commands: Commands) -> None:
    """Add the command ``why``."""
    parser = commands.add_parser(
        "why",
        help="say of each candidate why it was kept, lost, failed, was not tried or is not legal",
        description="Explain the pick for a problem from its record, or from the cost model without one.",
    )
    add_problem(parser)
    parser.add_argument("--limit", type=positive, default=SHOWN, metavar="N", help="rows to print")
    add_json(parser)
    parser.set_defaults(run=run_why)


def find_record(problem: Problem, policy: Policy) -> Hit | Miss:
    """The record that serves a problem: the user's own, else a shipped one, else why there is none."""
    query = Query(
        problem=problem,
        arch=policy.name,
        environment=collect(),
        kernel_digest=lambda candidate: kernel_digest(render(candidate)),
    )
    own = RecordStore(current().cache_dir / "records").find(query)
    if isinstance(own, Hit):
        return own
    shipped = ShippedRecords().find(query)
    return shipped if isinstance(shipped, Hit) else own


def run_why(arguments: argparse.Namespace) -> int:
    """Print the fate of every candidate."""
    problem, policy = problem_of(arguments), policy_of(arguments)
    found = find_record(problem, policy)
    explanations = explain(problem, policy, found.record if isinstance(found, Hit) else None)
    if isinstance(found, Hit):
        exact = "" if found.exact else f", of the neighbour {found.record.problem.describe()}"
        doubts = f"; unverified: {', '.join(found.unverified)} differ" if found.unverified else ""
        source = (
            f"{found.layer} of {found.record.environment.gpu_name}, tuned for "
            f"{found.record.purpose}{exact}{doubts}"
        )
    else:
        source = f"no record: {found.field} is {found.found}, wanted {found.expected}"
    if arguments.json:
        print_json(
            {
                "problem": problem_json(problem),
                "arch": policy.name,
                "source": source,
                "explanations": [asdict(explanation) for explanation in explanations],
            }
        )
        return 0
    counts = Counter(explanation.verdict for explanation in explanations)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print_line(source)
    tried = [row for row in explanations if row.verdict != "rejected"]
    print_table(
        f"{problem.describe()} on {policy.spec.name}: {summary}",
        ["fate", "candidate", "estimate us", "measured us", "reason"],
        _cells(tried, arguments.limit),
    )
    reasons = Counter(
        row.reason.split(":", 1)[0] for row in explanations if row.verdict == "rejected"
    )
    print_table(
        "not legal",
        ["rule", "rejected"],
        [[rule, str(count)] for rule, count in reasons.most_common()],
    )
    return 0


def _cells(explanations: list[Explanation], limit: int) -> list[list[str]]:
    return [
        [
            row.verdict,
            row.name,
            microseconds(row.estimate_us),
            microseconds(row.median_us),
            row.reason,
        ]
        for row in explanations[:limit]
    ]
