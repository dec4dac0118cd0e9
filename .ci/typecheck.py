"""Run mypy --strict on the package, and on the code beside it.

The package is spread over folders that setuptools maps into one namespace, which mypy cannot follow; so it is shown the
same namespace as a tree of links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typecheck"
MAPPED = ("arch", "codegen", "templates")


def link_tree() -> Path:
    """Make the namespace as links; answers the folder to put on mypy's path."""
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "attention_autotuner"
    package.mkdir(parents=True)
    for entry in sorted((ROOT / "python" / "attention_autotuner").iterdir()):
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for name in MAPPED:
        (package / name).symlink_to(ROOT / name)
    return TREE


def main() -> int:
    """Type-check; answers mypy's worst exit status."""
    environment = {**os.environ, "MYPYPATH": str(link_tree())}
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    beside = [
        name
        for name in ("tests", "benchmarks", "examples", "docs", ".ci")
        if next((ROOT / name).rglob("*.py"), None) is not None
    ]
    runs = [[*mypy, "-p", "attention_autotuner"], [*mypy, "--explicit-package-bases", *beside]]
    return max(
        subprocess.run(run, cwd=ROOT, env=environment, check=False).returncode for run in runs
    )


if __name__ == "__main__":
    sys.exit(main())
