"""The main job, ``tune --all``, which ``make tune`` runs: all that this machine can do for one training step.

The other operations join with a small step each, of few builds.

With a GPU: tune both directions, then call ``flash_attn_func`` and its gradient on real input and check the answers.
Without one: generate, build and rank for each architecture, look for spills in the main loops, and say what was left
out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..arch import Policy, detect
from ..core.identity import values_of
from ..core.outcome import Ok, Outcome
from ..core.problem import Direction, Op, Problem, of_shape
from ..errors import UnsupportedArchitectureError
from ..operations.registry import OPERATIONS
from ..serving.searching import tune, tune_step
from ..tuning.progress import Listener
from ..tuning.result import TuneResult
from ..tuning.spills import check_spills
from ..tuning.step import StepResult, problems_of_step
from .console import print_json, print_line, print_table, search_progress
from .options import FAILED, INTERRUPTED, OK, problem_of
from .results import artifact_of, files_of, print_result, result_json
from .serving import Served, serve

ARCHITECTURES = ("A100", "RTX4090", "H100")
TOP_K = 8  # candidates beside the default, where --top-k does not say
# Usable kernels that each architecture must come to.
MIN_BUILT: dict[Direction, int] = {"forward": 2, "backward": 1}
# Without a GPU, how many beside the default: more where the best spill. A backward kernel takes three times as long to
# build as a forward one, so few are built.
WIDTHS: dict[Direction, tuple[int, ...]] = {
    "forward": (TOP_K, 2 * TOP_K, 4 * TOP_K),
    "backward": (1, 3, TOP_K),
}
SMALL = (2, 8, 1024, 64, 64)
# A small step of each operation, of which few kernels are built.
SMALL_STEPS = tuple(
    of_shape(SMALL, op=name, mask=mask, direction="backward", causal=rules.is_causal(mask))
    for name, rules in ((name, operation.semantics) for name, operation in OPERATIONS.items())
    if (mask := rules.small_step) is not None
)
SMALL_TOP_K = 2  # beside the default, where there is a GPU to choose with
SMALL_BUDGET_SECONDS = 60.0  # of each direction of a small step
SMALL_ARCHITECTURES = ("RTX4090", "H100")  # the least and the most shared memory
LEFT_OUT = (
    "left out, for want of a GPU: checking the kernels against the reference, measuring them, recording a pick, and "
    "running flash_attn_func and its gradient on one"
)


@dataclass
class Finished:
    """The end of the main job.

    Attributes:
        results: the searches, in the order they ran.
        interrupted: stopped by Ctrl-C.
        step: the step that was tuned, where there is a GPU.
        served: what ``flash_attn_func`` and its gradient gave, where there is a GPU.
    """

    results: list[TuneResult] = field(default_factory=list)
    interrupted: bool = False
    step: StepResult | None = None
    served: tuple[Served, ...] = ()


def run_all(arguments: argparse.Namespace) -> int:
    """Do what this machine can.

    Returns:
        The exit status: a failure where a served answer is wrong, an architecture has too few usable kernels, or a
        pick spills more than :func:`~..tuning.spills.check_spills` allows. Other candidates' outcomes are in the
        tables and fail nothing.
    """
    problem = problem_of(arguments)
    present: Policy | None = None
    why = ""
    try:
        present = detect()
    except UnsupportedArchitectureError as error:
        why = str(error)
        if not arguments.json:
            print_line(f"no GPU: {why.partition(';')[0]}")
            print_line(f"{LEFT_OUT}\n")
        finished = rank_everywhere(arguments, problem)
    else:
        finished = tune_and_serve(arguments, problem, present)
    unchecked = finished.interrupted or arguments.effort == "none"
    complaints = [] if unchecked else complaints_of(finished.results)
    complaints += [
        f"{tensor.name} is wrong: {tensor.reason}" for tensor in finished.served if not tensor.ok
    ]
    if arguments.json:
        print_json(
            {
                "problem": values_of(problem),
                "gpu": None if present is None else present.spec.name,
                "no_gpu": why,
                "results": [result_json(result) for result in finished.results],
                "step": None if finished.step is None else finished.step.to_json()["step"],
                "served": [tensor.to_json() for tensor in finished.served],
                "files": [path for result in finished.results for path in files_of(result)],
                "left_out": "" if present is not None else LEFT_OUT,
                "complaints": complaints,
            }
        )
    else:
        _print_end(finished.served, complaints)
    if finished.interrupted:
        return INTERRUPTED
    return FAILED if complaints else OK


def tune_and_serve(arguments: argparse.Namespace, problem: Problem, present: Policy) -> Finished:
    """Tune the present GPU for the step and run the picks on real input, then tune the small steps."""
    finished = Finished()
    for asked in (problem, *small_steps(problem)):
        with search_progress(arguments) as listener:
            options = search_options(arguments, listener)
            if asked is problem:
                options["backward_budget_seconds"] = arguments.backward_budget
            else:
                options |= {"top_k": SMALL_TOP_K, "budget_seconds": SMALL_BUDGET_SECONDS}
            step = tune_step(asked, present, **options)
        if not arguments.json:
            print_result(step)
            print_line()
        finished.results += step.results
        finished.step = finished.step or step
        finished.interrupted = step.interrupted
        if step.interrupted:
            break
        if asked is problem:
            finished.served = serve(problem)
    return finished


def small_steps(problem: Problem) -> list[Problem]:
    """A small step of every operation that a problem is not of."""
    return [small for small in SMALL_STEPS if small.op != problem.op]


def rank_everywhere(arguments: argparse.Namespace, problem: Problem) -> Finished:
    """Build and rank both directions for each architecture, then the defaults of small steps for some."""
    steps: list[tuple[tuple[str, ...], Problem]] = [(ARCHITECTURES, problem)]
    steps += [(SMALL_ARCHITECTURES, small) for small in small_steps(problem)]
    wanted = [
        (device, half)
        for devices, step in steps
        for device in devices
        for half in problems_of_step(step)
    ]
    finished = Finished()
    for device, half in wanted:
        result = search(arguments, half, device, widths=widths_of(arguments, half, problem.op))
        finished.results.append(result)
        finished.interrupted = result.interrupted
        if not arguments.json:
            print_result(result)
            print_line()
        if result.interrupted:
            break
    return finished


def widths_of(arguments: argparse.Namespace, problem: Problem, asked: Op) -> list[int]:
    """Numbers of candidates beside the default to build, more while the best spill; of a small step none."""
    if problem.op != asked:
        return [0]
    return [arguments.top_k] if arguments.top_k else list(WIDTHS[problem.direction])


def search(
    arguments: argparse.Namespace, problem: Problem, device: str, widths: Sequence[int]
) -> TuneResult:
    """Rank for one GPU; as wide as comes first, and wider while what is best spills in its main loop."""
    widths = list(widths)
    while True:
        with search_progress(arguments) as listener:
            options = search_options(arguments, listener) | {"top_k": widths.pop(0)}
            result = tune(problem, device, **options)
        done = result.interrupted or arguments.effort == "none"
        if done or not widths or not complaints_of([result]):
            return result


def search_options(arguments: argparse.Namespace, listener: Listener) -> dict[str, Any]:
    """The command line's options of a search, for :func:`~..tuning.tune`."""
    return {
        "effort": arguments.effort,
        "budget_seconds": arguments.budget,
        "top_k": arguments.top_k or TOP_K,
        "confirm": not arguments.no_confirm,
        "listener": listener,
    }


def complaints_of(results: Sequence[TuneResult]) -> list[str]:
    """Complaints about results: too few usable kernels, or a pick that spills too much."""
    complaints = []
    for result in results:
        if result.status == "recorded":
            continue
        direction = result.problem.direction
        wanted = MIN_BUILT[direction] if result.problem.semantics.small_step is None else 1
        built = [row for row in result.rows if row.artifact is not None and row.outcome.ok]
        if len(built) < wanted:
            complaints.append(
                f"{result.arch}: {len(built)} usable {direction} kernels, expected {wanted}"
            )
        outcome = _pick_outcome(result)
        if not outcome.ok:
            complaints.append(f"{result.arch}: the pick {result.pick.name}: {outcome.reason}")
    return complaints


def _pick_outcome(result: TuneResult) -> Outcome:
    """The rule on spills, asked about the pick; a search lets one that breaks it serve where nothing else can."""
    rows = [row for row in result.rows if row.candidate == result.pick]
    artifact = artifact_of(rows[0]) if rows else None
    if artifact is None:
        return Ok()
    return check_spills(result.pick, artifact.report, timed=result.status == "measured")


def _print_end(served: Sequence[Served], complaints: list[str]) -> None:
    if served:
        rows = []
        for tensor in served:
            shape = "x".join(map(str, tensor.shape))
            errors = [f"{error:.2e}" for error in (tensor.max_error, tensor.max_allowed)]
            rows.append([tensor.name, shape, *errors, "yes" if tensor.ok else "no"])
        columns = ["tensor", "shape", "max error", "allowed", "right"]
        print_table("flash_attn_func and its gradient, with the picks", columns, rows)
    for complaint in complaints:
        print_line(f"not as it should be: {complaint}")
