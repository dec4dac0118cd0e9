"""The command ``tune``: find the fastest kernel for a problem and remember it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..serving.searching import tune, tune_step
from ..tuning.ranks import launched_group
from ..tuning.result import TuneResult
from ..tuning.step import StepResult
from .console import print_json, search_progress
from .main_job import TOP_K, run_all, search_options
from .options import STEP, add_step, command, policy_of, positive, problem_of, seconds
from .results import print_result, result_json
from .status import INTERRUPTED, OK


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    option = parser.add_argument_group("search").add_argument
    option("--effort", choices=("none", "quick", "full"), help="default: the setting")
    names = ("--budget", "--budget-seconds")
    option(*names, type=seconds, metavar="S", help="default: the setting")
    words = "of the backward search of a step; default: as --budget"
    option("--backward-budget", type=seconds, metavar="S", help=words)
    words = f"candidates beside the default; default: {TOP_K}"
    option("--top-k", type=positive, metavar="K", help=words)
    words = "do not ask a second process before the default is replaced"
    option("--no-confirm", action="store_true", help=words)
    words = (
        "the main job, for both directions of a shape: tune the present GPU and run the picks, or without a GPU "
        "build and rank for A100, RTX4090 and H100; not with --device-type"
    )
    option("--all", action="store_true", help=words)


@command("tune", add_step, add_search)
def run_tune(arguments: argparse.Namespace) -> int:
    """Build, check and measure the best candidates, and record the fastest.

    Search for the fastest kernel of a problem, or with --direction step for the fastest forward and backward kernels
    of a shape. Without a GPU the search ends after the build, with a ranking by the cost model. Ctrl-C keeps the best
    so far. Started by torchrun, all ranks share one search, each on its GPU.
    """
    if arguments.all:
        if arguments.device_type is not None:
            arguments.usage_error("--all chooses the GPUs itself; leave out --device-type")
        arguments.direction = STEP  # whatever it says: the main job is about both
        return run_all(arguments)
    problem, policy = problem_of(arguments), policy_of(arguments)
    find: Callable[..., TuneResult | StepResult] = tune
    budget = {}
    if arguments.direction == STEP:
        find, budget = tune_step, {"backward_budget_seconds": arguments.backward_budget}
    elif arguments.backward_budget is not None:
        arguments.usage_error("--backward-budget is for --direction step and for --all")
    with launched_group() as group, search_progress(arguments) as show:
        result = find(problem, policy, group=group, **budget, **search_options(arguments, show))
        leads = group is None or group.rank() == 0
    if not leads:
        return INTERRUPTED if result.interrupted else OK
    if arguments.json:
        print_json(result_json(result))
    else:
        print_result(result)
    return INTERRUPTED if result.interrupted else OK
