"""Compiling baselines ahead, in several processes that fill the compilers' caches on disk."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Hashable, Sequence
from math import ceil
from typing import Any

import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.attention.modified_inputs import with_values
from attention_autotuner.operations.shared.tensors import Inputs

from .base import Baseline, Mode

Work = tuple[Any, ...]


def in_processes(
    function: Callable[..., None], work: Sequence[Work], processes: int, *, shares: bool = False
) -> None:
    """Call a function of a module once for each of some arguments.

    Args:
        function: an error of it is printed and otherwise left to the comparison, which would see it again.
        work: arguments.
        processes: at most this many at once.
        shares: as many processes divide the work, which is short beside the start of one; else each has its own.
    """
    if not work:
        return
    count = min(processes, len(work))
    context = multiprocessing.get_context("spawn")
    with context.Pool(count, maxtasksperchild=1) as pool:
        chunk = ceil(len(work) / count) if shares else 1
        pool.starmap(_attempt, [(function, *arguments) for arguments in work], chunksize=chunk)


def _attempt(function: Callable[..., None], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception:  # noqa: BLE001  # whatever it is
        traceback.print_exc()


def first_of_each(
    problems: Sequence[Problem], kind: Callable[[Problem], Hashable]
) -> list[Problem]:
    """The first problem of each kind, in their order."""
    first: dict[Hashable, Problem] = {}
    for problem in problems:
        first.setdefault(kind(problem), problem)
    return list(first.values())


def run_ahead(baseline: Baseline, problem: Problem, mode: Mode) -> None:
    """Run a baseline on a problem once, so that what it compiles on a first call is in its cache."""
    baseline.entry(problem, mode, "ahead").prepare([blank_inputs(problem, "cuda")], [])


def compile_ahead(
    baseline: Baseline, problem: Problem, *, backward: Mode, keeps_graphs: bool = True
) -> None:
    """Have torch compile a baseline in one thread: there are as many of these processes as cores.

    What torch times meanwhile, beside other processes on the same GPU, it does not keep: the process that compares
    chooses again, with the GPU to itself, among kernels that are compiled then.

    Args:
        baseline: compiled by torch.
        problem: of the shape to compile for.
        backward: the mode in which a backward problem is run.
        keeps_graphs: False for graphs that hold what was chosen: only their kernels stay in the cache.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1
    inductor_config.autotune_local_cache = False
    if not keeps_graphs:
        inductor_config.fx_graph_cache = False
        functorch_config.enable_autograd_cache = False
    run_ahead(baseline, problem, "forward" if problem.direction == "forward" else backward)


def blank_inputs(problem: Problem, device: torch.device | str) -> Inputs:
    """Zeros of the shapes that a problem has, with values of its modifications; for compiling, never for timing."""
    p, (batch, of_q, of_k) = problem, problem.extents
    rows_q, rows_k = (batch, p.heads_q, of_q), (batch, p.heads_kv, of_k)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (*rows_q, p.dim_qk),
        "k": (*rows_k, p.dim_qk),
        "v": (*rows_k, p.dim_v),
        "dout": (*rows_q, p.dim_v),
    }
    if p.mask == "explicit":
        shapes["mask"] = (p.heads_q, p.seqlen_q, p.seqlen_k)
    dtype = torch.float16 if p.dtype == "fp16" else torch.bfloat16
    tensors = {name: torch.zeros(s, dtype=dtype, device=device) for name, s in shapes.items()}
    return with_values(problem, Inputs(tensors=tensors), 0, ragged=False)
