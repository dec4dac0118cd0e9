"""A fit of the cost model's constants to measured searches: arithmetic only.

    python -m benchmarks.fit_constants benchmarks/results/nvidia-h200/searches*.jsonl.xz --only gradient_sm90_

Prints the constants that moved, the loss before and after, and the regret of each search's problem.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.kernels.shared.calibration import Sample, calibrate, loss
from attention_autotuner.kernels.shared.coefficients import BOUNDS, FITTED, Coefficients
from attention_autotuner.tuning.model_card import policy_of, times_of
from attention_autotuner.tuning.shipping import evidence


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, and print what changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--only", nargs="*", default=[""], help="prefixes of constants; all")
    parser.add_argument("--kernels", nargs="*", help="whose candidates count; all")
    parser.add_argument("--sweeps", type=int, default=24)
    options = parser.parse_args(arguments)
    samples = [
        Sample(
            group=f"{path.name} {record.measured_problem.describe()}",
            measured_us=us,
            predict=partial(_predicted_us, record.measured_problem, candidate, policy_of(record)),
        )
        for path in options.files
        for record in evidence(path).values()
        for candidate, us in times_of(record).items()
        if options.kernels is None or candidate.kernel in options.kernels
    ]
    bounds = {n: b for n, b in BOUNDS.items() if n.startswith(tuple(options.only))}
    fitted = calibrate(samples, FITTED, bounds=bounds, sweeps=options.sweeps)
    print(f"loss {loss(samples, FITTED):.5f} -> {loss(samples, fitted):.5f}")
    for name in bounds:
        before, after = getattr(FITTED, name), getattr(fitted, name)
        if before != after:
            print(f"    {name}: {before:g} -> {after:g}")
    return 0


def _predicted_us(
    problem: Problem, candidate: Candidate, policy: Policy, coefficients: Coefficients
) -> float:
    return estimate(problem, candidate, policy.spec, coefficients).us


if __name__ == "__main__":
    sys.exit(main())
