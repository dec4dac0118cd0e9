"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

from attention_autotuner.arch import detect
from tests.numerics.workshop import Workshop, needed

WORKSHOP = pytest.StashKey[Workshop]()


@pytest.fixture(scope="session")
def workshop(request: pytest.FixtureRequest) -> Workshop:
    """Everything that the collected tests need, built in one batch."""
    found = Workshop(detect(0))
    request.config.stash[WORKSHOP] = found
    found.build(needed(request.session.items, found.present))
    return found


@pytest.fixture
def device() -> torch.device:
    """Where tensors go."""
    return torch.device("cuda", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = config.stash.get(WORKSHOP, None)
    if found is not None:
        terminalreporter.write_line(f"built {found.summary()}")
