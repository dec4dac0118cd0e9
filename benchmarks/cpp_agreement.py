"""Do the C++ benchmarks report what Python does? One kernel, one digest, and medians that differ by noise.

``python -m benchmarks.cpp_agreement --output FILE`` builds the C++ benchmarks and the kernels that dispatch picks for
six cases on the present GPU, writes those as a bundle, and times every case by both, one after the other, several times
over. Status 1: a case was wrong, or beyond the bar; 2: there is no GPU or no compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

from attention_autotuner.arch import Policy, detect
from attention_autotuner.cli.making import build_candidates
from attention_autotuner.cli.options import positive
from attention_autotuner.codegen.artifact import Artifact
from attention_autotuner.codegen.bundle import BundledPick, write_bundle
from attention_autotuner.codegen.toolchain import Toolchain, find_toolchain
from attention_autotuner.codegen.tools import run_tool
from attention_autotuner.codegen.wheels import wheel_roots
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import Problem, of_shape
from attention_autotuner.errors import AttentionAutotunerError, BuildError, ToolchainError
from attention_autotuner.serving import dispatch
from attention_autotuner.tuning.bundled import listed_as
from attention_autotuner.tuning.environment import collect

from .results import ROOT, write

SCHEMA = 1
BAR = 0.03  # of the medians
REPEATS = 3
# Of one timing. After the warm-up's products the GPU keeps the clocks that their power left it, for some hundred
# milliseconds and another number each time: the median of this many rounds is of the kernel's own clocks.
ROUNDS = 300
# Idle time after a round, over the round's: without it the clocks of a kernel at the power limit hang on how long the
# host pauses between rounds, which is not the same in both languages.
REST = 3.0
PROGRAM_SECONDS = 300.0  # for one run of a program over its cases
PYTHON_SECONDS = 10.0  # for the rounds of one case
PROGRAMS = {
    ("attention", "forward"): "bench_attention",
    ("attention", "backward"): "bench_attention_backward",
    ("retention", "forward"): "bench_retention",
    ("retention", "backward"): "bench_retention",
}
# Long and short (from a graph), causal and not, grouped heads, both dtypes, both operations and directions.
PROBLEMS: tuple[Problem, ...] = (
    of_shape((4, 16, 4096, 128, 128)),
    replace(of_shape((4, 32, 2048, 128, 128), dtype="bf16", causal=True), heads_kv=8),
    of_shape((1, 16, 512, 64, 64)),
    of_shape((4, 16, 2048, 128, 128), direction="backward", causal=True),
    of_shape((8, 16, 4096, 128, 128), op="retention", causal=True),
    of_shape((8, 16, 4096, 128, 128), op="retention", direction="backward", causal=True),
)

# A problem, a library, rounds, rest -> microseconds.
Measure = Callable[[Problem, Path, int, float], float]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The results of both on one case.

    Attributes:
        problem: what was computed.
        kernel: name of its candidate.
        digest, cpp_digest: of the artifact, as Python and as C++ know it.
        error: what the C++ benchmark found wrong; empty where nothing is.
        warm_up: by what C++ warmed up: ``cublas``, as torch does, or ``wmma``.
        python_us, cpp_us: medians, one of every repeat.
    """

    problem: Problem
    kernel: str
    digest: str
    cpp_digest: str
    error: str
    warm_up: str
    python_us: tuple[float, ...]
    cpp_us: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """C++'s time over Python's; NaN where one is missing."""
        if not self.python_us or not self.cpp_us:
            return float("nan")
        return median(self.cpp_us) / median(self.python_us)

    @property
    def agrees(self) -> bool:
        """True where the kernel was the same and right, and the times are within the bar."""
        return not self.error and self.digest == self.cpp_digest and abs(self.ratio - 1.0) <= BAR

    def to_json(self) -> dict[str, Any]:
        """All of it, with the ratio and whether both agree."""
        ratio = None if isnan(self.ratio) else self.ratio  # JSON has no NaN
        case = {"case": self.problem.describe(), "ratio": ratio, "agrees": self.agrees}
        return {**asdict(self), **case}


def configure(folder: Path, toolchain: Toolchain, *options: str) -> None:
    """Configure the C++ benchmarks with CMake, for the GPU at hand unless options say otherwise.

    Raises:
        ToolchainError: it fails; the message ends with CMake's own words.
    """
    paths = {
        "CMAKE_MAKE_PROGRAM": toolchain.ninja,
        "CMAKE_CUDA_COMPILER": toolchain.nvcc,
        "CMAKE_CUDA_FLAGS": " ".join(toolchain.cuda_flags),
    }
    definitions = [f"-D{name}={value}" for name, value in paths.items()]
    _run(toolchain.cmake, "-G", "Ninja", "-S", ROOT, "-B", folder, *definitions, *options)


def build_programs(folder: Path, toolchain: Toolchain) -> Path:
    """Configure and build the C++ benchmarks for the GPU at hand.

    Args:
        folder: where; kept between calls, it is up to date in no time.
        toolchain: its nvcc, CMake and Ninja.

    Returns:
        The folder of the programs.

    Raises:
        ToolchainError: they do not configure or compile; the message ends with the tools' own words.
    """
    configure(folder, toolchain)
    _run(toolchain.ninja, "-C", folder)
    return folder / "benchmarks" / "cpp"


def _run(*command: str | Path) -> None:
    done = run_tool(command)
    if done.returncode != 0:
        raise ToolchainError(f"the C++ benchmarks do not build: {done.stdout[-3000:]}")


def build_kernels(candidates: Sequence[Candidate], policy: Policy) -> dict[Candidate, Artifact]:
    """Kernels for the GPU at hand, from the store or the compiler, all at once.

    Raises:
        BuildError: one does not build.
    """
    wanted = list(dict.fromkeys(candidates))
    artifacts = {}
    results = build_candidates(wanted, policy, jobs=None, quiet=True)
    for candidate, result in zip(wanted, results, strict=True):
        if not isinstance(result, Artifact):
            raise BuildError(f"{candidate.name} does not build: {result.reason}")
        artifacts[candidate] = result
    return artifacts


def run_programs(
    programs: Path,
    bundle: Path,
    problems: Sequence[Problem],
    *,
    check: bool,
    rounds: int | None = None,
    rest: float = 0.0,
) -> list[dict[str, Any]]:
    """The results of the C++ benchmarks on problems, in their order.

    Args:
        programs: folder of the programs.
        bundle: what serves the problems.
        problems: each is given to the program of its operation.
        check: hold the outputs against the formula, too.
        rounds: of each timing; the programs' own number by default.
        rest: idle time after a round, over the round's.

    Raises:
        ToolchainError: a program ends without a word on its problems, or does not end.
    """
    answers: dict[Problem, dict[str, Any]] = {}
    for name in dict.fromkeys(PROGRAMS[p.op, p.direction] for p in problems):
        mine = [p for p in problems if PROGRAMS[p.op, p.direction] == name]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            command = [str(programs / name), "--bundle", str(bundle), "--json", str(report)]
            command += ["--rest", str(rest)]
            if rounds is not None:
                command += ["--rounds", str(rounds)]
            if not check:
                command += ["--samples", "0"]
            for problem in mine:
                command += ["--problem-json", json.dumps(values_of(problem))]
            done = run_tool(command, seconds=PROGRAM_SECONDS, variables=_library_path())
            if not report.is_file():
                raise ToolchainError(f"{name} ended with {done.returncode}: {done.stdout[-2000:]}")
            results = json.loads(report.read_text(encoding="utf-8"))["results"]
        answers |= dict(zip(mine, results, strict=True))
    return [answers[problem] for problem in problems]


def _library_path() -> dict[str, str]:
    """The variable by which programs find the cuBLAS that torch came with, to warm up as torch does."""
    places = [str(root / "lib") for root in wheel_roots() if list(root.glob("lib/libcublas.so*"))]
    known = os.environ.get("LD_LIBRARY_PATH")
    path = os.pathsep.join([*([known] if known else []), *places])
    return {"LD_LIBRARY_PATH": path} if path else {}


def compare(
    problems: Sequence[Problem],
    artifacts: Sequence[Artifact],
    *,
    bundle: Path,
    programs: Path,
    measure: Measure,
    repeats: int = REPEATS,
    rounds: int = ROUNDS,
    rest: float = REST,
) -> list[Agreement]:
    """Time problems by both in turn.

    Args:
        problems: what to time.
        artifacts: the kernel of each.
        bundle: serves each of them by that kernel.
        programs: folder of the C++ benchmarks.
        measure: Python's way to time.
        repeats: how often; medians are compared.
        rounds: of each timing.
        rest: idle time after a round, over the round's.
    """
    timed = []  # of every repeat, Python's time and C++'s report of each problem
    for repeat in range(repeats):
        python_us = [
            measure(problem, artifact.path, rounds, rest)
            for problem, artifact in zip(problems, artifacts, strict=True)
        ]
        reports = run_programs(
            programs, bundle, problems, check=repeat == 0, rounds=rounds, rest=rest
        )
        timed.append(list(zip(python_us, reports, strict=True)))
    agreements = []
    for problem, artifact, *pairs in zip(problems, artifacts, *timed, strict=True):
        times, answers = zip(*pairs, strict=True)
        agreement = Agreement(
            problem=problem,
            kernel=artifact.name,
            digest=artifact.digest,
            cpp_digest=str(answers[0].get("digest")),
            error="; ".join(dict.fromkeys(str(r["error"]) for r in answers if r["error"])),
            warm_up=str(answers[-1].get("warm_up")),
            python_us=times,
            cpp_us=tuple(r["median_us"] for r in answers if r.get("median_us")),
        )
        agreements.append(agreement)
    return agreements


def measure_here(problem: Problem, library: Path, rounds: int, rest: float) -> float:
    """Python's median on the current GPU, microseconds; nothing of it stays in the GPU's memory.

    Raises:
        BuildError: it cannot be timed.
    """
    import torch

    from attention_autotuner.tuning.entries import KernelEntry
    from attention_autotuner.tuning.measure import InProcessMeasurer

    entry = KernelEntry(name=problem.describe(), path=library, problem=problem)
    measurer = InProcessMeasurer(rounds=rounds, rest=rest)
    (timing,) = measurer.measure(problem, [entry], budget_seconds=PYTHON_SECONDS)
    del entry  # with the tensors that its launches hold
    torch.cuda.empty_cache()
    if not timing.outcome.ok or timing.samples < rounds:
        done = f"{timing.samples} of {rounds} rounds in {PYTHON_SECONDS:g} s, {timing.outcome}"
        raise BuildError(f"{problem.describe()} cannot be timed: {done}")
    return timing.median_us


def picks_of(problems: Sequence[Problem], policy: Policy) -> list[BundledPick]:
    """The picks of dispatch for problems, as a bundle holds them."""
    picks = [(problem, dispatch.lookup(problem, policy)) for problem in problems]
    return [
        BundledPick(
            problem=listed_as(problem, pick.layer), candidate=pick.candidate, layer=str(pick.layer)
        )
        for problem, pick in picks
    ]


def report(agreements: Sequence[Agreement], device: int = 0) -> dict[str, Any]:
    """The document to commit; a case without a time leaves no worst ratio."""
    ratios = [agreement.ratio for agreement in agreements]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1.0))
    return {
        "schema": SCHEMA,
        "environment": collect(device).to_json(),
        "bar": BAR,
        "rounds": ROUNDS,
        "rest": REST,
        "worst_ratio": None if any(isnan(ratio) for ratio in ratios) else worst,
        "passed": all(agreement.agrees for agreement in agreements),
        "cases": [agreement.to_json() for agreement in agreements],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, time by both, compare; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--repeats", type=positive, default=REPEATS, help=f"of both ({REPEATS})")
    parser.add_argument("--build-dir", type=Path, help="of the C++ benchmarks; a temporary one")
    options = parser.parse_args(arguments)
    try:
        policy = detect(0)
        toolchain = find_toolchain()
    except AttentionAutotunerError as error:
        print(error)
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            programs = build_programs(options.build_dir or Path(folder) / "build", toolchain)
            print(f"built the programs, {time.monotonic() - started:.0f} s")
            picks = picks_of(PROBLEMS, policy)
            built = build_kernels([pick.candidate for pick in picks], policy)
            print(f"built the kernels, {time.monotonic() - started:.0f} s")
            bundle = write_bundle(
                Path(folder) / "bundle",
                arch=policy.name,
                build_arch=policy.build_arch,
                artifacts=built,
                picks=picks,
            )
            agreements = compare(
                PROBLEMS,
                [built[pick.candidate] for pick in picks],
                bundle=bundle.root,
                programs=programs,
                measure=measure_here,
                repeats=options.repeats,
                rounds=ROUNDS,
            )
        except AttentionAutotunerError as error:
            print(error)
            return 1
    document = report(agreements)
    write(options.output, document)
    for case in agreements:
        times = f"{median(case.python_us):9.2f} us in Python, C++ over it {case.ratio:.4f}"
        ending = "" if case.agrees else f"  DIFFERS {case.error}"
        print(f"{case.problem.describe():64}  {times}{ending}")
    print(f"wrote {options.output}, {time.monotonic() - started:.0f} s")
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
