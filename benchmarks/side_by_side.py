"""Two implementations on one set of inputs, outside any race: the memory of a call, and how far results differ."""

from __future__ import annotations

from typing import Any

import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.bindings import make_inputs

from .calls import OTHERS, Call, Results, ours


def peak_bytes(call: Call) -> int:
    """Device memory that one call takes at its highest, results included, beside what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call.run(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def difference(results: Results, expected: Results) -> list[float]:
    """Norm of the difference over the norm of the second, of each result."""
    return [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(results, expected, strict=True)
    ]


def side_by_side(problem: Problem, theirs: Call, device_type: str | None) -> dict[str, Any]:
    """A baseline's call and our function called the same way, on the current GPU.

    Args:
        problem: makes the inputs.
        theirs: a baseline's call.
        device_type: of our function.

    Returns:
        ``peak_bytes`` of both, ``difference`` of the results (o, or the gradients of q, k and v), and ``scores_bytes``:
        what one tensor of all scores would take.
    """
    mine = type(theirs)(name="ours", function=ours(problem, device_type), others=OTHERS[problem.op])
    inputs = [make_inputs(problem, seed=0)]
    for call in (mine, theirs):
        call.prepare(inputs, [])
    scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return {
        "peak_bytes": {"ours": peak_bytes(mine), "theirs": peak_bytes(theirs)},
        "scores_bytes": 2 * scores,
        "difference": difference(mine.results(0), theirs.results(0)),
    }
