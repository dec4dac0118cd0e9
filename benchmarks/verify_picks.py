"""The verifier over all shipped picks of a GPU, without timing: their kernels are built in one batch, then each is run.

A pick is verified for the problem that it was measured on, as before it was timed. Status 1 means that some pick is
wrong or was not built, 2 that there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import attention_autotuner.settings as settings_module
from attention_autotuner.arch import Policy, resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.environment import collect
from attention_autotuner.tuning.pipeline import LocalPipeline, Pipeline
from attention_autotuner.tuning.shipping import shipped
from attention_autotuner.tuning.stages import built_of

from .contenders import checked
from .results import write

POLICY = "H100"  # whose build target is native on the GPUs that picks were measured on


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result for pick pick.

    Attributes:
        problem: what it serves.
        candidate: the kernel.
        outcome: of its build, or of the verifier.
        seconds: that the verifier took.
    """

    problem: Problem
    candidate: Candidate
    outcome: Outcome
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "problem": self.problem.describe(),
            "candidate": self.candidate.name,
            "outcome": self.outcome.kind,
            "reason": self.outcome.reason,
            "seconds": round(self.seconds, 2),
        }


def picks_of(folder: Path, gpu_name: str) -> list[tuple[Problem, Candidate]]:
    """Distinct problems and picks that ship for a GPU, those of pick kernel beside each other."""
    picks = dict.fromkeys(
        (record.problem, record.candidate) for record in shipped(folder, gpu_name)
    )
    return sorted(picks, key=lambda pick: pick[1].name)


def verify_picks(picks: Sequence[tuple[Problem, Candidate]], pipeline: Pipeline) -> list[Verified]:
    """Build the kernels of some picks in pick batch and verify every pick.

    Args:
        picks: problems and their kernels.
        pipeline: builds and runs.
    """
    built = built_of(
        (candidate for _, candidate in picks),
        pipeline,
        lambda done, total, name: print(f"built {done} of {total}: {name}", flush=True),
    )
    verified = []
    for number, (problem, candidate) in enumerate(picks, start=1):
        start = time.monotonic()
        outcome = checked(problem, candidate, built[candidate], pipeline)
        verified.append(
            Verified(
                problem=problem,
                candidate=candidate,
                outcome=outcome,
                seconds=time.monotonic() - start,
            )
        )
        print(
            f"{number:4} of {len(picks)} {outcome.kind:9} {verified[-1].seconds:6.2f} s  {problem.describe()}",
            flush=True,
        )
    return verified


def report(verified: Sequence[Verified]) -> str:
    """A table of the picks that failed, and a line of counts."""
    failures = [pick for pick in verified if not pick.outcome.ok]
    lines = [f"{len(verified) - len(failures)} of {len(verified)} picks are right"]
    for pick in failures:
        lines += [
            f"{pick.outcome.kind}: {pick.problem.describe()}",
            f"    {pick.candidate.name}",
            f"    {pick.outcome.reason}",
        ]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpu", help="whose picks; those of the GPU at hand by default")
    parser.add_argument("--only", default="", help="a text that the problem's description contains")
    parser.add_argument("--output", type=Path, default=Path("verified_picks.json"))
    parser.add_argument(
        "--folder", type=Path, default=Path(str(files("attention_autotuner.tuned")))
    )
    parser.add_argument("--dry-run", action="store_true", help="list the picks; needs no GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, pipeline: Pipeline | None = None) -> int:
    """Verify what the command line asks for.

    Args:
        arguments: those of the process by default.
        pipeline: this machine's by default.
    """
    options = parse(arguments)
    gpu_name = options.gpu or collect(0).gpu_name
    if gpu_name is None:
        print("there is no GPU; name pick whose picks to list with --gpu and --dry-run")
        return 2
    picks = [
        pick for pick in picks_of(options.folder, gpu_name) if options.only in pick[0].describe()
    ]
    if options.dry_run:
        for problem, candidate in picks:
            print(f"{problem.describe()}  {candidate.name}")
        print(f"{len(picks)} picks of {len({candidate for _, candidate in picks})} kernels")
        return 0
    policy: Policy = resolve(POLICY)
    pipeline = pipeline or LocalPipeline(policy, settings_module.current())
    if not pipeline.can_measure():
        print("there is no GPU to run kernels on")
        return 2
    verified = verify_picks(picks, pipeline)
    write(
        options.output,
        {
            "environment": pipeline.environment.to_json(),
            "picks": [pick.to_json() for pick in verified],
        },
    )
    print(report(verified))
    return 0 if all(pick.outcome.ok for pick in verified) else 1


if __name__ == "__main__":
    sys.exit(main())
