"""Leases: files that one process at a time owns, on file systems without ``flock`` too.

A lease is a file that is created atomically, names its owner, and is touched while it is held. It is free once the
file is gone; once the owner is gone, where that was a process of this machine; and once nobody has touched it for
:data:`STALE_SECONDS`, by the clock of the one who waits. An owner that slept for longer may find its lease taken, so
what a lease guards must be safe without it, if slower: entries are renamed into place, records replaced whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ..errors import LeaseError
from .trust import make_folder

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
BLANK_SECONDS = 2.0  # that a file without an owner's name may be one that is being written
POLL_SECONDS = (0.01, 0.25)  # first and longest pause between attempts

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _started(pid: int) -> str | None:
    """When a process of this machine began, in the kernel's words; None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _machine() -> list[str]:
    """The boot of this machine and the namespace of its process numbers."""
    with contextlib.suppress(OSError):
        return [
            _BOOT.read_text(encoding="ascii").strip(),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
    return []


def _is_gone(owner: bytes) -> bool:
    """Return whether an owner is known to have ended."""
    try:
        said = json.loads(owner)
        pid, started = int(said["pid"]), said["started"]
        here = bool(said["machine"]) and said["machine"] == _machine()
    except (ValueError, KeyError, TypeError):
        return False
    return here and _started(pid) != started


class _Keeper:
    """Touches the leases that this process holds, all in one thread."""

    def __init__(self) -> None:
        self._held: set[Lease] = set()
        self._process = 0  # a fork has its parent's leases here, and none of its threads

    def add(self, lease: Lease) -> None:
        if self._process != os.getpid():
            self._held, self._process = set(), os.getpid()
            threading.Thread(target=self._touch, name="leases", daemon=True).start()
        self._held.add(lease)

    def remove(self, lease: Lease) -> None:
        self._held.discard(lease)

    def _touch(self) -> None:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            for lease in list(self._held):
                with contextlib.suppress(OSError):
                    os.utime(lease.path)


_KEEPER = _Keeper()


class Lease:
    """One process's claim to a file, or its wait for one.

    As a context manager it is released at the end of the block, which :meth:`wait` or :meth:`attempt` come before.

    Args:
        path: of the file; its folder is made.

    Attributes:
        is_held: whether this object owns it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_held = False
        self._text = b""
        # Owner and last touch, when it was last looked at.
        self._seen: tuple[bytes, int] | None = None
        self._since = 0.0

    def attempt(self) -> bool:
        """Take it if it is free; True where it is held now. Repeated attempts see that nobody touches it.

        Raises:
            OSError: the folder cannot be written.
        """
        if self.is_held:
            return True
        self.is_held = self._create() or (self._is_stale() and self._break() and self._create())
        if self.is_held:
            _KEEPER.add(self)
        return self.is_held

    def wait(self, seconds: float | None = None, tick: Callable[[], None] = lambda: None) -> Lease:
        """Take it when it is free.

        Args:
            seconds: how long to wait; None is without end.
            tick: called before every pause.

        Raises:
            LeaseError: it was not free in time.
            OSError: the folder cannot be written.
        """
        began, pause = time.monotonic(), POLL_SECONDS[0]
        while not self.attempt():
            if seconds is not None and time.monotonic() - began >= seconds:
                raise LeaseError(f"another process holds {self.path} for more than {seconds:.3g} s")
            tick()
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])
        return self

    def release(self) -> None:
        """Give it back; nothing where it is not held, or where another process has taken it over."""
        if self.is_held:
            _KEEPER.remove(self)
            self.is_held = False
            with contextlib.suppress(OSError):
                if self.path.read_bytes() == self._text:
                    self.path.unlink()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _create(self) -> bool:
        pid = os.getpid()
        owner = {
            "machine": _machine(),
            "pid": pid,
            "started": _started(pid),
            "id": uuid.uuid4().hex,
        }
        self._text = json.dumps(owner).encode()
        make_folder(self.path.parent)
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(handle, self._text)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        return True

    def _is_stale(self) -> bool:
        try:
            with self.path.open("rb") as file:  # opening asks a file server for the present times
                seen = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return True
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        limit = STALE_SECONDS if seen[0] else BLANK_SECONDS
        return _is_gone(seen[0]) or now - self._since > limit

    def _break(self) -> bool:
        """Remove the lease that was seen to be stale, unless another process is at it."""
        guard = self.path.with_name(f"{self.path.name}.break")
        try:
            os.close(os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # or it was killed at that
                if time.time() - guard.stat().st_mtime > STALE_SECONDS:
                    guard.unlink()
            return False
        try:
            with contextlib.suppress(FileNotFoundError):
                if self._seen is not None and self.path.read_bytes() == self._seen[0]:
                    self.path.unlink()
        finally:
            guard.unlink(missing_ok=True)
        return True
