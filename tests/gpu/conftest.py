"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

from attention_autotuner.arch import detect
from tests.gpu import smoke
from tests.numerics.workshop import Workshop, needed

WORKSHOP = pytest.StashKey[Workshop]()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the smoke suite."""
    for item in smoke.select(items):
        item.add_marker("smoke")


@pytest.fixture(scope="session")
def workshop(request: pytest.FixtureRequest) -> Workshop:
    """Everything that the collected tests need, built in one batch."""
    found = Workshop(detect(0), carried=request.config.getoption("--carried"))
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
