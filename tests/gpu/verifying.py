"""Kernels held against the reference on several problems, without what the verifier would do again for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import verify as verifying
from attention_autotuner.tuning.verify import Launcher
from tests.launchers import launcher


def verify_alone(
    problem: Problem,
    kernel: Launcher,
    *,
    deterministic: bool,
    device: torch.device,
    seeds: Sequence[int] = (0, 1),
) -> Outcome:
    """The outcome for a problem, without those of odd lengths and many heads that the verifier adds."""
    with patch.object(verifying, "variants", lambda problem, **_: [problem]):
        return verifying.verify(
            problem, kernel, deterministic=deterministic, device=device, seeds=seeds
        )


def verify_all(
    problems: Iterable[Problem], kernel: Any, *, deterministic: bool, device: torch.device
) -> None:
    """Hold a kernel against the reference: the first problem as a search does, others alone.

    Raises:
        AssertionError: it is wrong for one of them.
    """
    launched = launcher(kernel, device)
    for index, problem in enumerate(problems):
        check = verify_alone if index > 0 else verifying.verify
        outcome = check(problem, launched, deterministic=deterministic, device=device)
        assert outcome.ok, outcome
