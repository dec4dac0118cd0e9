from __future__ import annotations

import functools
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import probe
from attention_autotuner.core import memo
from attention_autotuner.errors import UnsupportedArchitectureError

REPOSITORY = Path(__file__).resolve().parent.parent

# Torch alone brings a million objects that stay. With the default thresholds, looking for cycles among them takes a
# fifth of the time of tests that make many candidates.
gc.set_threshold(100_000, 50, 100)

# What runs in the background, or under nohup, ignores signals that tests send to their commands: these would inherit
# that, and wait until their time is up.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@functools.cache
def why_no_gpu() -> str:
    """The reason that GPU tests cannot run here, or an empty string."""
    try:
        properties = probe()
    except UnsupportedArchitectureError as error:
        return str(error)
    if properties.compute_capability < (8, 0):
        return f"{properties.name} is older than compute capability 8.0"
    import torch

    return "" if torch.cuda.is_available() else "this torch was built without CUDA"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--carried",
        type=Path,
        metavar="DIR",
        help="folder of kernels that tests.gpu.prebuild built on another machine",
    )


def pytest_collection_finish() -> None:
    """Spare later searches for cycles what collecting the tests has left, which stays."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and why_no_gpu():
        skip = pytest.mark.skip(reason=f"needs a GPU: {why_no_gpu()}")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(autouse=True, scope="module")
def _forgotten_plans() -> Iterator[None]:
    """Leave other files no plans: some tests have tensors of the CPU stand for those of a GPU."""
    yield
    for name, table in memo.TABLES.items():
        if name.startswith(("plans.", "replays.")):
            table.clear()


@pytest.fixture(autouse=True, scope="session")
def _private_cache() -> Iterator[None]:
    """Keep the tests out of the user's cache, unless the setting names a cache to share kernels between runs."""
    variable = settings.PREFIX + "CACHE_DIR"
    if os.environ.get(variable):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="attention-autotuner-tests-") as folder:
        os.environ[variable] = folder
        settings.reload()
        yield
        del os.environ[variable]
        settings.reload()
