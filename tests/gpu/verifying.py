"""Kernels held against the reference on several problems, without what the verifier would do again for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch

from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import verify as verifying
from attention_autotuner.tuning.verify import Launcher
from tests.launchers import launcher


def verify_alone(problem: Problem, kernel: Launcher, **options: Any) -> Outcome:
    """The outcome for a problem, without those of odd lengths and many heads that the verifier adds."""
    with patch.object(verifying, "variants", lambda problem, **_: [problem]):
        return verifying.verify(problem, kernel, **options)


def verify_all(
    problems: Iterable[Problem], kernel: Any, *, device: torch.device, **options: Any
) -> None:
    """Hold a kernel against the reference: the first problem as a search does, others alone.

    Raises:
        AssertionError: it is wrong for one of them.
    """
    launched = launcher(kernel, device)
    for index, problem in enumerate(problems):
        check = verify_alone if index > 0 else verifying.verify
        outcome = check(problem, launched, device=device, **options)
        assert outcome.ok, outcome
