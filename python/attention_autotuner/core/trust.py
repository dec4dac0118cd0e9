"""Trust in files that are loaded: owners, modes and checksums of what lies in a cache or a bundle.

Code in a cache runs with the rights of the user who loads it. So a file is loaded only if it, and every folder from the
cache's or the bundle's own down to it, belongs to somebody trusted and can be written by nobody else: the user, root,
the owner of this package (whose code runs already), and those that the setting ``TRUST_OWNERS`` names. A group may
write where it is the owner's private one, as on systems with a umask of 002. Folders with the sticky bit pass: others
add names to them, and cannot replace what is there.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UntrustedError
from ..settings import current

SEAL = "checksums.json"
"""The file of a sealed folder that holds what belongs in it."""

_PACKAGE_OWNER = Path(__file__).stat().st_uid
_SHARED_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check(*paths: Path) -> None:
    """Refuse files and folders that somebody untrusted owns or may change; what does not exist passes.

    Of a link its target is looked at, and the folder that holds the target.

    Raises:
        UntrustedError: naming path, owner, mode and remedy.
    """
    trusted = {0, os.geteuid(), _PACKAGE_OWNER, *(current().trust_owners or ())}
    for path in paths:
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                status = path.stat()
                check(path.resolve().parent)
        except OSError:
            continue  # the reader says why it cannot be read
        is_trusted = status.st_uid in trusted
        if not is_trusted or _is_shared(status):
            raise UntrustedError(_refusal(path, status, is_trusted))


def check_entry(folder: Path, *names: str) -> None:
    """:func:`check` for files of an entry, its folder, and the two above: ``<root>/<kind>/<entry>``."""
    check(folder.parent.parent, folder.parent, folder, *(folder / name for name in names))


def _refusal(path: Path, status: os.stat_result, is_owner_trusted: bool) -> str:
    owner, mode = _name(status.st_uid), stat.S_IMODE(status.st_mode)
    fault = "others can write to it"
    remedy = f"see what is in it, then run `chmod -R go-w {path}`"
    if not is_owner_trusted:
        fault = "another user, whose code would run with your rights"
        remedy = (
            f"if you trust {owner}, set ATTENTION_AUTOTUNER_TRUST_OWNERS={owner}; else remove it"
        )
    return (
        f"{path} is not used: it belongs to {owner} and has mode {mode:04o}: {fault}; {remedy}, or name another "
        "folder by ATTENTION_AUTOTUNER_CACHE_DIR or ATTENTION_AUTOTUNER_BUNDLE"
    )


def _is_shared(status: os.stat_result) -> bool:
    """Return whether users beside the owner can write to a file, or replace what a folder holds."""
    mode = status.st_mode
    if not mode & _SHARED_WRITE or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return False
    return bool(mode & stat.S_IWOTH) or not _is_private(status.st_gid, status.st_uid)


def _is_private(gid: int, uid: int) -> bool:
    """Return whether a group is a user's own: of the user's name, the user's first, and without other members."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    same = group.gr_name == user.pw_name and user.pw_gid == gid
    return same and set(group.gr_mem) <= {user.pw_name}


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, to be written by their owner alone whatever the umask."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o755, exist_ok=True)


def _paths(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


def harden(folder: Path) -> None:
    """Take from others the right to write to a folder and to what is in it."""
    for path in (folder, *_paths(folder)):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_SHARED_WRITE)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, as 64 hex characters."""
    with path.open("rb") as file:
        hasher = hashlib.sha256()
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
    return hasher.hexdigest()


def _contents(folder: Path) -> dict[str, str]:
    """The meaning of every name below a folder: a file's checksum, or where a link leads."""
    contents = {}
    for path in _paths(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            contents[name] = f"-> {path.readlink()}"
        elif path.is_file() and name != SEAL:
            contents[name] = file_sha256(path)
    return contents


def seal(folder: Path) -> None:
    """Write down what a finished folder holds, so that :func:`is_whole` can tell; others may no longer write to it."""
    (folder / SEAL).write_text(json.dumps(_contents(folder), indent=1), encoding="utf-8")
    harden(folder)


def is_whole(folder: Path) -> bool:
    """Return whether a folder ``<root>/<kind>/<entry>`` is sealed and holds what it was sealed with.

    Raises:
        UntrustedError: somebody untrusted owns a part of it, or may change it.
    """
    check_entry(folder)
    check(*(path for path in _paths(folder) if not path.is_symlink()))
    try:
        return bool(read_json(folder / SEAL) == _contents(folder))
    except (OSError, ValueError):
        return False


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """:func:`parse_json` for a regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or its text is no such JSON.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")  # reading a fifo would never end
    return parse_json(path.read_text(encoding="utf-8"))
