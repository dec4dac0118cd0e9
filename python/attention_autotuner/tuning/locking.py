"""Files of records: one writer at a time, whatever the process, and errors that say what could not be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.leases import Lease
from ..errors import StoreError

LOCK_TIMEOUT_SECONDS = 30.0


@contextmanager
def storing(deed: str) -> Iterator[None]:
    """Turn an operating-system error into a :class:`StoreError` that says what cannot be done.

    Args:
        deed: e.g. ``write the journal a.jsonl``.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {deed}: {error}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lease beside a file, whose folder is made, while it is read and written.

    Raises:
        StoreError: another process holds it for too long, or the folder cannot be written.
    """
    lease = Lease(path.with_suffix(".lease"))
    with storing(f"write the tuning record {path}"), lease.wait(LOCK_TIMEOUT_SECONDS):
        yield
