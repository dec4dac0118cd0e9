"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.arch import detect
from tests.gpu import smoke
from tests.numerics.kernel_pool import KernelPool, needed

KERNEL_POOL = pytest.StashKey[KernelPool]()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the smoke suite."""
    for item in smoke.select(items):
        item.add_marker("smoke")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> KernelPool:
    """The kernels of the collected tests, built in one batch."""
    kernels = KernelPool(detect(0), carried=request.config.getoption("--carried"))
    request.config.stash[KERNEL_POOL] = kernels
    kernels.build(needed(request.session.items, kernels.present))
    return kernels


@pytest.fixture(scope="module", autouse=True)
def kernels_alone() -> Iterator[None]:
    """Let no call be served by the reference that it is held against, in processes that tests start neither."""
    with pytest.MonkeyPatch.context() as environment, settings.override(strict_kernels=True):
        environment.setenv(settings.PREFIX + "STRICT_KERNELS", "1")
        yield


@pytest.fixture
def device() -> torch.device:
    """The device of all tensors."""
    return torch.device("cuda", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    kernels = config.stash.get(KERNEL_POOL, None)
    if kernels is not None:
        terminalreporter.write_line(f"built {kernels.summary()}")
