"""Retention with an explicit mask and its normaliser, forward and backward, against the formula through torch.compile.

    python -m benchmarks.retnet run --results benchmarks/results --ship python/attention_autotuner/tuned
    python -m benchmarks.retnet tune                  # the first half: records for every problem of the grid
    python -m benchmarks.retnet compare               # the second half, in a process that did not tune
    python -m benchmarks.retnet compare --only forward

No problem is causal. Masks have a RetNet's values. Beside the times stand the device memory that a call of
``retnet_attn_func`` and one of the formula take at their highest, and how far their results differ. What the commands
do is told in :mod:`.commands`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import commands

BENCHMARK = commands.Benchmark(
    name="retnet",
    title="Retention with an explicit mask, forward and backward",
    peers=("compiled_forward", "compiled_backward", "eager_forward", "eager_backward"),
    top_k=4,
    class_limit=5,
    tune_seconds=0.5,
    seconds=1.5,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    return commands.main(BENCHMARK, arguments)


if __name__ == "__main__":
    sys.exit(main())
