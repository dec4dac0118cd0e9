"""The files of the repository, for the checks beside this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def files(*below: str) -> list[Path]:
    """Every file that git tracks or would track, of all folders or of those that are named."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *below]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
