"""Fixtures of the tests that need no GPU."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_autotuner import templates
from attention_autotuner.arch import measured_specs
from tests.knob_schemas import KnobsOfAnotherDay, other_schemas

# These tests check the specs in the source, which measured specs of some GPU must not replace.
measured_specs.SHIPPED = Path(__file__).with_name("no_measured_specs")

FAKE_KERNEL = Path(__file__).with_name("fake_kernel.c")
INCLUDE = Path(next(iter(templates.__path__))) / "include"


@pytest.fixture(scope="session")
def fake_kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a kernel library that runs on the host; each call returns another file.

    The arguments are options of gcc; ``source`` is a file in this folder, by default attention's.
    """
    root = tmp_path_factory.mktemp("fake_kernels")
    serial = itertools.count()
    compiled: dict[str, Path] = {}

    def build(*options: str, source: str = FAKE_KERNEL.name) -> Path:
        key = hashlib.sha256(" ".join([source, *options]).encode()).hexdigest()[:16]
        if key not in compiled:
            library = root / f"{key}.so"
            command = ["gcc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
            command += [
                *options,
                f"-I{INCLUDE}",
                str(FAKE_KERNEL.with_name(source)),
                "-o",
                str(library),
                "-lm",
            ]
            subprocess.run(command, check=True)
            compiled[key] = library
        folder = root / f"{key}.{next(serial)}"
        folder.mkdir()
        copy = folder / "kernel.so"
        copy.write_bytes(compiled[key].read_bytes())
        return copy

    return build


@pytest.fixture
def knobs_of_another_day(monkeypatch: pytest.MonkeyPatch) -> KnobsOfAnotherDay:
    """Change the knob schema of kernels, by name."""
    return other_schemas(monkeypatch)
