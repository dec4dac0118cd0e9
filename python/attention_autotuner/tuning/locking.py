"""One writer at a time of a file of records, whatever the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.leases import Lease
from ..errors import StoreError

LOCK_TIMEOUT_SECONDS = 30.0


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lease beside a file, whose folder is made, while it is read and written.

    Raises:
        StoreError: another process holds it for too long, or the folder cannot be written.
    """
    try:
        with Lease(path.with_suffix(".lease")).wait(LOCK_TIMEOUT_SECONDS):
            yield
    except OSError as error:
        raise StoreError(f"cannot write the tuning record {path}: {error}") from error
