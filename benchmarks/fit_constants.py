"""A fit of the cost model's constants to measured searches: arithmetic only.

    python -m benchmarks.fit_constants benchmarks/results/nvidia-h200/searches*.jsonl.xz --only gradient_sm90_

Prints the constants that moved, the loss before and after, and the regret of each search's problem.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import RecordError
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.kernels.shared.calibration import Sample, calibrate, loss
from attention_autotuner.kernels.shared.coefficients import BOUNDS, FITTED, Coefficients
from attention_autotuner.tuning.model_card import policy_of, times_of
from attention_autotuner.tuning.shipping import evidence

LEAST = 2  # samples of a fit


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, and print what changed; answers 1 where the files hold nothing to fit to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--only", nargs="*", default=[""], help="prefixes of constants; all")
    parser.add_argument("--kernels", nargs="*", help="whose candidates count; all")
    parser.add_argument("--sweeps", type=int, default=24)
    options = parser.parse_args(arguments)
    try:
        samples = samples_of(options.files, options.kernels)
    except RecordError as error:
        print(f"fit_constants: {error}", file=sys.stderr)
        return 1
    bounds = {n: b for n, b in BOUNDS.items() if n.startswith(tuple(options.only))}
    fitted = calibrate(samples, FITTED, bounds=bounds, sweeps=options.sweeps)
    print(f"loss {loss(samples, FITTED):.5f} -> {loss(samples, fitted):.5f}")
    for name in bounds:
        before, after = getattr(FITTED, name), getattr(fitted, name)
        if before != after:
            print(f"    {name}: {before:g} -> {after:g}")
    return 0


def samples_of(files: Sequence[Path], kernels: Collection[str] | None) -> list[Sample]:
    """The measured times of files of searches, of all kernels or those named.

    Raises:
        RecordError: a file is missing or damaged, or there are fewer than two times.
    """
    for path in files:
        if not path.is_file():
            raise RecordError(f"there is no file {path}")
    samples = [
        Sample(
            group=f"{path.name} {record.measured_problem.describe()}",
            measured_us=us,
            predict=partial(_predicted_us, record.measured_problem, candidate, policy_of(record)),
        )
        for path in files
        for record in evidence(path).values()
        for candidate, us in times_of(record).items()
        if kernels is None or candidate.kernel in kernels
    ]
    if len(samples) < LEAST:
        wanted = "" if kernels is None else f" of {', '.join(kernels)}"
        raise RecordError(
            f"a fit takes at least {LEAST} measured times{wanted}, got {len(samples)}"
        )
    return samples


def _predicted_us(
    problem: Problem, candidate: Candidate, policy: Policy, coefficients: Coefficients
) -> float:
    return estimate(problem, candidate, policy.spec, coefficients).us


if __name__ == "__main__":
    sys.exit(main())
