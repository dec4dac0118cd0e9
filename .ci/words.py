"""Check names, comments, docstrings and pages against the list of words that the project does not use (words.txt)."""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

from tracked import ROOT, files

LIST = Path(__file__).with_name("words.txt")
CPP = {".cuh", ".h", ".hpp", ".cpp", ".cu"}
TEXT = {*CPP, ".py", ".md", ".rst", ".jinja", ".toml", ".cmake", ".txt", ".yaml", ".yml"}
MOST_EXCEPTIONS = 15

# Words of a text: snake_case and CamelCase are taken apart.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NAME = re.compile(r"(?<![\w.:\"'])[A-Za-z_]\w*")
_CPP_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|#include[^\n]*", re.DOTALL)


@dataclass
class Words:
    """The lists of words.txt."""

    everywhere: list[str]
    identifiers: list[str]
    openers: list[str]
    exceptions: list[tuple[str, str]]  # (path pattern, word)

    @classmethod
    def read(cls, path: Path) -> Words:
        """Read the lists.

        Raises:
            configparser.Error: a line belongs to none, or is there twice.
            ValueError: an exception without a reason.
        """
        sections = ConfigParser(allow_no_value=True, delimiters="\0", interpolation=None)
        sections.optionxform = str  # type: ignore[assignment,method-assign]  # words keep their case
        sections.read_string(path.read_text(encoding="utf-8"))
        lists = {name: list(sections[name]) for name in ("everywhere", "identifiers", "openers")}
        exceptions = []
        for line in sections["exceptions"]:
            pattern, word, _reason = line.split(maxsplit=2)
            exceptions.append((pattern, word))
        return cls(**lists, exceptions=exceptions)

    def excepted(self, name: str, word: str) -> bool:
        """True where an exception covers the word in the file of that name."""
        return any(fnmatch.fnmatch(name, p) and word == w for p, w in self.exceptions)


@dataclass(frozen=True)
class Hit:
    """One banned word in one line."""

    name: str
    line: int
    word: str
    place: str  # "anywhere", "as a name", "opens a docstring"

    def __str__(self) -> str:
        return f"{self.name}:{self.line}: '{self.word}' {self.place}"


def words_in_text(name: str, text: str, words: Words) -> Iterator[Hit]:
    """Banned words anywhere in a text, compound names taken apart."""
    if not _everywhere(text, words):  # as nearly all texts
        return
    for number, line in enumerate(text.splitlines(), 1):
        for banned in _everywhere(line, words):
            yield Hit(name, number, banned, "anywhere")


def _everywhere(text: str, words: Words) -> list[str]:
    """Those of the words that are banned anywhere that a text has."""
    parts = {word.lower() for word in _WORD.findall(text)}
    found = []
    for banned in words.everywhere:
        if banned.endswith("*"):
            hit = any(word.startswith(banned[:-1]) for word in parts)
        elif banned.islower() and "_" not in banned:
            hit = banned in parts
        else:
            hit = banned in text
        if hit:
            found.append(banned)
    return found


def _bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that Python code binds: variables, parameters, fields, functions, classes, imported aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def python_names(name: str, text: str, words: Words) -> Iterator[Hit]:
    """Banned identifiers and docstring openers in Python code."""
    tree = ast.parse(text)
    banned = set(words.identifiers)
    for line, identifier in _bound_names(tree):
        if identifier.lstrip("_") in banned:
            yield Hit(name, line, identifier.lstrip("_"), "as a name")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text_of := ast.get_docstring(node)):
            first = text_of.split(maxsplit=1)[0].strip(",.:;")
            if first in words.openers:
                yield Hit(name, node.body[0].lineno, first, "opens a docstring")


def cpp_names(name: str, text: str, words: Words) -> Iterator[Hit]:
    """Banned identifiers in C++ code, comments and strings left out."""
    blank = _CPP_NO_CODE.sub(lambda match: "\n" * match.group().count("\n"), text)
    for number, line in enumerate(blank.splitlines(), 1):
        for identifier in _NAME.findall(line):
            if identifier.strip("_") in words.identifiers:
                yield Hit(name, number, identifier.strip("_"), "as a name")


def hits_of(path: Path, words: Words) -> list[Hit]:
    """All banned words of one file, exceptions left out."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    hits = list(words_in_text(name, text, words))
    hits += words_in_text(f"{name} (its path)", name, words)
    if path.suffix == ".py":
        hits += python_names(name, text, words)
    elif path.suffix in CPP:
        hits += cpp_names(name, text, words)
    return [hit for hit in hits if not words.excepted(name, hit.word)]


def files_of(arguments: list[str]) -> list[Path]:
    """The text files that git tracks or would track, below the given paths."""
    skipped = {LIST, Path(__file__).resolve()}
    texts = (path for path in files(*arguments) if path.suffix in TEXT and path not in skipped)
    return [path for path in texts if not path.is_symlink()]


def main() -> int:
    """Check the whole tree, or the paths that are arguments; the status is 1 when a banned word is in it."""
    words = Words.read(LIST)
    hits = [hit for path in files_of(sys.argv[1:]) for hit in hits_of(path, words)]
    for hit in hits:
        print(hit)
    if hits:
        print(f"{len(hits)} banned words; {LIST.relative_to(ROOT)} has the list")
    if len(words.exceptions) > MOST_EXCEPTIONS:
        print(f"{len(words.exceptions)} exceptions, {MOST_EXCEPTIONS} are allowed")
    return 1 if hits or len(words.exceptions) > MOST_EXCEPTIONS else 0


if __name__ == "__main__":
    sys.exit(main())
