"""Retention with decay, forward and whole steps, against fla's chunkwise kernels where fla is installed.

    python -m benchmarks.retention run --results benchmarks/results --ship python/attention_autotuner/tuned
    python -m benchmarks.retention tune               # the first half: records for every problem of the grid
    python -m benchmarks.retention compare            # the second half, in a process that did not tune

The form is left to the tuner; there is no initial state and the final one is not wanted. Both sides are called as a
program would call them: the forward pass without gradients, a step as forward and backward through autograd. What the
commands do is told in :mod:`.commands`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import commands

BENCHMARK = commands.Benchmark(
    name="retention",
    title="Retention with decay, forward and whole steps",
    peers=("fla_forward", "fla_step"),
    top_k=5,
    class_limit=8,
    tune_seconds=0.5,
    seconds=1.5,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    return commands.main(BENCHMARK, arguments)


if __name__ == "__main__":
    sys.exit(main())
