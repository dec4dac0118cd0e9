"""Fixtures of the tests that compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention_autotuner.codegen.toolchain import find_toolchain
from tests.cpp_programs import SOURCES, cmake, write_fake_bundle


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
