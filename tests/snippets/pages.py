"""Pages and their blocks."""

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
        page: file of the page.
        line: first line of the code, from 1.
        language: language of the fence; empty where the fence names none.
        code: the code without the fence and its indentation.
        kind: kind of the mark; empty without a mark.
        argument: argument of the mark, e.g. a path.
    """

    page: Path
    line: int
    language: str
    code: str
    kind: Kind = ""
    argument: str = ""

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def pages() -> list[Path]:
    """The pages whose blocks are tested: those of the root, except the changelog, and those of docs/."""
    root = sorted(REPOSITORY.glob("*.md"))
    return [page for page in root if page.name != "CHANGELOG.md"] + sorted(
        (REPOSITORY / "docs").rglob("*.md")
    )


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order, without directives of the site's generator.

    Raises:
        ValueError: a fence or a comment is not closed, or a mark is unknown or precedes no block.
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
                raise ValueError(f"{name}:{at + 1}: the mark before this one precedes no block")
            if setup := _SETUP.match(line):
                end = _closing(lines, at, "-->", name)
                code = "\n".join(lines[at + 1 : end]) + "\n"
                language = setup["language"] or "python"
                yield Block(page=page, line=at + 2, language=language, code=code, kind="setup")
                at = end + 1
                continue
            match = _MARK.match(line)
            if match is None or match["kind"] not in get_args(Kind):
                raise ValueError(f"{name}:{at + 1}: no such mark: {line.strip()}")
            mark = (cast("Kind", match["kind"]), match["argument"] or "")
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
            raise ValueError(f"{name}:{at + 1}: a mark precedes no block")
        at += 1
    if mark[0]:
        raise ValueError(f"{name}: the last mark precedes no block")


def _closing(lines: list[str], at: int, end: str, name: Path) -> int:
    for number in range(at + 1, len(lines)):
        if lines[number].strip() == end:
            return number
    raise ValueError(f"{name}:{at + 1}: never closed")
