"""Compilers from PyPI wheels for tests: downloaded to a folder, and used as the only compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def download(requirements: Sequence[str], target: Path) -> None:
    """Install wheels and nothing else into a folder; without the index the test is skipped."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run(
        [*command, str(target), *requirements], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"pip cannot download the compiler: {done.stderr.strip()[-300:]}")


def run_alone(script: str, wheels: Path, store: Path, **variables: str) -> dict[str, Any]:
    """The JSON that a script prints where a folder of wheels has the only compiler.

    Args:
        script: Python; its one argument is the store.
        wheels: the folder; no variable and no folder of PATH leads to another compiler.
        store: folder that kernels are written to.
        variables: additional variables of the process environment.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")}
    env |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(wheels)} | variables
    for name in ("nvcc", "ptxas", "cicc"):
        assert not any((Path(folder) / name).exists() for folder in env["PATH"].split(":"))
    done = subprocess.run(
        [sys.executable, "-c", script, store], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said
