"""The command ``tune``: find the fastest kernel for a problem and remember it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ..arch import resolve
from ..core.identity import values_of
from ..core.problem import Problem
from ..serving.dispatch import lookup
from ..serving.searching import tune, tune_problems, tune_step
from ..tuning.listed import bucket_cost
from ..tuning.ranks import launched_group
from ..tuning.result import TuneResult
from ..tuning.step import StepResult
from . import options
from .bring_up_report import print_picks
from .console import cell, microseconds, named, print_json, print_line, print_table, search_progress
from .main_job import TOP_K, run_all, search_options
from .options import FAILED, INTERRUPTED, OK
from .results import print_result, result_json


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    option = parser.add_argument_group("search").add_argument
    option("--effort", choices=("none", "quick", "full"), help="default: the setting")
    names = ("--budget", "--budget-seconds")
    option(*names, type=options.seconds, metavar="S", help="default: the setting")
    words = "of the backward search of a step; default: as --budget"
    option("--backward-budget", type=options.seconds, metavar="S", help=words)
    words = f"candidates beside the default; default: {TOP_K}"
    option("--top-k", type=options.positive, metavar="K", help=words)
    words = "do not ask a second process before the default is replaced"
    option("--no-confirm", action="store_true", help=words)
    words = (
        "the main job, for both directions of a shape: tune the present GPU and run the picks, or without a GPU "
        "build and rank for A100, RTX4090 and H100; not with --device-type"
    )
    option("--all", action="store_true", help=words)


@options.command("tune", options.add_step, add_search, options.add_problems)
def run_tune(arguments: argparse.Namespace) -> int:
    """Build, check and measure the best candidates, and record the fastest.

    Search for the fastest kernel of a problem, or with --direction step for the fastest forward and backward kernels
    of a shape. Without a GPU the search ends after the build, with a ranking by the cost model. Ctrl-C keeps the best
    so far. Started by torchrun, all ranks share one search, each on its GPU; of the problems of a file each rank takes
    its share.
    """
    listed = options.listed_problems(arguments)
    if listed is not None:
        return tune_list(arguments, listed)
    if arguments.all:
        if arguments.device_type is not None:
            arguments.usage_error("--all chooses the GPUs itself; leave out --device-type")
        arguments.direction = options.STEP  # whatever it says: the main job is about both
        return run_all(arguments)
    problem, policy = options.problem_of(arguments), resolve(arguments.device_type)
    find: Callable[..., TuneResult | StepResult] = tune
    budget = {}
    if arguments.direction == options.STEP:
        find, budget = tune_step, {"backward_budget_seconds": arguments.backward_budget}
    elif arguments.backward_budget is not None:
        arguments.usage_error("--backward-budget is for --direction step and for --all")
    with launched_group() as group, search_progress(arguments) as listener:
        result = find(problem, policy, group=group, **budget, **search_options(arguments, listener))
        leads = group is None or group.rank() == 0
    if not leads:
        return INTERRUPTED if result.interrupted else OK
    if arguments.json:
        print_json(result_json(result))
    else:
        print_result(result, policy.spec.name)
    return INTERRUPTED if result.interrupted else OK


def tune_list(arguments: argparse.Namespace, problems: Sequence[Problem]) -> int:
    """Tune the problems of a file; of several ranks each its share, on its GPU."""
    policy = resolve(arguments.device_type)
    with launched_group() as group, search_progress(arguments) as listener:
        mine = problems if group is None else problems[group.rank() :: group.size()]
        result = tune_problems(mine, policy, budget_seconds=arguments.budget, listener=listener)
    if arguments.json:
        print_json(result.to_json())
    else:
        print_picks(result)
        if result.exhausted:
            print_line("the budget was spent: the next run goes on from there")
    if result.interrupted:
        return INTERRUPTED
    return FAILED if any(row.status == "failed" for row in result.settled) else OK


def add_bucket(parser: argparse.ArgumentParser) -> None:
    """Add the options of the report on a bucket."""
    words = f"candidates at each length beside the default and the pick; default: {TOP_K}"
    parser.add_argument("--top-k", type=options.positive, default=TOP_K, metavar="K", help=words)


@options.command("bucket", options.add_problem, add_bucket)
def run_bucket(arguments: argparse.Namespace) -> int:
    """Measure what the pick of a problem's bucket costs at other lengths inside it.

    Race the pick that serves a problem at five lengths of its bucket, each against the best candidates for that length.
    Defaults and shipped picks of attention's forward serve their own lengths alone. Needs a GPU; records nothing.
    """
    problem, policy = options.problem_of(arguments), resolve(arguments.device_type)
    pick = lookup(problem, policy)
    with search_progress(arguments) as listener:
        costs = bucket_cost(
            problem, pick.candidate, policy, top_k=arguments.top_k, listener=listener
        )
    if arguments.json:
        said = {"problem": values_of(problem), "arch": policy.name, "layer": pick.layer}
        print_json(
            {**said, "pick": pick.candidate.name, "lengths": [asdict(cost) for cost in costs]}
        )
        return OK
    rows = []
    for cost in costs:
        lengths, times = (cost.seqlen_q, cost.seqlen_k), (cost.pick_us, cost.best_us)
        shares = [x if x is None else 100 * x for x in (cost.cost, cost.low, cost.high)]
        figures = [*map(str, lengths), *map(microseconds, times), *(cell(x, ".1f") for x in shares)]
        best = "the pick" if cost.best == pick.candidate.name else named(cost.best)
        rows.append([*figures, best])
    print_table(
        f"{problem.bucketed().describe()} on {policy.spec.name}: {named(pick.candidate.name)}, picked by {pick.layer}",
        ["seqlen", "keys", "pick us", "best us", "cost %", "from", "to", "best"],
        rows,
    )
    return OK
