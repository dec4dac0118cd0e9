"""The digest of all that a kernel's source is made from: templates, headers, and the code here that renders them.

Equal trees render equal kernels. Reading 270 files takes 4 ms, rendering a kernel and telling its headers' tokens apart
ten times as long; so digests of kernels are kept with that of the tree, and hold where the tree is the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from .. import arch, core, kernels
from ..core.memo import remembered
from ..version import IMPORTED_NS
from .environment import template_root

MARGIN_NS = 20_000_000  # by which a file's times may be behind the clock


def digest_of_tree(roots: Iterable[Path] = (), *, since_ns: int = IMPORTED_NS) -> str | None:
    """The digest of names and contents of the files in folders, in any order of the folders' own entries.

    Args:
        roots: by default those that kernels' sources are made from.
        since_ns: when the first of them was read.

    Returns:
        64 hex characters; None where a file has changed since it may have been read, or cannot be read.
    """
    here = Path(__file__).parent
    packages = [Path(next(iter(package.__path__))) for package in (arch, core, kernels)]
    sha256 = hashlib.sha256()
    try:
        for number, root in enumerate(roots or (template_root(), here, *packages)):
            for path in sorted(_files(str(root))):
                content = _read(path, since_ns)
                if content is None:
                    return None
                sha256.update(f"{number}{path[len(str(root)) :]}\0{len(content)}\0".encode())
                sha256.update(content)
    except OSError:
        return None
    return sha256.hexdigest()


def _files(root: str) -> Iterable[str]:
    for parent, folders, names in os.walk(root, onerror=_refuse, followlinks=True):
        folders[:] = [folder for folder in folders if folder != "__pycache__"]
        yield from (f"{parent}/{name}" for name in names)


def _read(path: str, since_ns: int) -> bytes | None:
    """The content of a file that has not changed since; for so many files, objects take as long as the rest."""
    handle = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(handle)
        is_older = status.st_ctime_ns < since_ns - MARGIN_NS
        return os.read(handle, status.st_size) if is_older else None
    finally:
        os.close(handle)


def _refuse(error: OSError) -> None:
    raise error


@remembered("codegen.tree")
def present_tree() -> str | None:
    """:func:`digest_of_tree` of this package, taken once: a process keeps the kernels that it began with.

    An edit made while it runs counts from the next process on, as it does for the Python files.
    """
    return digest_of_tree()
