"""Times of calls on a GPU, for tests whose bars are ratios."""

from __future__ import annotations

from collections.abc import Callable

import torch


def milliseconds(call: Callable[[], object], *, repeats: int, warm_ups: int) -> float:
    """Time of so many calls, one after the other, after some that are not timed."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(warm_ups):
        call()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def least_milliseconds(
    *calls: Callable[[], object], repeats: int, warm_ups: int, rounds: int = 5
) -> list[float]:
    """The least time of every call over rounds in which they take turns: other tests may keep the same GPU busy."""
    times = [
        [milliseconds(call, repeats=repeats, warm_ups=warm_ups) for call in calls]
        for _ in range(rounds)
    ]
    return [min(of_call) for of_call in zip(*times, strict=True)]
