"""The source digest: what a kernel's text and its headers say, whatever they are called and however they are laid out.

Comments, layout and ``#include`` lines take no part, nor do names and order of headers: a comment, a moved or a renamed
header leaves the digest as it is. It is known without a compiler, in milliseconds. What it cannot see past, such as
another name for a namespace or a variable, :mod:`.code_digest` can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from ..core.identity import digest
from .render import RenderedKernel, include_closure, include_root
from .tokens import tokens


def _token_digest(spelled: Iterable[str]) -> str:
    """The SHA-256 of tokens; empty where there are none."""
    text = "".join([f"{len(token)}:{token}" for token in spelled])
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


@lru_cache(maxsize=256)
def _header_digest(path: Path, mtime_ns: int, size: int) -> str:
    """The token digest of a header; ``mtime_ns`` and ``size`` only make an edited header a new cache key."""
    return _token_digest(tokens(path.read_text(encoding="utf-8")))


def source_digest(kernel: RenderedKernel, root: Path | None = None) -> str:
    """The identity of what a kernel's source says.

    The literal with the candidate's name, which the kernel carries for people to read, counts as the same for all.

    Args:
        kernel: the rendered kernel.
        root: folder that includes are resolved in; default ``render.include_root()``.

    Returns:
        64 hex characters.

    Raises:
        BuildError: a header of ours does not exist.
    """
    root = (root or include_root()).resolve()
    headers = []
    for name in include_closure(kernel.text, root):
        path = root / name
        stat = path.stat()
        headers.append(_header_digest(path, stat.st_mtime_ns, stat.st_size))
    name = f'"{kernel.name}"'
    unit = _token_digest('"name"' if token == name else token for token in tokens(kernel.text))
    return digest("source", unit, sorted(filter(None, headers)))
