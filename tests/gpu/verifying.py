"""Kernels held against the reference on several problems, without what the verifier would do again for each."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import verify as verifying
from tests.launchers import launcher


def alone() -> AbstractContextManager[object]:
    """Verify a problem without those of odd lengths and many heads that the verifier adds."""
    return patch.object(verifying, "variants", lambda problem, **_: [problem])


def verify_all(
    problems: Iterable[Problem], kernel: Any, *, deterministic: bool, device: torch.device
) -> None:
    """Hold a kernel against the reference: the first problem as a search does, others alone.

    Raises:
        AssertionError: it is wrong for one of them.
    """
    launched = launcher(kernel, device)
    for index, problem in enumerate(problems):
        with alone() if index > 0 else nullcontext():
            outcome = verifying.verify(
                problem, launched, deterministic=deterministic, device=device
            )
        assert outcome.ok, outcome
