"""Attention backward, and forward and backward as one step, on the grid of published comparisons.

    python -m benchmarks.attention_backward run --results benchmarks/results --ship python/attention_autotuner/tuned
    python -m benchmarks.attention_backward tune      # the first half: records for every problem of the grid
    python -m benchmarks.attention_backward compare   # the second half, in a process that did not tune

Every problem has two picks, the second for deterministic mode; the steps begin with the forward picks that dispatch
finds, so tune the forward first. What the commands do is told in :mod:`.commands`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import commands

BENCHMARK = commands.Benchmark(
    name="attention_backward",
    title="Attention backward and whole steps on the grid of published comparisons",
    peers=("sdpa_flash", "sdpa_cudnn", "sdpa_flash_step", "sdpa_flash_autograd"),
    top_k=6,
    class_limit=12,
    tune_seconds=0.5,
    seconds=1.5,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    return commands.main(BENCHMARK, arguments)


if __name__ == "__main__":
    sys.exit(main())
