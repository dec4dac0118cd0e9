"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.arch import detect
from tests.conftest import why_no_gpu
from tests.gpu import smoke
from tests.numerics.kernel_pool import KernelPool, needed

KERNEL_POOL = pytest.StashKey[KernelPool]()


class WithoutGpu(pytest.Item):
    """All tests of a module, on a machine that has no GPU for them: skipped for its mark."""

    def runtest(self) -> None:
        raise AssertionError(f"{self.path} needs a GPU")

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


class ModuleWithoutGpu(pytest.Module):
    """A module that is not imported, as none of its tests can run."""

    def collect(self) -> Iterator[pytest.Item]:
        module: WithoutGpu = WithoutGpu.from_parent(self, name="all")
        module.add_marker("gpu")
        yield module


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> ModuleWithoutGpu | None:
    """Skip whole modules without a GPU, unless tests are listed or chosen: collecting thousands takes a while."""
    options = parent.config.option
    chosen = any("::" in argument for argument in parent.config.args)
    if chosen or options.collectonly or options.markexpr or options.keyword or not why_no_gpu():
        return None
    module: ModuleWithoutGpu = ModuleWithoutGpu.from_parent(parent, path=module_path)
    return module


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
