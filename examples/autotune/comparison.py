"""Our pick beside that of Triton's own autotune, from one race."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attention_autotuner.tuning.function_search import FunctionResult
from attention_autotuner.tuning.functions import Tunable

TOLERANCE = 0.01  # a pick this much slower than another is as good: the default is kept for less


def lacks_triton(example: str, error: ImportError) -> int:
    """Say that Triton is missing; answers the exit status."""
    print(f"{example}: cannot run: it needs Triton (pip install triton): {error}", file=sys.stderr)
    return 2


def run_comparison(
    example: str,
    tunable: Tunable[Any],
    arguments: Callable[[str], Sequence[Any]],
    picked_by_triton: Callable[..., Mapping[str, Any]],
) -> int:
    """Tune a function here and by Triton's autotune, and print both picks.

    Args:
        example: name of the script.
        tunable: the function.
        arguments: of a device.
        picked_by_triton: the configuration that Triton's autotune takes for such arguments.

    Returns:
        0 where ours is Triton's pick, or no more than 1 % slower in a race of both; 1 where it is slower; 2 where there
        is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        print(f"{example}: cannot run: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    called = arguments("cuda")
    result = tunable.tune(*called, verbose=True)
    theirs = dict(picked_by_triton(*called))
    print(f"{example}: ours {dict(result.pick)}")
    print(f"{example}: Triton's autotune {theirs}")
    for timing in result.timings:
        if not timing.outcome.ok:
            print(f"{example}: {timing.name} rejected: {timing.outcome.kind}")
    ratio = ratio_of(result, theirs, tunable, called)
    print(f"{example}: Triton's pick takes {ratio:.3f} of the time of ours")
    return 0 if ratio >= 1.0 - TOLERANCE else 1


def ratio_of(
    result: FunctionResult, theirs: Mapping[str, Any], tunable: Tunable[Any], called: Sequence[Any]
) -> float:
    """The time of another configuration over the pick's, from a race of these two."""
    if theirs == result.pick:
        return 1.0
    pair = Tunable(tunable.function, [result.pick, theirs], budget_seconds=5.0)
    timings = {timing.name: timing.ratio_to_best for timing in pair.tune(*called).timings}
    ours, other = (", ".join(f"{k}={v}" for k, v in c.items()) for c in (result.pick, theirs))
    return timings[other] / timings[ours]
