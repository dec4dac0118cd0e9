"""Commands that only look: ``candidates``, ``render``, ``why``. They need no compiler and no GPU."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from ..arch import Policy, Rejection
from ..codegen.artifact import BuildTarget
from ..codegen.files import write_atomic
from ..codegen.render import kernel_digest, render
from ..core.candidate import Candidate
from ..kernels.cost_model import rank
from ..kernels.resources import smem_bytes
from ..serving.picks import CacheHierarchy, Pick
from ..settings import current
from ..tuning.environment import collect
from ..tuning.lookup import Hit
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
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write <name>.cu files instead of printing, with <name>.architecture where CMake must know of one",
    )
    add_json(parser)
    parser.set_defaults(run=run_render)


def run_render(arguments: argparse.Namespace) -> int:
    """Print or write rendered kernels."""
    problem, policy = problem_of(arguments), policy_of(arguments)
    kernels = [render(candidate) for candidate, _ in chosen(arguments, problem, policy)]
    target = BuildTarget(arch=policy.build_arch)
    own = {
        kernel.name: mine.cmake_architecture
        for kernel in kernels
        if (mine := target.of_family(kernel.candidate.family)) != target
    }
    files: dict[str, str] = {}
    written: list[str] = []
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        for kernel in kernels:
            path = arguments.output / f"{kernel.name}.cu"
            write_atomic(path, kernel.text)
            files[kernel.name] = str(path)
            written.append(str(path))
            if kernel.name in own:  # the CMake project compiles it for that
                beside = path.with_suffix(".architecture")
                write_atomic(beside, own[kernel.name] + "\n")
                written.append(str(beside))
    if arguments.json:
        print_json(
            {
                "problem": problem_json(problem),
                "kernels": [
                    {
                        "name": kernel.name,
                        "kernel_digest": kernel_digest(kernel),
                        "file": files.get(kernel.name),
                        "architecture": own.get(kernel.name),
                        "text": kernel.text,
                    }
                    for kernel in kernels
                ],
            }
        )
    elif written:
        for each in written:
            print_line(each)
    else:
        sys.stdout.write("\n".join(kernel.text for kernel in kernels))
    return 0


def register_why(commands: Commands) -> None:
    """Add the command ``why``."""
    parser = commands.add_parser(
        "why",
        help="say of each candidate why it was kept, lost, failed, was not tried or is not legal",
        description=(
            "Say which layer answers for a problem, why those before it do not, and what became of every candidate."
        ),
    )
    add_problem(parser)
    parser.add_argument("--limit", type=positive, default=SHOWN, metavar="N", help="rows to print")
    add_json(parser)
    parser.set_defaults(run=run_why)


def run_why(arguments: argparse.Namespace) -> int:
    """Print which layer answers, and the fate of every candidate."""
    problem, policy = problem_of(arguments), policy_of(arguments)
    hierarchy = CacheHierarchy(current())
    environment = hierarchy.environment_of(policy, collect())
    pick, hit = hierarchy.choose(problem.bucketed(), policy, environment)
    explanations = explain(problem, policy, None if hit is None else hit.record)
    source = source_of(pick, hit, policy)
    if arguments.json:
        print_json(
            {
                "problem": problem_json(problem),
                "arch": policy.name,
                "layer": pick.layer,
                "source": source,
                "exact": pick.exact,
                "unverified": list(pick.unverified),
                "passed": [asdict(each) for each in pick.passed],
                "explanations": [asdict(explanation) for explanation in explanations],
            }
        )
        return 0
    print_line(source)
    for each in pick.passed:
        print_line(f"not by {each}")
    counts = Counter(explanation.fate for explanation in explanations)
    summary = ", ".join(f"{count} {fate}" for fate, count in counts.items())
    tried = [row for row in explanations if row.fate != "rejected"]
    print_table(
        f"{problem.describe()} on {policy.spec.name}: {summary}",
        ["fate", "candidate", "estimate us", "measured us", "reason"],
        _cells(tried, arguments.limit),
    )
    reasons = Counter(row.reason.split(":", 1)[0] for row in explanations if row.fate == "rejected")
    print_table(
        "not legal",
        ["rule", "rejected"],
        [[rule, str(count)] for rule, count in reasons.most_common()],
    )
    return 0


def source_of(pick: Pick, hit: Hit | None, policy: Policy) -> str:
    """One line: the level of the cache hierarchy that serves, and what it rests on."""
    if hit is None:
        return f"default of {policy.name}" + ("" if pick.passed else f": {pick.reason}")
    exact = "" if hit.exact else f", of the neighbour {hit.record.problem.describe()}"
    doubts = f"; unverified: {', '.join(hit.unverified)} differ" if hit.unverified else ""
    return f"{hit.layer} of {hit.gpu_name}, tuned for {hit.record.purpose}{exact}{doubts}"


def _cells(explanations: list[Explanation], limit: int) -> list[list[str]]:
    return [
        [
            row.fate,
            row.name,
            microseconds(row.estimate_us),
            microseconds(row.median_us),
            row.reason,
        ]
        for row in explanations[:limit]
    ]
