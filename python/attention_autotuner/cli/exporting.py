"""The command ``export``: picks and their kernels as a folder or a wheel that needs no compiler."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..arch import Policy, resolve
from ..codegen.artifact import Artifact
from ..codegen.bundle import Bundle, BundledPick, check_output, write_bundle
from ..codegen.entries import LIBRARY
from ..codegen.kernel_wheel import write_wheel
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..errors import BuildError
from ..serving import exports
from ..serving.picks import CacheHierarchy
from ..serving.untuned import read_problems
from ..settings import current
from .console import print_json, print_line, print_table
from .making import build_candidates
from .options import add_jobs, add_problem, command, defaults_of, problems_of


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the options, those of a problem without their defaults."""
    add_problem(parser, step=True)
    defaults = defaults_of(parser)
    # Unset, so that options that were given can be told from those that were not.
    parser.set_defaults(**dict.fromkeys(defaults))
    option = parser.add_argument
    option("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    words = "problems as JSON, a list or one on each line, fields as in --json"
    option("--problems", type=Path, metavar="FILE", help=words)
    words = "as the driver gives it, where records know several GPUs"
    option("--gpu-name", metavar="NAME", help=words)
    words = "write a wheel into the folder: shipped picks and defaults of the common classes"
    option("--bundle", action="store_true", help=words)
    option("--force", action="store_true", help="replace a bundle that is there")
    add_jobs(parser)
    parser.set_defaults(problem_defaults=defaults)


@command("export", add_export)
def run_export(arguments: argparse.Namespace) -> int:
    """Write picks and their built kernels to a folder or a wheel that needs no compiler.

    Write a bundle: for each problem the pick that a call would get, the default for the rest of its kind, and their
    built kernels. Without problem options: the common classes of attention, and every problem of your own records.
    The GPU need not be present.
    """
    policy, hierarchy = resolve(arguments.device_type), CacheHierarchy(current())
    environment = exports.environment_of(policy, hierarchy, arguments.gpu_name)
    problems, wheel, output = _problems(arguments), arguments.bundle, arguments.output
    if problems is None and wheel:
        problems = exports.common_problems(exports.SHAPES[:1])
    elif problems is None:
        records = exports.own_records(policy, hierarchy, environment)
        problems = [*(record.problem for record in records), *exports.common_problems()]
    picks = exports.choose_picks(
        problems, policy, hierarchy, environment, with_records=not wheel, lean=wheel
    )
    if wheel:
        output.mkdir(parents=True, exist_ok=True)
    else:
        check_output(output, force=arguments.force)
    artifacts = _build(arguments, policy, picks)
    export = partial(
        write_bundle,
        arch=policy.name,
        build_arch=policy.build_arch,
        artifacts=artifacts,
        picks=picks,
        environment=environment.to_json() if environment.num_sms is not None else None,
        force=arguments.force,
    )
    if not wheel:
        _report(arguments, export(output), picks, {"bundle": str(output.absolute())})
        return 0
    with tempfile.TemporaryDirectory(dir=output, prefix=".export.") as folder:
        bundle = export(Path(folder) / "bundle")
        path = write_wheel(bundle, policy.spec.name, output.absolute())
        written = {"wheel": str(path), "wheel_bytes": path.stat().st_size}
        _report(arguments, bundle, picks, written)
    return 0


def _problems(arguments: argparse.Namespace) -> Sequence[Problem] | None:
    """The problems that the options name; None leaves them to the command."""
    defaults: dict[str, Any] = arguments.problem_defaults
    if arguments.problems is not None:
        return read_problems(arguments.problems)
    set_here = {name: value for name, value in vars(arguments).items() if value is not None}
    if set_here.keys().isdisjoint(defaults):
        return None
    return problems_of(argparse.Namespace(**{**defaults, **set_here}))


def _build(
    arguments: argparse.Namespace, policy: Policy, picks: Sequence[BundledPick]
) -> dict[Candidate, Artifact]:
    """The kernel of every pick, built where the store lacks it.

    Raises:
        BuildError: some do not compile.
    """
    candidates = list(dict.fromkeys(pick.candidate for pick in picks))
    results = build_candidates(candidates, policy, jobs=arguments.jobs, quiet=arguments.json)
    pairs = list(zip(candidates, results, strict=True))
    failed = [f"{c.name}: {r.kind}: {r.reason}" for c, r in pairs if not isinstance(r, Artifact)]
    if failed:
        raise BuildError(
            f"nothing is exported: {len(failed)} of {len(candidates)} kernels do not build: {'; '.join(failed)}"
        )
    return {candidate: result for candidate, result in pairs if isinstance(result, Artifact)}


def _report(
    arguments: argparse.Namespace,
    bundle: Bundle,
    picks: Sequence[BundledPick],
    written: dict[str, Any],
) -> None:
    layers = Counter(pick.layer for pick in picks)
    measured = [pick for pick in picks if pick.layer != "default"]
    proven = sum(pick.proof is not None for pick in measured)
    size = sum((kernel.folder / LIBRARY).stat().st_size for kernel in bundle.kernels)
    if arguments.json:
        counts = {"kernels": len(bundle.kernels), "kernel_bytes": size, "picks": dict(layers)}
        counts |= {"measured": len(measured), "proven": proven}
        print_json({**written, "arch": bundle.arch, **counts})
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
    if measured:
        print_line(f"proofs: of {proven} of {len(measured)} measured picks")
    wheel_bytes = written.get("wheel_bytes")
    if wheel_bytes is None:
        print_line(f"bundle: {written['bundle']}")
    else:
        print_line(f"wheel: {written['wheel']}, {wheel_bytes / 2**20:,.1f} MiB")
