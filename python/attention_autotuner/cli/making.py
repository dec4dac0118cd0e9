"""Commands that compile: ``build`` and ``warmup``. They need a compiler and no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..arch import Policy, resolve
from ..codegen.artifact import Artifact, BuildTarget
from ..codegen.build import build
from ..codegen.render import render
from ..codegen.store import default_store
from ..codegen.toolchain import find_toolchain
from ..core.candidate import Candidate
from ..core.identity import values_of
from ..core.outcome import BuildFailed, Outcome, TimedOut
from ..serving.dispatch import lookup
from ..serving.untuned import refuse_untuned
from ..settings import current
from ..tuning.spills import spilled_bytes
from . import options
from .console import named, print_json, print_line, print_table, progress
from .options import FAILED, OK

Built = Artifact | Outcome
# A kernel takes seconds, a hung compiler for ever.
COMPILE_SECONDS = 1800.0


RETRIED = "compile again what is remembered to have failed"
add_retry = options.option("--retry", action="store_true", help=RETRIED)


@options.command("build", options.add_problem, options.add_choice, options.add_jobs, add_retry)
def run_build(arguments: argparse.Namespace) -> int:
    """Compile candidates and print what the compiler says of them.

    Compile candidates into the kernel cache; what is there already is not compiled again.
    """
    problem, policy = options.problem_of(arguments), resolve(arguments.device_type)
    candidates = [candidate for candidate, _ in options.chosen(arguments, problem, policy)]
    results = build_candidates(
        candidates, policy, jobs=arguments.jobs, quiet=arguments.json, retry=arguments.retry
    )
    if arguments.json:
        kernels = [result_json(*pair) for pair in zip(candidates, results, strict=True)]
        asked = {"problem": values_of(problem), "arch": policy.name}
        print_json({**asked, "kernels": kernels})
    else:
        print_results(f"{problem.describe()} on {policy.spec.name}", candidates, results)
        print_end(results)
    return status_of(results)


def build_candidates(
    candidates: Sequence[Candidate],
    policy: Policy,
    *,
    jobs: int | None,
    quiet: bool,
    retry: bool = False,
) -> list[Built]:
    """Build candidates for a policy's target with the present toolchain and store, showing progress."""
    settings = current()
    with progress(quiet=quiet) as show:
        show("build", 0, len(candidates))  # compilers are silent until the first is done
        return build(
            [render(candidate) for candidate in candidates],
            BuildTarget(arch=policy.build_arch),
            toolchain=find_toolchain(settings),
            store=default_store(settings),
            jobs=jobs or settings.jobs,
            progress=lambda done, total, name, _seconds: show("build", done, total, name),
            timeout_seconds=COMPILE_SECONDS,
            retry_failed=retry,
        )


def status_of(results: Sequence[Built]) -> int:
    """The exit status of a command that built these."""
    return OK if all(isinstance(result, Artifact) for result in results) else FAILED


def result_json(candidate: Candidate, result: Built) -> dict[str, object]:
    """The outcome of one candidate, for ``--json``."""
    if isinstance(result, Artifact):
        outcome: dict[str, object] = {"kind": "ok", "reason": "", "log": ""}
        path = str(result.path)
        return {"name": candidate.name, "outcome": outcome, "path": path, **result.to_json()}
    return {"name": candidate.name, "outcome": result.to_json(), "path": None}


def print_results(title: str, candidates: Sequence[Candidate], results: Sequence[Built]) -> None:
    """Print the compiler's report on each candidate."""
    rows, notes = [], []
    for candidate, result in zip(candidates, results, strict=True):
        name = named(candidate.name)
        if isinstance(result, Artifact):
            report = result.report
            loop = {True: "yes", False: "no", None: "not looked at"}[report.loop_spills]
            figures = [str(report.registers), str(spilled_bytes(report)), loop]
            figures += [str(report.stack_bytes), f"{result.build_seconds:.1f}", str(result.path)]
        else:
            figures = ["-"] * 6
            log = f" ({result.log})" if result.log else ""
            notes.append((name, f"{result.kind}: {result.reason}{log}"))
        rows.append([name, *figures])
    columns = ["candidate", "regs", "spills B", "in the loop", "stack B", "seconds", "library"]
    print_table(title, columns, rows, rare=("library",), notes=notes)


def print_end(results: Sequence[Built]) -> None:
    """Print once the folder that built kernels lie in, each in a folder of its name, and how to retry others."""
    built = [result.path for result in results if isinstance(result, Artifact)]
    if built:
        print_line(f"kernels: {len(built)} in {built[0].parent.parent}")
    if any(isinstance(result, (BuildFailed, TimedOut)) for result in results):
        print_line("a failed build is remembered; `build --retry` compiles it again")


@options.command("warmup", options.add_step, options.add_problems)
def run_warmup(arguments: argparse.Namespace) -> int:
    """Build the kernels that a call would use, so that the first call need not.

    Build the kernel that serves a problem, tuned or not, ahead of its first call; for training, --direction step
    builds the forward and the backward one. --problems takes them from a file.
    """
    problems = options.listed_problems(arguments) or options.problems_of(arguments)
    policy = resolve(arguments.device_type)
    picks = [lookup(problem, policy) for problem in problems]
    for problem, pick in zip(problems, picks, strict=True):
        if pick.layer == "default":
            refuse_untuned(problem, policy.name, current())
    candidates = [pick.candidate for pick in picks]
    results = build_candidates(candidates, policy, jobs=None, quiet=arguments.json)
    rows = list(zip(problems, picks, results, strict=True))
    if arguments.json:
        kernels = [
            {"problem": values_of(problem), "layer": pick.layer}
            | result_json(pick.candidate, result)
            for problem, pick, result in rows
        ]
        print_json({"arch": policy.name, "kernels": kernels})
    else:
        for problem, pick, result in rows:
            title = f"{problem.describe()} on {policy.spec.name}"
            print_results(title, [pick.candidate], [result])
            print_line(f"picked by: {pick.layer}")
        print_end(results)
    return status_of(results)
