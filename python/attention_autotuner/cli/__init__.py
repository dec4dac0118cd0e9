"""The command line ``attention-autotuner``: look at candidates, build, tune, explain, and tend the cache."""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
