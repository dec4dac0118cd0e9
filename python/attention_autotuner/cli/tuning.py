"""The command ``tune``: find the fastest kernel for a problem and remember it."""

from __future__ import annotations

import argparse

from ..serving.dispatch import tune, tune_step
from .console import print_json, progress
from .main_job import TOP_K, run_all, search_options
from .options import (
    STEP,
    Commands,
    add_command,
    add_problem,
    policy_of,
    positive,
    problem_of,
    seconds,
)
from .results import print_result, print_step, result_json, step_json
from .status import INTERRUPTED, OK


def register_tune(commands: Commands) -> None:
    """Add the command ``tune``."""
    parser = add_command(
        commands,
        "tune",
        run_tune,
        "build, check and measure the best candidates, and record the fastest",
        "Search for the fastest kernel of a problem, or with --direction step for the fastest forward and backward "
        "kernels of a shape. Without a GPU the search ends after the build, with a ranking by the cost model. "
        "Ctrl-C keeps the best so far.",
    )
    add_problem(parser, step=True)
    option = parser.add_argument_group("search").add_argument
    option("--effort", choices=("none", "quick", "full"), help="default: the setting")
    option(
        "--budget",
        "--budget-seconds",
        type=seconds,
        metavar="S",
        help="default: the setting",
    )
    option(
        "--backward-budget",
        type=seconds,
        metavar="S",
        help="of the backward search of a step; default: as --budget",
    )
    option(
        "--top-k",
        type=positive,
        metavar="K",
        help=f"candidates beside the default; default: {TOP_K}",
    )
    option(
        "--no-confirm",
        action="store_true",
        help="do not ask a second process before the default is replaced",
    )
    option(
        "--all",
        action="store_true",
        help="the main job, for both directions of a shape: tune the present GPU and run the picks, or without a GPU "
        "build and rank for A100, RTX4090 and H100; not with --device-type",
    )


def run_tune(arguments: argparse.Namespace) -> int:
    """Search and print the ranking, or those of a step."""
    if arguments.all:
        if arguments.device_type is not None:
            arguments.usage_error("--all chooses the GPUs itself; leave out --device-type")
        arguments.direction = STEP  # whatever it says: the main job is about both
        return run_all(arguments)
    if arguments.direction == STEP:
        return _run_step(arguments)
    if arguments.backward_budget is not None:
        arguments.usage_error("--backward-budget is for --direction step and for --all")
    problem, policy = problem_of(arguments), policy_of(arguments)
    with progress(quiet=arguments.json) as show:
        result = tune(problem, policy, **search_options(arguments, show))
    if arguments.json:
        print_json(result_json(result))
    else:
        print_result(result)
    return INTERRUPTED if result.interrupted else OK


def _run_step(arguments: argparse.Namespace) -> int:
    problem, policy = problem_of(arguments), policy_of(arguments)
    with progress(quiet=arguments.json) as show:
        result = tune_step(
            problem,
            policy,
            backward_budget_seconds=arguments.backward_budget,
            **search_options(arguments, show),
        )
    if arguments.json:
        print_json(step_json(result))
    else:
        print_step(result)
    return INTERRUPTED if result.interrupted else OK
