"""The command ``export``: picks and their kernels as a folder or a wheel that needs no compiler."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..arch import Policy
from ..codegen.artifact import Artifact
from ..codegen.bundle import Bundle, BundledPick, check_output, write_bundle
from ..codegen.entries import LIBRARY
from ..codegen.kernel_wheel import write_wheel
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..errors import BuildError
from ..serving.exports import (
    SHAPES,
    choose_picks,
    common_problems,
    environment_of,
    own_records,
    read_problems,
)
from ..serving.picks import CacheHierarchy
from ..settings import current
from ..tuning.environment import Environment
from .console import print_json, print_line, print_table
from .making import build_candidates
from .options import Commands, add_command, add_jobs, add_problem, policy_of, problems_of


def register_export(commands: Commands) -> None:
    """Add the command ``export``."""
    parser = add_command(
        commands,
        "export",
        run_export,
        "write picks and their built kernels to a folder or a wheel that needs no compiler",
        "Write a bundle: for each problem the pick that a call would get, the default for the rest of its kind, "
        "and their built kernels. Without problem options: the common classes of attention, and every problem of "
        "your own records. The GPU need not be present.",
    )
    output = vars(parser.parse_args([]))
    add_problem(parser, step=True)
    defaults = {
        name: value
        for name, value in vars(parser.parse_args([])).items()
        if name not in output and name != "device_type"
    }
    # Unset, so that options that were given can be told from those that were not.
    parser.set_defaults(**dict.fromkeys(defaults))
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--problems", type=Path, metavar="FILE", help="a JSON list of problems, fields as in --json"
    )
    parser.add_argument(
        "--gpu-name", metavar="NAME", help="as the driver gives it, where records know several GPUs"
    )
    parser.add_argument(
        "--bundle",
        action="store_true",
        help="write a wheel into the folder: shipped picks and defaults of the common classes",
    )
    parser.add_argument("--force", action="store_true", help="replace a bundle that is there")
    add_jobs(parser)
    parser.set_defaults(problem_defaults=defaults)


def run_export(arguments: argparse.Namespace) -> int:
    """Build what is missing, and write the bundle or the wheel."""
    policy, hierarchy = policy_of(arguments), CacheHierarchy(current())
    environment = environment_of(policy, hierarchy, arguments.gpu_name)
    problems = _problems(arguments)
    if arguments.bundle:
        problems = common_problems(SHAPES[:1]) if problems is None else problems
        picks = choose_picks(
            problems, policy, hierarchy, environment, with_records=False, lean=True
        )
        return _export_wheel(arguments, policy, picks, environment)
    if problems is None:
        recorded = [record.problem for record in own_records(policy, hierarchy, environment)]
        problems = [*recorded, *common_problems()]
    picks = choose_picks(problems, policy, hierarchy, environment)
    check_output(arguments.output, force=arguments.force)
    bundle = _export(arguments, arguments.output, policy, picks, environment)
    _report(arguments, bundle, picks, {"bundle": str(arguments.output.absolute())})
    return 0


def _problems(arguments: argparse.Namespace) -> Sequence[Problem] | None:
    """The problems that the options name; None leaves them to the command."""
    defaults: dict[str, Any] = arguments.problem_defaults
    if arguments.problems is not None:
        return read_problems(arguments.problems)
    if all(getattr(arguments, name) is None for name in defaults):
        return None
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return problems_of(arguments)


def _export(
    arguments: argparse.Namespace,
    output: Path,
    policy: Policy,
    picks: Sequence[BundledPick],
    environment: Environment,
) -> Bundle:
    return write_bundle(
        output,
        arch=policy.name,
        build_arch=policy.build_arch,
        artifacts=_build(arguments, policy, picks),
        picks=picks,
        environment=environment.to_json() if environment.num_sms is not None else None,
        force=arguments.force,
    )


def _export_wheel(
    arguments: argparse.Namespace,
    policy: Policy,
    picks: Sequence[BundledPick],
    environment: Environment,
) -> int:
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.output, prefix=".export.") as folder:
        bundle = _export(arguments, Path(folder) / "bundle", policy, picks, environment)
        wheel = write_wheel(bundle, policy.spec.name, arguments.output.absolute())
        _report(
            arguments, bundle, picks, {"wheel": str(wheel), "wheel_bytes": wheel.stat().st_size}
        )
    return 0


def _build(
    arguments: argparse.Namespace, policy: Policy, picks: Sequence[BundledPick]
) -> dict[Candidate, Artifact]:
    """The kernel of every pick, built where the store lacks it.

    Raises:
        BuildError: some do not compile.
    """
    candidates = list(dict.fromkeys(pick.candidate for pick in picks))
    results = build_candidates(candidates, policy, jobs=arguments.jobs, quiet=arguments.json)
    built, failed = {}, []
    for candidate, result in zip(candidates, results, strict=True):
        if isinstance(result, Artifact):
            built[candidate] = result
        else:
            failed.append(f"{candidate.name}: {result.kind}: {result.reason}")
    if failed:
        raise BuildError(
            f"nothing is exported: {len(failed)} of {len(candidates)} kernels do not build: {'; '.join(failed)}"
        )
    return built


def _report(
    arguments: argparse.Namespace,
    bundle: Bundle,
    picks: Sequence[BundledPick],
    written: dict[str, Any],
) -> None:
    layers = Counter(pick.layer for pick in picks)
    size = sum((kernel.folder / LIBRARY).stat().st_size for kernel in bundle.kernels)
    if arguments.json:
        print_json(
            {
                **written,
                "arch": bundle.arch,
                "kernels": len(bundle.kernels),
                "kernel_bytes": size,
                "picks": dict(layers),
            }
        )
        return
    kinds = Counter(
        (c.op, c.direction, c.dtype, f"{c.padded_dim_qk}/{c.padded_dim_v}")
        for c in (kernel.candidate for kernel in bundle.kernels)
    )
    rows = [[*kind, str(count)] for kind, count in sorted(kinds.items())]
    print_table(
        f"{len(bundle.kernels)} kernels, {size / 2**20:,.1f} MiB, policy {bundle.arch}",
        ["op", "direction", "dtype", "class", "kernels"],
        rows,
    )
    print_line("picks: " + ", ".join(f"{count} {layer}" for layer, count in layers.items()))
    wheel_bytes = written.get("wheel_bytes")
    if wheel_bytes is None:
        print_line(f"bundle: {written['bundle']}")
    else:
        print_line(f"wheel: {written['wheel']}, {wheel_bytes / 2**20:,.1f} MiB")
