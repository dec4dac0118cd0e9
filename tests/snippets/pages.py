"""Pages and the blocks in them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

REPOSITORY = Path(__file__).resolve().parents[2]
CHINESE = REPOSITORY / "README.zh-CN.md"

Kind = Literal["", "setup", "gpu", "slow", "varies", "network", "writes", "file", "prose"]

_MARK = re.compile(r"^\s*<!-- snippet: (?P<kind>\w+)(?: (?P<argument>[^,\s]+))?(?:, .*)? -->\s*$")
_SETUP = re.compile(r"^\s*<!-- snippet: setup(?: (?P<language>cpp))?\s*$")
_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,})(?P<info>.*)$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block.

    Attributes:
        page: its file.
        line: where its code begins, from 1.
        language: the fence's, empty where it names none.
        code: without the fence and its indentation.
        kind: what its mark says; empty without one.
        argument: the mark's, e.g. a path.
    """

    page: Path
    line: int
    language: str
    code: str
    kind: Kind = ""
    argument: str = ""

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def pages() -> list[Path]:
    """Every page whose blocks are tried: those of the root, but for the changelog, and those of docs/."""
    root = sorted(REPOSITORY.glob("*.md"))
    return [page for page in root if page.name != "CHANGELOG.md"] + sorted(
        (REPOSITORY / "docs").rglob("*.md")
    )


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order; directives of the site's generator are none.

    Raises:
        ValueError: a fence or a comment is not closed, or a mark is unknown or before nothing.
    """
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    name = page.relative_to(REPOSITORY)
    mark: tuple[Kind, str] = ("", "")
    at = 0
    while at < len(lines):
        line = lines[at]
        if "<!-- snippet:" in line:
            if mark[0]:
                raise ValueError(f"{name}:{at + 1}: the mark before this one stands before nothing")
            if setup := _SETUP.match(line):
                end = _closing(lines, at, "-->", name)
                code = "\n".join(lines[at + 1 : end]) + "\n"
                language = setup["language"] or "python"
                yield Block(page=page, line=at + 2, language=language, code=code, kind="setup")
                at = end + 1
                continue
            found = _MARK.match(line)
            if found is None or found["kind"] not in get_args(Kind):
                raise ValueError(f"{name}:{at + 1}: no such mark: {line.strip()}")
            mark = (cast("Kind", found["kind"]), found["argument"] or "")
        elif fence := _FENCE.match(line):
            end = _closing(lines, at, fence["fence"], name)
            language = fence["info"].strip()
            if not language.startswith("{"):
                code = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
                yield Block(
                    page=page,
                    line=at + 2,
                    language=language,
                    code=code,
                    kind=mark[0],
                    argument=mark[1],
                )
            mark = ("", "")
            at = end
        elif line.strip() and mark[0]:
            raise ValueError(f"{name}:{at + 1}: a mark stands before no block")
        at += 1
    if mark[0]:
        raise ValueError(f"{name}: the last mark stands before nothing")


def _closing(lines: list[str], at: int, end: str, name: Path) -> int:
    for number in range(at + 1, len(lines)):
        if lines[number].strip() == end:
            return number
    raise ValueError(f"{name}:{at + 1}: never closed")
