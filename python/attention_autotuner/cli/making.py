"""Commands that compile: ``build`` and ``warmup``. They need a compiler and no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..arch import Policy
from ..codegen.artifact import Artifact, BuildTarget
from ..codegen.build import build
from ..codegen.render import render
from ..codegen.store import default_store
from ..codegen.toolchain import find_toolchain
from ..core.candidate import Candidate
from ..core.outcome import Outcome
from ..serving.dispatch import lookup
from ..settings import current
from ..tuning.spills import spilled_bytes
from .console import print_json, print_line, print_table, progress
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
    problems_of,
)

Built = Artifact | Outcome


def register_build(commands: Commands) -> None:
    """Add the command ``build``."""
    parser = commands.add_parser(
        "build",
        help="compile candidates and print what the compiler says of them",
        description="Compile candidates into the kernel cache; what is there already is not compiled again.",
    )
    add_problem(parser)
    add_choice(parser)
    parser.add_argument("--jobs", type=positive, metavar="N", help="compiler processes at a time")
    add_json(parser)
    parser.set_defaults(run=run_build)


def run_build(arguments: argparse.Namespace) -> int:
    """Compile and report; fails when a candidate did not compile."""
    problem, policy = problem_of(arguments), policy_of(arguments)
    candidates = [candidate for candidate, _ in chosen(arguments, problem, policy)]
    results = build_candidates(
        candidates, policy, jobs=arguments.jobs, title="build", quiet=arguments.json
    )
    if arguments.json:
        print_json(
            {
                "problem": problem_json(problem),
                "arch": policy.name,
                "kernels": [
                    result_json(candidate, result)
                    for candidate, result in zip(candidates, results, strict=True)
                ],
            }
        )
    else:
        print_results(f"{problem.describe()} on {policy.spec.name}", candidates, results)
    return 0 if all(isinstance(result, Artifact) for result in results) else 1


def build_candidates(
    candidates: Sequence[Candidate],
    policy: Policy,
    *,
    jobs: int | None,
    title: str,
    quiet: bool,
) -> list[Built]:
    """Build candidates for a policy's target with the present toolchain and store, showing progress."""
    settings = current()
    with progress(quiet=quiet) as show:
        return build(
            [render(candidate) for candidate in candidates],
            BuildTarget(arch=policy.build_arch),
            toolchain=find_toolchain(settings),
            store=default_store(settings),
            jobs=jobs or settings.jobs,
            progress=lambda done, total, name, _seconds: show(title, done, total, name),
        )


def result_json(candidate: Candidate, result: Built) -> dict[str, object]:
    """What became of one candidate, for ``--json``."""
    if isinstance(result, Artifact):
        outcome: dict[str, object] = {"kind": "ok", "reason": "", "log": ""}
        return {
            "name": candidate.name,
            "outcome": outcome,
            "path": str(result.path),
            **result.to_json(),
        }
    return {"name": candidate.name, "outcome": result.to_json(), "path": None}


def print_results(title: str, candidates: Sequence[Candidate], results: Sequence[Built]) -> None:
    """Print what the compiler says of each candidate."""
    rows = []
    for candidate, result in zip(candidates, results, strict=True):
        if isinstance(result, Artifact):
            report = result.report
            spills = spilled_bytes(report)
            loop = {True: "yes", False: "no", None: "not looked at"}[report.loop_spills]
            rows.append(
                [
                    candidate.name,
                    str(report.registers),
                    str(spills),
                    loop,
                    str(report.stack_bytes),
                    f"{result.build_seconds:.1f}",
                    str(result.path),
                ]
            )
        else:
            why = f"{result.kind}: {result.reason}" + (f" ({result.log})" if result.log else "")
            rows.append([candidate.name, "-", "-", "-", "-", "-", why])
    headings = [
        "candidate",
        "registers",
        "spills B",
        "in the loop",
        "stack B",
        "seconds",
        "library",
    ]
    print_table(title, headings, rows)


def register_warmup(commands: Commands) -> None:
    """Add the command ``warmup``."""
    parser = commands.add_parser(
        "warmup",
        help="build the kernels that a call would use, so that the first call need not",
        description=(
            "Build the kernel that serves a problem, tuned or not, ahead of its first call; for training, "
            "--direction step builds the forward and the backward one."
        ),
    )
    add_problem(parser, step=True)
    add_json(parser)
    parser.set_defaults(run=run_warmup)


def run_warmup(arguments: argparse.Namespace) -> int:
    """Build the picks; fails when one did not compile."""
    problems, policy = problems_of(arguments), policy_of(arguments)
    picks = [lookup(problem, policy) for problem in problems]
    results = build_candidates(
        [pick.candidate for pick in picks],
        policy,
        jobs=None,
        title="warmup",
        quiet=arguments.json,
    )
    rows = list(zip(problems, picks, results, strict=True))
    if arguments.json:
        print_json(
            {
                "arch": policy.name,
                "kernels": [
                    {
                        "problem": problem_json(problem),
                        "layer": pick.layer,
                        **result_json(pick.candidate, result),
                    }
                    for problem, pick, result in rows
                ],
            }
        )
    else:
        for problem, pick, result in rows:
            title = f"{problem.describe()} on {policy.spec.name}"
            print_results(title, [pick.candidate], [result])
            print_line(f"picked by: {pick.layer}")
    return 0 if all(isinstance(result, Artifact) for result in results) else 1
