"""Files that are there whole or not at all, and errors that say which path and why."""

from __future__ import annotations

import errno
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.trust import make_folder
from ..errors import StoreError

_ADVICE = {
    errno.ENOSPC: "free space there, run `attention-autotuner cache gc`, or set",
    errno.EDQUOT: "your quota is used up; set",
}


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn an operating-system error into a :class:`StoreError` that names the path and the errno."""
    try:
        yield
    except OSError as error:
        raise storage_error(Path(error.filename or path), error.errno or 0) from error


def storage_error(path: Path, number: int) -> StoreError:
    """The error for a path that cannot be used, with what to do about it."""
    name = errno.errorcode.get(number, f"errno {number}")
    advice = _ADVICE.get(number, "make it writable, or set")
    return StoreError(
        f"cannot use the kernel cache at {path}: {name} ({os.strerror(number)}); "
        f"{advice} ATTENTION_AUTOTUNER_CACHE_DIR to another folder"
    )


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make a flat folder and the files in it durable."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def read_text(path: Path) -> str:
    """The text of a file, of one whose name ends in ``.gz`` or ``.xz`` unpacked.

    Raises:
        OSError: it cannot be read, or is not what its name says.
        UnicodeDecodeError: it is no UTF-8.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error) as error:
            raise OSError(f"{path} is cut short or damaged: {error}") from error
    elif path.suffix == ".xz":
        import lzma  # slow to load, and rarely needed

        try:
            content = lzma.decompress(content)
        except lzma.LZMAError as error:
            raise OSError(f"{path} is cut short or damaged: {error}") from error
    return content.decode()


def write_json(path: Path, value: object) -> None:
    """:func:`write_atomic` for a value as indented JSON."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Write a file under its name only once it is whole and durable; packed where that ends in ``.gz`` or ``.xz``.

    Raises:
        OSError: the folder cannot be written; no part of the file is left.
    """
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)  # the same bytes for the same text
    elif path.suffix == ".xz":
        import lzma

        content = lzma.compress(content, preset=6 | lzma.PRESET_EXTREME)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file in one write, which other processes' lines do not mix with; the file may be new.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    make_folder(path.parent)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)
