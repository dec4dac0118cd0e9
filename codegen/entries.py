"""One folder of the store: its files, its record, and whether they belong together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.trust import check, check_entry, file_sha256, read_json
from .artifact import Artifact

SCHEMA = 1
SOURCE, LIBRARY, RECORD, LOG = "kernel.cu", "kernel.so", "build.json", "build.log"
MAX_NAME_BYTES = 180  # with the digest well below the 255 bytes that file systems allow

_ENTRY = re.compile(r"(.+)\.([0-9a-f]{16})(?:\.\d+)?")  # with the time of a quarantine

State = Literal["built", "failed", "quarantined"]
FOLDERS: dict[State, str] = {"built": "kernels", "failed": "failed", "quarantined": "quarantine"}


class DamagedError(Exception):
    """An entry does not hold what its record says."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One folder of the store.

    Attributes:
        name: the candidate's name, shortened where it is very long.
        digest16: first 16 hex characters of the artifact's digest.
        state: built, failed, or quarantined.
        path: the folder.
        size_bytes: of all files in it.
        last_used: seconds since the epoch.
    """

    name: str
    digest16: str
    state: State
    path: Path
    size_bytes: int
    last_used: float


def entry_name(name: str, digest: str) -> str:
    """The folder name of an entry: ``<name>.<digest16>``, below 200 bytes however long the name."""
    short = name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    return f"{short}.{digest[:16]}"


def read_record(folder: Path) -> dict[str, Any]:
    """Read ``build.json``.

    Raises:
        DamagedError: it is missing, not JSON, or of another schema.
        UntrustedError: see :func:`~..core.trust.check_entry`.
    """
    check_entry(folder, RECORD)
    try:
        record = read_json(folder / RECORD)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(f"{RECORD} is missing") from error
    except ValueError as error:
        raise DamagedError(f"{RECORD} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise DamagedError(f"{RECORD} does not follow schema {SCHEMA}")
    return record


def read_artifact(folder: Path, *, sha256: str | None = None) -> Artifact:
    """Read an entry and check its library against its record.

    Args:
        folder: the entry's.
        sha256: that the library must have as well, where another file says so.

    Raises:
        DamagedError: they do not match.
        UntrustedError: see :func:`~..core.trust.check`.
    """
    record = read_record(folder)
    library = folder / LIBRARY
    check(library)
    try:
        artifact = Artifact.from_json(record, library)
        expected_size, expected_hash = record["library_bytes"], record["library_sha256"]
    except (TypeError, KeyError, ValueError) as error:
        raise DamagedError(f"{RECORD} lacks or distorts a field: {error!r}") from error
    try:
        if library.stat().st_size != expected_size:
            raise DamagedError(f"{LIBRARY} is {library.stat().st_size} bytes, not {expected_size}")
        if file_sha256(library) != expected_hash or sha256 not in (None, expected_hash):
            raise DamagedError(f"{LIBRARY} does not match its checksum")
    except FileNotFoundError as error:
        raise DamagedError(f"{LIBRARY} is missing") from error
    return artifact


def describe(path: Path, state: State) -> Entry | None:
    """The entry in a folder; None for what is no entry (a stranger's, perhaps) or just vanished."""
    match = _ENTRY.fullmatch(path.name)
    if match is None or not path.is_dir():
        return None
    try:
        stats = [file.stat() for file in path.iterdir()]
        record = path / RECORD
        last_used = (record if record.exists() else path).stat().st_mtime
    except FileNotFoundError:
        return None
    return Entry(
        name=match[1],
        digest16=match[2],
        state=state,
        path=path,
        size_bytes=sum(stat.st_size for stat in stats),
        last_used=last_used,
    )
