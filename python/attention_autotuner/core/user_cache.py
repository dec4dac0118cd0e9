"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Where kernels and records are kept when ``CACHE_DIR`` does not say: the user's cache folder."""
    try:
        import platformdirs
    except ModuleNotFoundError:
        # A source tree on a bare machine: what platformdirs answers on Linux.
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(home, "attention_autotuner").expanduser()
    return platformdirs.user_cache_path("attention_autotuner")
