"""Fixtures of the tests that compile."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from tests.cpp_programs import SOURCES, cmake, write_fake_bundle
from tests.emulation.build import compile_machine, use_machine


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that the first process to ask for it fills, while the others wait."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="session")
def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run have."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def kernel_store(of_all_workers: Path) -> Store:
    """The store of tests that only read what they build: CMake looks at the compilers once for all of them."""
    return Store(of_all_workers / "kernel_store")


@pytest.fixture(scope="session")
def new_store(kernel_store: Store) -> Callable[[Path], Store]:
    """Make a store of its own without kernels, in which CMake need not look at the compilers once more."""
    learnt = "cmake"

    def make(root: Path) -> Store:
        if (kernel_store.root / learnt).is_dir():
            root.mkdir(parents=True, exist_ok=True)
            shutil.copytree(kernel_store.root / learnt, root / learnt)
        return Store(root)

    return make


@pytest.fixture(autouse=True, scope="session")
def _emulated_machine(of_all_workers: Path) -> None:
    """Emulated kernels find their machine where the first worker that needs it compiles it."""
    use_machine(lambda: _made_once(of_all_workers / "emulated_machine", compile_machine))


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a module's emulated kernels."""
    return tmp_path_factory.mktemp("emulation")


@pytest.fixture(scope="session")
def cpp_programs(of_all_workers: Path) -> Path:
    """The build folder of the client and the benchmarks for a machine without a GPU."""

    def make(folder: Path) -> None:
        # O0: half the time of O3, and fast enough for what is computed here.
        options = ("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0")
        cmake(find_toolchain(), SOURCES, folder, *options)

    return _made_once(of_all_workers / "cpp_programs", make)


@pytest.fixture(scope="session")
def fake_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of kernels that run on the host."""
    return write_fake_bundle(tmp_path_factory.mktemp("fake_bundle"))
