"""Picks that come with the package: what a comparison has settled."""

from __future__ import annotations

from attention_autotuner.tuning.shipping import ENTRIES, ship, shipped, trimmed

__all__ = ["ENTRIES", "ship", "shipped", "trimmed"]
