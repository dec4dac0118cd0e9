"""Attention forward on the grid of published comparisons: tuned picks against other implementations.

    python -m benchmarks.attention_forward run --results benchmarks/results --ship python/attention_autotuner/tuned
    python -m benchmarks.attention_forward tune      # the first half: records for every problem of the grid
    python -m benchmarks.attention_forward compare   # the second half, in a process that did not tune

What the commands do is told in :mod:`.commands`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import commands

BENCHMARK = commands.Benchmark(
    name="attention_forward",
    title="Attention forward on the grid of published comparisons",
    peers=("sdpa_flash",),
    top_k=10,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    return commands.main(BENCHMARK, arguments)


if __name__ == "__main__":
    sys.exit(main())
