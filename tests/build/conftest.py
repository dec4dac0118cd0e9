"""Fixtures of the tests that compile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from tests.cpp_programs import SOURCES, cmake, write_fake_bundle


@pytest.fixture(scope="session")
def kernel_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The store of tests that only read what they build: CMake looks at the compilers once for all of them."""
    base = tmp_path_factory.getbasetemp()
    return Store((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernel_store")


@pytest.fixture(scope="session")
def cpp_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build folder of the client and the benchmarks for a machine without a GPU."""
    folder = tmp_path_factory.mktemp("cpp_programs")
    # O0: half the time of O3, and fast enough for what is computed here.
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0")
    cmake(find_toolchain(), SOURCES, folder, *options)
    return folder


@pytest.fixture(scope="session")
def fake_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of kernels that run on the host."""
    return write_fake_bundle(tmp_path_factory.mktemp("fake_bundle"))
