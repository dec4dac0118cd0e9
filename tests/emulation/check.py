"""The project's own check of a kernel, on the emulated machine and on small problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unittest import mock

import torch

from attention_autotuner.core.outcome import Ok, Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving.loader import LoadedKernel
from attention_autotuner.tuning import verify

from .build import configure

RUNS: tuple[tuple[str, int], ...] = (("lazy", 0), ("eager", 0), ("random", 1))
"""Policies and seeds of the machine."""


def check(
    kernel: LoadedKernel,
    problems: Sequence[Problem],
    runs: Iterable[tuple[str, int]] = RUNS,
    *,
    deterministic: bool = True,
    mutant: str = "",
) -> Outcome:
    """Verify a kernel for problems, each under every policy; the first outcome that is not Ok, or Ok."""
    for policy, seed in runs:
        configure(kernel, policy, seed, mutant=mutant)
        with mock.patch.object(verify, "variants", return_value=list(problems)):
            outcome = verify.verify(
                problems[0],
                kernel,
                deterministic=deterministic,
                seeds=(seed,),
                device=torch.device("cpu"),
            )
        if not outcome.ok:
            return outcome
    return Ok()
