"""Run mypy --strict on the package, and on the code beside it."""

from __future__ import annotations

import os
import subprocess
import sys

from tracked import ROOT


def main() -> int:
    """Type-check; answers mypy's worst exit status."""
    # mypy cannot follow setuptools' mapping of folders; the package's links to them it can.
    search = os.pathsep.join(str(ROOT / name) for name in ("python", ".ci"))
    # Two processes, where mypy has them: 26 s for 36 of two cores.
    environment = {"MYPY_NUM_WORKERS": "2", **os.environ, "MYPYPATH": search}
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
