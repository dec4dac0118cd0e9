"""Commands that only look: ``candidates``, ``render``, ``why``. They need no compiler and no GPU."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from ..arch import Policy, Rejection, resolve
from ..codegen.artifact import BuildTarget
from ..codegen.files import write_atomic
from ..codegen.render import kernel_digest, render
from ..core.identity import values_of
from ..kernels.cost_model import rank
from ..kernels.resources import smem_bytes
from ..serving.picks import CacheHierarchy, Pick
from ..settings import current
from ..tuning.environment import collect
from ..tuning.lookup import Hit
from ..tuning.result import finite
from ..tuning.why import explain
from . import options
from .console import cell, microseconds, named, print_json, print_line, print_table, ratio
from .names import knob_headings, knobs

UNSERVED = "nothing: no measured pick is known, and STRICT_PICKS is on"


@options.command("candidates", options.add_problem, options.add_limit)
def run_candidates(arguments: argparse.Namespace) -> int:
    """Rank the legal candidates of a problem, and say why others are not legal.

    Rank the legal candidates of a problem by the cost model. Needs no GPU.
    """
    problem, policy = options.problem_of(arguments), resolve(arguments.device_type)
    offered = policy.candidates(problem)
    rejections = [entry for entry in offered if isinstance(entry, Rejection)]
    ranked = rank(problem, policy.served(problem), policy.spec)
    if arguments.json:
        candidates = [
            {name: getattr(candidate, name) for name in ("name", "family", "config")}
            | {"smem_bytes": smem_bytes(candidate)}
            | {"estimate_us": finite(estimate.us), "limiter": estimate.limiter}
            for candidate, estimate in ranked
        ]
        rejected = [{"config": entry.config, "reason": entry.reason} for entry in rejections]
        said = {"candidates": candidates, "rejections": rejected}
        print_json({"problem": values_of(problem), **said})
        return 0
    rows = []
    for place, (candidate, estimate) in enumerate(ranked[: arguments.limit], start=1):
        resources = [str(-(-smem_bytes(candidate) // 1024)), str(estimate.occupancy)]
        estimated = [microseconds(estimate.us), estimate.limiter]
        rows.append([str(place), named(candidate.name), *knobs(candidate), *resources, *estimated])
    columns = knob_headings(problem)
    print_table(
        f"{problem.describe()} on {policy.spec.name}: best {len(rows)} of {len(ranked)} candidates",
        ["#", "candidate", *columns, "smem KiB", "CTAs/SM", "estimate us", "limiter"],
        rows,
        rare=columns,
    )
    rules = Counter(rejection.predicate for rejection in rejections)
    print_rejections(f"{len(rejections)} rejected", rules)
    return 0


def print_rejections(title: str, counts: Counter[str]) -> None:
    """Print how many points of a search space each rule rejects."""
    print_line()
    rows = [[rule, str(count)] for rule, count in counts.most_common()]
    print_table(title, ["rule", "rejected"], rows)


WORDS = "write <name>.cu files instead of printing, with <name>.architecture where CMake must know of one"
add_output = options.option("--output", type=Path, metavar="FOLDER", help=WORDS)


@options.command("render", options.add_problem, options.add_choice, add_output)
def run_render(arguments: argparse.Namespace) -> int:
    """Print or write the CUDA source of candidates.

    Render candidates into CUDA translation units. Needs no compiler.
    """
    problem, policy = options.problem_of(arguments), resolve(arguments.device_type)
    kernels = [render(candidate) for candidate, _ in options.chosen(arguments, problem, policy)]
    target = BuildTarget(arch=policy.build_arch)
    architectures = {
        kernel.name: special.cmake_architecture
        for kernel in kernels
        if (special := target.of_family(kernel.candidate.family)) != target
    }
    files: dict[str, str] = {}
    written: dict[Path, str] = {}
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        for kernel in kernels:
            path = arguments.output / f"{kernel.name}.cu"
            files[kernel.name], written[path] = str(path), kernel.text
            if kernel.name in architectures:  # the CMake project compiles it for that
                written[path.with_suffix(".architecture")] = f"{architectures[kernel.name]}\n"
        for path, text in written.items():
            write_atomic(path, text)
    if arguments.json:
        listed = [
            {
                "name": kernel.name,
                "kernel_digest": kernel_digest(kernel),
                "file": files.get(kernel.name),
                "architecture": architectures.get(kernel.name),
                "text": kernel.text,
            }
            for kernel in kernels
        ]
        print_json({"problem": values_of(problem), "kernels": listed})
    else:
        sources = "\n".join(kernel.text for kernel in kernels)
        sys.stdout.write("".join(f"{path}\n" for path in written) or sources)
    return 0


@options.command("why", options.add_problem, options.add_limit)
def run_why(arguments: argparse.Namespace) -> int:
    """Say of each candidate why it was kept, lost, failed, was not tried or is not legal.

    Say which layer answers for a problem, why those before it do not, and what became of every candidate.
    """
    problem, policy = options.problem_of(arguments), resolve(arguments.device_type)
    hierarchy = CacheHierarchy(current())
    environment = hierarchy.environment_of(policy, collect())
    pick, hit = hierarchy.choose(problem, policy, environment)
    problem = replace(problem, deterministic=hierarchy.asked(problem).deterministic)
    mode = current().mode_of(problem.direction)
    explanations = explain(problem, policy, None if hit is None else hit.record)
    strict = hit is None and mode != "off" and current().strict_picks
    source = UNSERVED if strict else source_of(pick, hit, policy)
    if arguments.json:
        print_json(
            {
                "problem": values_of(problem),
                "arch": policy.name,
                "mode": mode,
                "source": source,
                **{name: getattr(pick, name) for name in ("layer", "exact", "unverified")},
                "passed": [asdict(level) for level in pick.passed],
                "proof": None if hit is None or hit.proof is None else asdict(hit.proof),
                "explanations": [asdict(explanation) for explanation in explanations],
            }
        )
        return 0
    print_line(f"serves: {source}")
    if mode == "frozen":
        untuned = "an error" if current().strict_picks else "the default's"
        print_line(
            "frozen: a process keeps the picks that were recorded when it first asked, its kernels are deterministic, "
            f"and a problem without a pick is {untuned}"
        )
    if hit is not None:
        print_line(f"proof: {hit.proof.describe() if hit.proof else 'none'}")
    for level in pick.passed:
        print_line(f"not by {level}")
    counts = Counter(explanation.fate for explanation in explanations)
    summary = ", ".join(f"{count} {fate}" for fate, count in counts.items())
    tried = [row for row in explanations if row.fate != "rejected"][: arguments.limit]
    rows, notes = [], []
    for place, row in enumerate(tried, start=1):
        predicted = [cell(row.rank), row.limiter or "-", microseconds(row.estimate_us)]
        measured = [microseconds(row.median_us), ratio(row.ratio_to_best, row.ratio_high)]
        rows.append([str(place), row.fate, named(row.name), *predicted, *measured])
        if row.fate != "untried" or row.rank is None:  # else the columns say it all
            notes.append((str(place), named(row.reason)))
    print_table(
        f"{problem.describe()} on {policy.spec.name}: {summary}",
        ["#", "fate", "candidate", "rank", "limiter", "estimate us", "measured us", "of best"],
        rows,
        spare=("limiter", "of best"),
        notes=notes,
    )
    rejected = [row for row in explanations if row.fate == "rejected"]
    print_rejections("not legal", Counter(row.reason.split(":", 1)[0] for row in rejected))
    return 0


def source_of(pick: Pick, hit: Hit | None, policy: Policy) -> str:
    """One line: the level of the cache hierarchy that serves, and what it rests on."""
    if hit is None:
        return f"default of {policy.name}" + ("" if pick.passed else f": {pick.reason}")
    exact = "" if hit.exact else f", of the neighbour {hit.record.problem.describe()}"
    doubts = f"; unverified: {', '.join(hit.unverified)} differ" if hit.unverified else ""
    return f"{hit.layer} of {hit.gpu_name}, tuned for {hit.record.purpose}{exact}{doubts}"
