"""One writer at a time of a file of records, whatever the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.trust import make_folder
from ..errors import StoreError

LOCK_TIMEOUT_SECONDS = 30.0


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock beside a file, whose folder is made, while it is read and written.

    Raises:
        StoreError: the package filelock is missing, another process holds the lock for too long, or the folder cannot
            be written.
    """
    try:
        import filelock
    except ImportError as error:
        raise StoreError(
            "writing tuning records needs the package filelock: pip install filelock"
        ) from error
    try:
        make_folder(path.parent)
        with filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_SECONDS):
            yield
    except filelock.Timeout as error:
        raise StoreError(
            f"another process holds {path.with_suffix('.lock')} for more than "
            f"{LOCK_TIMEOUT_SECONDS:.0f} s"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot write the tuning record {path}: {error}") from error
