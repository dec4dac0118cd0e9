"""The verifier over all shipped picks of a GPU, without timing: their kernels are built in one batch, then each is run.

A pick is verified for the problem that it was measured on, as before it was timed. Status 1 means that some pick is
wrong or was not built, 2 that there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import attention_autotuner.settings as settings_module
from attention_autotuner.arch import Policy, resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Ok
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.environment import collect
from attention_autotuner.tuning.pipeline import LocalPipeline, Pipeline
from attention_autotuner.tuning.shipping import shipped
from attention_autotuner.tuning.stages import built_of

from .contenders import checked
from .results import write

POLICY = "H100"  # whose build target is native on the GPUs that picks were measured on


def picks_of(folder: Path, gpu_name: str) -> list[tuple[Problem, Candidate]]:
    """Distinct problems and picks that ship for a GPU, those of one kernel beside each other."""
    picks = dict.fromkeys(
        (record.problem, record.candidate) for record in shipped(folder, gpu_name)
    )
    return sorted(picks, key=lambda pick: pick[1].name)


def verify_picks(
    picks: Sequence[tuple[Problem, Candidate]], pipeline: Pipeline
) -> list[dict[str, Any]]:
    """Build the kernels of some picks in one batch and verify every pick.

    Args:
        picks: problems and their kernels.
        pipeline: builds and runs.

    Returns:
        Each pick's problem, candidate, outcome with its reason, and the seconds that the verifier took.
    """
    built = built_of(
        (candidate for _, candidate in picks),
        pipeline,
        lambda done, total, name, _: print(f"built {done} of {total}: {name}", flush=True),
    )
    verified = []
    for number, (problem, candidate) in enumerate(picks, start=1):
        start = time.monotonic()
        outcome = checked(problem, candidate, built[candidate], pipeline)
        seconds = time.monotonic() - start
        row = {"problem": problem.describe(), "candidate": candidate.name}
        verified.append(
            {**row, "outcome": outcome.kind, "reason": outcome.reason, "seconds": round(seconds, 2)}
        )
        count = f"{number:4} of {len(picks)}"
        print(f"{count} {outcome.kind:9} {seconds:6.2f} s  {row['problem']}", flush=True)
    return verified


def report(verified: Sequence[Mapping[str, Any]]) -> str:
    """A table of the picks that failed, and a line of counts."""
    failures = [pick for pick in verified if pick["outcome"] != Ok.kind]
    lines = [f"{len(verified) - len(failures)} of {len(verified)} picks are right"]
    for pick in failures:
        lines += [f"{pick['outcome']}: {pick['problem']}"]
        lines += [f"    {pick['candidate']}", f"    {pick['reason']}"]
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
        print("there is no GPU; name one whose picks to list with --gpu and --dry-run")
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
    environment = pipeline.environment.to_json()
    write(options.output, {"environment": environment, "picks": verified})
    print(report(verified))
    return 0 if all(pick["outcome"] == Ok.kind for pick in verified) else 1


if __name__ == "__main__":
    sys.exit(main())
