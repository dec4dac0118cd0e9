"""From a candidate to the text of its translation unit, and what that text stands on."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..core.candidate import Candidate
from ..core.cpp import NAMESPACE
from ..core.identity import digest
from ..errors import BuildError
from ..kernels.registry import kernel_of
from .environment import environment, template_root

TEMPLATE = "kernel.cu.jinja"
"""The one template, under the template root, that every kernel is rendered from."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|"([^"\n]+)")', re.MULTILINE)
_ABI_VERSION = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+ATTENTION_AUTOTUNER_ABI_VERSION[ \t]+(\d+)\b", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class RenderedKernel:
    """A translation unit, ready to be written and compiled.

    Attributes:
        candidate: the decision it was rendered from, its launch knobs at their defaults.
        name: the candidate's name.
        text: CUDA C++ source.
    """

    candidate: Candidate
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class GeneratedCode:
    """C++ expressions that are generated for a candidate and placed in its config.

    Attributes:
        score: of ``score``, ``i`` and ``j``: what a score of row i and column j becomes; None where the score
            modification of the headers is all that there is.
    """

    score: str | None = None


def render(candidate: Candidate, generated: GeneratedCode | None = None) -> RenderedKernel:
    """Render a candidate: its config, written from the fields of its knobs, and its entry points.

    Args:
        candidate: what to render; launch knobs leave no trace.
        generated: expressions for the template's hooks; none by default.

    Raises:
        jinja2.UndefinedError: the template asks for something that the candidate does not have.
        TypeError: a knob holds what is no C++ constant.
    """
    candidate = candidate.compiled
    text = (
        environment()
        .get_template(TEMPLATE)
        .render(
            candidate=candidate,
            entry=kernel_of(candidate).entry(candidate),
            generated=generated or GeneratedCode(),
        )
    )
    return RenderedKernel(candidate=candidate, name=candidate.name, text=text)


def include_root() -> Path:
    """The folder to put on the compiler's include path for ``<attention_autotuner/...>``."""
    return template_root() / "include"


@lru_cache(maxsize=256)
def _read_header(path: Path, mtime_ns: int, size: int) -> tuple[str, tuple[tuple[str, bool], ...]]:
    """The SHA-256 of a header and its includes as (spelling, quoted).

    ``mtime_ns`` and ``size`` only make an edited header a new cache key.
    """
    data = path.read_bytes()
    return hashlib.sha256(data).hexdigest(), _includes(data.decode())


def _includes(text: str) -> tuple[tuple[str, bool], ...]:
    return tuple((match[1] or match[2], bool(match[2])) for match in _INCLUDE.finditer(text))


@lru_cache(maxsize=4096)
def _place(root: Path, spelling: str, beside: Path | None) -> Path | None:
    """The header of ours of a spelling, in a folder or under the root; None where there is none. Looked for once."""
    for folder in (root,) if beside is None else (beside, root):
        place = os.path.join(folder, spelling)  # noqa: PTH118  # a first call resolves a hundred
        if os.path.isfile(place) and (path := Path(place).resolve()).is_relative_to(root):  # noqa: PTH113
            return path
    return None


def _resolve(root: Path, spelling: str, quoted: bool, includer: Path | None) -> Path | None:
    """The header of ours that an include names, or None for a header of somebody else.

    Raises:
        BuildError: the include names a header of ours that does not exist.
    """
    place = _place(root, spelling, includer.parent if quoted and includer is not None else None)
    if place is not None:
        return place
    if quoted or spelling.startswith(f"{NAMESPACE}/"):
        where = includer.relative_to(root).as_posix() if includer else "the rendered kernel"
        raise BuildError(f"{where} includes {spelling!r}, which is not under {root}")
    return None


def include_closure(text: str, root: Path | None = None) -> dict[str, str]:
    """Every header of ours that a translation unit includes, transitively.

    Both branches of a conditional count: a closure that is too large costs a rebuild, one that is too small
    would serve a stale kernel.

    Args:
        text: C++ source.
        root: folder that includes are resolved in; default :func:`include_root`.

    Returns:
        Path relative to the root -> SHA-256 of the file, sorted by path.

    Raises:
        BuildError: a header of ours does not exist.
    """
    root = (root or include_root()).resolve()
    closure: dict[str, str] = {}
    pending: list[tuple[str, bool, Path | None]] = [(*include, None) for include in _includes(text)]
    while pending:
        path = _resolve(root, *pending.pop())
        if path is None or (relative := path.relative_to(root).as_posix()) in closure:
            continue
        stat = path.stat()
        closure[relative], includes = _read_header(path, stat.st_mtime_ns, stat.st_size)
        pending.extend((*include, path) for include in includes)
    return dict(sorted(closure.items()))


def abi_version() -> int:
    """The version of the C ABI, ``major * 1000 + minor``, as ``abi.h`` defines it.

    Raises:
        BuildError: the header does not define it.
    """
    header = include_root() / NAMESPACE / "abi.h"
    match = _ABI_VERSION.search(header.read_text(encoding="utf-8"))
    if match is None:
        raise BuildError(f"{header} does not define ATTENTION_AUTOTUNER_ABI_VERSION as a number")
    return int(match[1])


def kernel_digest(kernel: RenderedKernel) -> str:
    """The identity of a kernel, whatever compiles it: its text, its include closure and the ABI version.

    Returns:
        64 hex characters. A record of a kernel with another digest is about another kernel.
    """
    return digest("kernel", kernel.text, include_closure(kernel.text), abi_version())
