"""Kernels that no policy offers yet, offered to the tests that are about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attention_autotuner.kernels import registry


@contextmanager
def offered() -> Iterator[None]:
    """Policies offer every kernel meanwhile, those of :data:`registry.UNVERIFIED` too."""
    before = registry.UNVERIFIED
    registry.UNVERIFIED = frozenset()
    try:
        yield
    finally:
        registry.UNVERIFIED = before
