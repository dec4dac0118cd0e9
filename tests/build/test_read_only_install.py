"""The installed wheel where nobody may write: everything that it makes goes to the cache, wherever that is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.build

SOURCES = (
    "arch",
    "codegen",
    "python",
    "templates",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)

# A call on the CPU, a kernel's text, and a kernel built.
PROGRAM = """
import json, os, sys
import torch
import attention_autotuner
from attention_autotuner import flash_attn_func
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import default_store
from attention_autotuner.codegen.toolchain import find_toolchain

q = torch.randn(1, 2, 16, 16, dtype=torch.float16)
output = flash_attn_func(q, q, q)
knobs = ForwardKnobs(block_m=64, block_n=64, warps_m=4, num_stages=2, k_slice=16)
kernel = render(Candidate(dtype="fp16", padded_dim_qk=16, padded_dim_v=16, knobs=knobs))
built = build([kernel], BuildTarget(arch="80"), toolchain=find_toolchain(), store=default_store())[0]
print(json.dumps({
    "package": attention_autotuner.__file__,
    "finite": bool(output.isfinite().all()),
    "library": str(built.path) if isinstance(built, Artifact) else "",
    "why": "" if isinstance(built, Artifact) else str(built),
    "writable": [
        folder for folder, _, _ in os.walk(sys.argv[1]) if os.access(folder, os.W_OK)
    ],
}))
"""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file of a folder with its size and the time of its last change."""
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def obeying(command: list[str]) -> list[str]:
    """The command as a process that permission bits stop: root without its privilege to pass them over."""
    if os.getuid() != 0:
        return command
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("root passes permission bits over, and there is no setpriv to forbid it")
    return [setpriv, "--bounding-set=-dac_override", "--inh-caps=-dac_override", *command]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder that the test may close; it is opened again, so that it can be removed."""
    folder = tmp_path / "site"
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_read_only_installation_serves_renders_and_builds(
    site: Path, tmp_path: Path, repository: Path
) -> None:
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    for name in SOURCES:
        if (repository / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(repository / name, sources / name, ignore=ignored)
        else:
            shutil.copy(repository / name, sources / name)
    wheel = [
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path / "dist"),
        str(sources),
    ]
    pip("wheel", "--quiet", *wheel)
    (built,) = (tmp_path / "dist").glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")  # no compiled part: installs anywhere
    pip("install", "--quiet", "--no-deps", "--target", site, built)
    for path in [site, *site.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree(site)
    done = subprocess.run(
        obeying([sys.executable, "-c", PROGRAM, str(site)]),
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(site),
            "ATTENTION_AUTOTUNER_CACHE_DIR": str(cache),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Path(said["package"]).is_relative_to(site)
    assert said["writable"] == []
    assert said["finite"]
    assert Path(said["library"]).is_relative_to(cache), said["why"]
    assert tree(site) == before


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "ATTENTION_AUTOTUNER_CACHE_DIR": str(tmp_path / "file")}
    command = [sys.executable, "-m", "attention_autotuner", "warmup", "--device-type", "A100"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"cannot use the kernel cache at {tmp_path / 'file'}" in done.stderr
    assert "ATTENTION_AUTOTUNER_CACHE_DIR" in done.stderr
    assert "Traceback" not in done.stderr
