"""Our own kernels on simpler problems, with which a race shows what a feature costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attention_autotuner import flash_attn_func
from attention_autotuner.core.modifications import MODIFICATIONS, PACKED
from attention_autotuner.core.problem import NO_WINDOW, NOT_PACKED, Problem
from attention_autotuner.operations.bindings import make_inputs
from attention_autotuner.operations.shared.tensors import Inputs, Outputs
from attention_autotuner.tuning.entries import Entry

from ..calls import Function
from .base import Baseline, Mode, asked_of

EQUAL_LENGTHS = (9, 1664)  # sequences, and the rows of each


class Plain(Baseline):
    """Our function, called without modifications."""

    name = "plain"
    title = "ours without score modifications"
    called = True
    same = False
    modifications = frozenset(MODIFICATIONS)

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`."""

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> Any:
            return flash_attn_func(q, k, v, causal=problem.causal)

        return run

    def limit(self, problem: Problem) -> str:
        """See :meth:`Baseline.limit`."""
        return "" if asked_of(problem) else "the problem has no score modifications"

    def simpler(self, problem: Problem) -> Problem:
        """See :meth:`Baseline.simpler`."""
        return replace(problem, modifications=(), window_size=NO_WINDOW, packed_rows=NOT_PACKED)


class EqualLengths(Plain):
    """Our function on :data:`EQUAL_LENGTHS`, in place of packed sequences."""

    name = "equal_lengths"
    title = "ours, a FLOP of {} sequences of {}".format(*EQUAL_LENGTHS)
    modifications = frozenset({PACKED})

    def limit(self, problem: Problem) -> str:
        """See :meth:`Baseline.limit`."""
        return "" if problem.packed else "the problem has no packed sequences"

    def simpler(self, problem: Problem) -> Problem:
        """See :meth:`Baseline.simpler`."""
        count, rows = EQUAL_LENGTHS
        return replace(super().simpler(problem), batch=count, seqlen_q=rows, seqlen_k=rows)

    def work_of(self, problem: Problem) -> Problem:
        """See :meth:`Baseline.work_of`."""
        return self.simpler(problem)

    def entry(self, problem: Problem, mode: Mode, name: str) -> Entry:
        """See :meth:`Baseline.entry`."""
        simpler = self.simpler(problem)
        return OwnInputs(super().entry(simpler, mode, name), simpler)


class OwnInputs:
    """An entry on inputs of another problem than that of the race.

    Args:
        entry: takes what is made for the problem.
        problem: makes the inputs.
    """

    def __init__(self, entry: Entry, problem: Problem) -> None:
        self._entry, self._problem, self.name = entry, problem, entry.name

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Make as many sets of inputs as there are, and bind the entry to them."""
        device = inputs[0].device
        made = [make_inputs(self._problem, seed=i, device=device) for i in range(len(inputs))]
        self._entry.prepare(made, [])

    def run(self, index: int) -> None:
        """Run on a set of inputs."""
        self._entry.run(index)
