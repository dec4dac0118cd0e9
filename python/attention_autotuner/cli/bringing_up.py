"""The command ``bring-up``: measure a GPU that nobody described, and tune it."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .. import settings as settings_module
from ..arch.measured_specs import LIMITS, checked_number
from ..arch.policy import Policy
from ..arch.probe import DeviceProperties, probe, properties_from_json
from ..arch.resolution import from_properties
from ..arch.spec import ArchSpec
from ..codegen.jobs import available_cores
from ..core.outcome import Outcome
from ..core.problem import DTYPES
from ..core.trust import parse_json
from ..errors import ArchSpecError
from ..tuning.bring_up import BUDGET_SECONDS, Machine, bring_up
from ..tuning.peaks import SECONDS
from ..tuning.sweep_plan import expectation, make_plan
from ..tuning.sweeps import default_sweep, only
from .bring_up_report import print_dry_run, print_report
from .console import print_json, search_progress
from .making import build_candidates
from .options import FAILED, INTERRUPTED, OK, add_jobs, command, dtype, positive, seconds

# The fields of a spec that a properties file may give beside a device's limits.
RATES = tuple(
    item.name for item in fields(ArchSpec) if item.type == "float" and item.name not in LIMITS
)


def add_bring_up(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("--output", type=Path, metavar="DIR", help="folder for the files; default: in the cache")
    time: dict[str, Any] = {"type": seconds, "metavar": "S"}
    option("--budget-seconds", default=BUDGET_SECONDS, help="wall time of all of it", **time)
    names = ("--peak-seconds", "--ceiling-seconds")
    option(*names, default=SECONDS, help="of timing for each peak", **time)
    words = "the problems of the sweep that are described by these words, e.g. forward d64"
    option("--only", nargs="+", default=[], metavar="WORD", help=words)
    option(
        "--dtype",
        type=dtype,
        choices=DTYPES,
        default=DTYPES[0],
        help="dtype of the sweep's problems",
    )
    add_jobs(parser)
    option("--again", action="store_true", help="measure what was measured before, too")
    option = parser.add_argument_group("without a GPU").add_argument
    option("--dry-run", action="store_true", help="say what would be done, and end")
    words = "of a dry run: the GPU's properties as JSON; default: the present GPU's"
    option("--properties", type=Path, metavar="FILE", help=words)
    words = "of a dry run: build the first N kernels"
    option("--compile", type=positive, metavar="N", help=words)


@command("bring-up", add_bring_up)
def run_bring_up(arguments: argparse.Namespace) -> int:
    """Measure a new GPU's limits and peaks, and tune it.

    Probe the GPU's limits, measure its peaks, write its spec, and tune a sweep of problems under a budget. What was
    measured before is not measured again. Ctrl-C keeps what is done. The first visible GPU is taken;
    CUDA_VISIBLE_DEVICES chooses another.
    """
    changes = {} if arguments.jobs is None else {"jobs": arguments.jobs}
    with settings_module.override(**changes) as settings:
        if arguments.dry_run:
            return _dry_run(arguments, settings)
        if arguments.properties is not None or arguments.compile is not None:
            arguments.usage_error("--properties and --compile are of a --dry-run")
        problems = only(default_sweep(arguments.dtype), arguments.only)
        with search_progress(arguments) as listener:
            result = bring_up(
                Machine(settings=settings),
                problems,
                settings,
                budget_seconds=arguments.budget_seconds,
                peak_seconds=arguments.peak_seconds,
                output=arguments.output,
                again=arguments.again,
                listener=listener,
            )
    if arguments.json:
        print_json(result.to_json())
    else:
        print_report(result)
    if result.interrupted:
        return INTERRUPTED
    failed = result.sweep is None or any(row.status == "failed" for row in result.sweep.settled)
    return FAILED if failed else OK


# --- without a GPU --------------------------------------------------------------------------------


def _dry_run(arguments: argparse.Namespace, settings: settings_module.Settings) -> int:
    if arguments.properties is None:
        properties = probe(0)
        policy = from_properties(properties)
    else:
        properties, policy = read_properties(arguments.properties)
    problems = only(default_sweep(arguments.dtype), arguments.only)
    plan = make_plan(
        problems,
        policy,
        budget_seconds=arguments.budget_seconds,
        jobs=settings.jobs or available_cores(),
    )
    said: dict[str, Any] = {
        "gpu_name": properties.name,
        "policy": policy.name,
        "build_arch": policy.build_arch,
        "problems": [expectation(problem, policy) for problem in problems],
        "plan": plan.to_json(),
        "built": [],
    }
    if arguments.compile is not None:
        pools = [group.pool for group in plan.groups]
        said["built"] = _compile(pools, arguments.compile, policy, settings, quiet=arguments.json)
    if arguments.json:
        print_json(said)
    else:
        print_dry_run(said, problems, plan)
    return FAILED if any(kernel["fate"] != "ok" for kernel in said["built"]) else OK


def read_properties(path: Path) -> tuple[DeviceProperties, Policy]:
    """A GPU that is elsewhere, from a file of its properties and, if it likes, of its rates.

    Raises:
        ArchSpecError: the file cannot be read, or a field is missing, unknown or outside its limits.
        UnsupportedArchitectureError: the GPU is older than 8.0.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArchSpecError(f"cannot read the properties {path}: {error}") from error
    if not isinstance(data, dict):
        raise ArchSpecError(f"{path}: properties are a JSON object, got {type(data).__name__}")
    known = {item.name for item in fields(DeviceProperties)}
    others = {name: value for name, value in data.items() if name not in known}
    for name in others:
        if name not in RATES:
            raise ArchSpecError(f"{path}: {name} is neither a property nor a rate of a spec")
    try:
        rates: dict[str, Any] = {
            name: checked_number(name, value) for name, value in others.items()
        }
        properties = properties_from_json(data)
    except ArchSpecError as error:
        raise ArchSpecError(f"{path}: {error}") from error
    policy = from_properties(properties)
    if rates:
        policy = type(policy)(replace(policy.spec, **rates))
    return properties, policy


def _compile(
    pools: list[Any], count: int, policy: Policy, settings: settings_module.Settings, *, quiet: bool
) -> list[dict[str, Any]]:
    """Build the first kernels: every class's first before any class's second."""
    longest = max(map(len, pools))
    in_turn = [pool[place] for place in range(longest) for pool in pools if place < len(pool)]
    chosen = list(dict.fromkeys(in_turn))[:count]
    results = build_candidates(chosen, policy, jobs=settings.jobs, quiet=quiet)
    return [
        {
            "name": candidate.name,
            "fate": f"{result.kind}: {result.reason}" if isinstance(result, Outcome) else "ok",
            "path": None if isinstance(result, Outcome) else str(result.path),
        }
        for candidate, result in zip(chosen, results, strict=True)
    ]
