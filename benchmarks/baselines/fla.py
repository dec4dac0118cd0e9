"""fla's chunkwise retention, where fla is installed.

fla has Triton try some hundred configurations of its kernels on the first call of every pair of head dims. Compiled one
after the other they would take longer than all of a comparison, so :meth:`Fla.get_ready` has several processes fill
Triton's cache first; what is chosen is timed afterwards, in the process that compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from attention_autotuner.core.problem import Problem

from ..calls import Function, rows_of_heads
from .base import Baseline, grouped_heads
from .compile_ahead import first_of_each, in_processes, run_ahead

SHARES = 3  # processes that divide the configurations of one pair of head dims
SHORT_SEQLEN = 256  # kernels are compiled for any length
SAMPLE_MS = (5, 25)  # of warming up and of timing a configuration


def absence() -> str:
    """The reason why fla cannot be timed here, or an empty string."""
    for name in ("triton", "fla"):
        if find_spec(name) is None:
            return f"{name} is not installed"
    return ""


def chunk_retention(q: Any, k: Any, v: Any) -> Any:
    """The output of fla on ``[batch, seqlen, heads, dim]``, with its default scale and decays, which are ours."""
    from fla.ops.retention import chunk_retention as function

    return function(q, k, v)[0]


def tuned_classes(problems: Sequence[Problem]) -> list[Problem]:
    """One problem for each (heads, dim_qk, dim_v), which is what fla compiles and tunes for."""
    return first_of_each(problems, lambda p: (p.heads_q, p.dim_qk, p.dim_v))


class Fla(Baseline):
    """fla's ``chunk_retention``."""

    name = "fla"
    title = "fla's chunk_retention"
    op = "retention"
    layout = staticmethod(rows_of_heads)
    called = True

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`."""
        return chunk_retention

    def limit(self, problem: Problem) -> str:
        """See :meth:`Baseline.limit`."""
        return grouped_heads(problem) or absence()

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        """Compile what fla will try, in other processes, and shorten Triton's samples in this one."""
        work = [(p, share) for p in tuned_classes(problems) for share in range(SHARES)]
        in_processes(_compile_share, work, processes)
        _shorten_samples()


def _shorten_samples() -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def bench(self: Any) -> Callable[..., Any]:
        warm_up, timed = SAMPLE_MS
        return lambda call, quantiles: do_bench(call, warm_up, timed, quantiles=quantiles)

    Autotuner.do_bench = cached_property(bench)
    Autotuner.do_bench.__set_name__(Autotuner, "do_bench")


class _NotTunedError(Exception):
    """Triton's cache does not hold a choice."""


def _compile_share(problem: Problem, share: int) -> None:
    """In a process of its own: both passes on short inputs, compiling one share of what Triton would time."""
    from triton.runtime.autotuner import Autotuner

    _only_compile(Autotuner, share)
    short = replace(problem, seqlen_q=SHORT_SEQLEN, seqlen_k=SHORT_SEQLEN)
    run_ahead(Fla(), short, "step")


def _only_compile(autotuner: Any, share: int) -> None:
    """Have Triton's tuner compile every third configuration and time none; choices that its cache holds stay."""
    seen = 0

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        nonlocal seen
        seen += 1
        if seen % SHARES != share:
            return [float("inf")] * 3
        try:
            self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
        except Exception:  # noqa: BLE001  # what does not compile is not chosen
            return [float("inf")] * 3
        return [float(seen)] * 3

    read_cache = autotuner.check_disk_cache

    def refuse() -> None:
        raise _NotTunedError

    def check_disk_cache(self: Any, key: Any, configs: Any, benchmark: Callable[[], None]) -> bool:
        try:
            return bool(read_cache(self, key, configs, refuse))
        except _NotTunedError:
            benchmark()  # and the choice is not kept: nothing was timed
            return False

    autotuner._bench = bench
    autotuner.check_disk_cache = check_disk_cache
