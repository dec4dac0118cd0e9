"""The commands of a block, and a check of their arguments that does not run them."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
from packaging.requirements import Requirement

from attention_autotuner.cli.entry import make_parser
from attention_autotuner.settings import PREFIX, from_environment

from .pages import REPOSITORY, Block

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

LANGUAGES = ("bash", "console")
OURS = ("attention_autotuner", "benchmarks", "examples", "tests")
_PROMPT = "$ "
_SEPARATORS = ("&&", ";", "|")
_ASSIGNMENT = re.compile(r"^(?P<name>[A-Za-z_]\w*)=(?P<value>.*)$")


class NotRightError(Exception):
    """A command is wrong; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One line of a block.

    Attributes:
        text: as written, continuation lines joined.
        stages: every command of the line: the operator before it, and its words.
        output: output shown in the page; None where the page shows none.
        line: line in the page, from 1.
    """

    text: str
    stages: tuple[tuple[str, tuple[str, ...]], ...]
    output: str | None
    line: int


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block; in a ``console`` block, the lines after a prompt, each with its output."""
    console = block.language == "console"
    lines = block.code.rstrip("\n").split("\n")
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        at += 1
        if not line.strip() and not console:
            continue
        if console and not line.startswith(_PROMPT):
            raise ValueError(f"{block.where}: a console block begins with a prompt, not {line!r}")
        while line.endswith("\\"):
            line = line[:-1] + " " + lines[at].strip()
            at += 1
        output: list[str] | None = None
        if console:
            line = line.removeprefix(_PROMPT)
            output = []
            while at < len(lines) and not lines[at].startswith(_PROMPT):
                output.append(lines[at])
                at += 1
        stages = tuple(_stages(line))
        if stages:
            yield Command(
                text=line,
                stages=stages,
                output="\n".join(output) + "\n" if output else None,
                line=block.line + start,
            )


def _stages(line: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    joint: str = ""
    words: list[str] = []
    for token in lexer:
        if token in _SEPARATORS:
            yield joint, tuple(words)
            joint, words = token, []
        else:
            words.append(token)
    if words:
        yield joint, tuple(words)


def check(command: Command) -> None:
    """Check a line without running it.

    Raises:
        NotRightError: the program has no rule here, its parser refuses an option, a file is missing, ...
    """
    try:
        for _, stage in command.stages:
            words = list(stage)
            if ">" in words:
                words = words[: words.index(">")]
            words = check_assignments(words)
            if words:
                rule(words[0])(words)
    except NotRightError as error:
        raise NotRightError(f"line {command.line}: {command.text}: {error}") from error


def check_assignments(words: list[str]) -> list[str]:
    """Check the settings before a command; returns the words of the command."""
    assigned = {}
    while words and (assignment := _ASSIGNMENT.match(words[0])):
        assigned[assignment["name"]] = assignment["value"]
        words = words[1:]
    from_environment({name: value for name, value in assigned.items() if name.startswith(PREFIX)})
    return words


def rule(program: str) -> Callable[[list[str]], None]:
    """The check of a program's arguments."""
    name = Path(program).name
    if name in RULES:
        return RULES[name]
    if program.startswith(("build", "./build")) and name in targets():
        return lambda words: None
    raise NotRightError(f"no rule for {program!r}")


def _cli(words: list[str]) -> None:
    _parse(make_parser().parse_args, words[1:])


def _parse(parse: Callable[[Sequence[str]], object], arguments: Sequence[str]) -> None:
    try:
        parse(arguments)
    except SystemExit as error:
        if error.code not in (0, None):
            raise NotRightError(f"the parser refuses {shlex.join(arguments)}") from error


class _Accepted(BaseException):
    """The parser of a module accepted its arguments; no ``except Exception`` catches this."""


@contextmanager
def only_parsing() -> Iterator[None]:
    """Stop programs when their parser has accepted the arguments."""
    parse = argparse.ArgumentParser.parse_args

    def accept(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        parse(self, *args, **kwargs)
        raise _Accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", accept)
        yield


def run_module(module: str) -> None:
    """Run a module like ``python -m``."""
    with warnings.catch_warnings():
        # The tests may have imported the module; a second copy runs here.
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__")


def _torchrun(words: list[str]) -> None:
    _python(["python", *words[words.index("-m") :]])


def _python(words: list[str]) -> None:
    if words[1:2] != ["-m"]:
        _paths(words[:2])
        return
    module, arguments = words[2], words[3:]
    if module.partition(".")[0] not in OURS:
        rule(module)([module, *arguments])
        return
    if module == "attention_autotuner":
        _cli(["", *arguments])
        return

    def run(arguments_of_module: Sequence[str]) -> None:
        with only_parsing(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [module, *arguments_of_module])
            try:
                run_module(module)
            except _Accepted:
                return
            raise NotRightError(f"{module} takes no arguments by argparse")

    _parse(run, arguments)


def _paths(words: list[str]) -> None:
    for word in words[1:]:
        if not word.startswith("-") and not (REPOSITORY / word.partition("::")[0]).exists():
            raise NotRightError(f"there is no {word}")


def _pytest(words: list[str]) -> None:
    values = {"-m", "-k", "-n", "-p"}
    paths = [word for before, word in pairwise(words) if before not in values and "=" not in word]
    _paths(["pytest", *paths])


def _make(words: list[str]) -> None:
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        if assignment := _ASSIGNMENT.match(word):
            wanted = rf"^{assignment['name']}\s*\?="
        elif word == "-j" or word.startswith("--"):
            continue
        else:
            wanted = rf"^{re.escape(word)}:"
        if not re.search(wanted, text, re.MULTILINE):
            raise NotRightError(f"the Makefile has no {word}")


@cache
def extras() -> frozenset[str]:
    """The extras of this package."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    return frozenset(tomllib.loads(text)["project"]["optional-dependencies"])


def _pip(words: list[str]) -> None:
    if words[1] not in ("install", "uninstall", "wheel"):
        raise NotRightError(f"no rule for pip {words[1]}")
    takes_value = {"--constraint", "-c", "--extra-index-url", "--index-url", "--wheel-dir", "-w"}
    for before, word in pairwise(words[1:]):
        if word.startswith("-") or before in takes_value or word.endswith(".whl"):
            continue
        name, _, asked = word.partition("[")
        if name in (".", "attention-autotuner"):
            unknown = set(filter(None, asked.rstrip("]").split(","))) - extras()
            if unknown:
                raise NotRightError(f"there is no extra {', '.join(sorted(unknown))}")
        elif not word.startswith("./"):
            Requirement(word)


@cache
def cmake_text() -> str:
    """The text of all CMake files of this tree, except those that build kernels."""
    files = [REPOSITORY / "CMakeLists.txt"]
    for folder in ("benchmarks", "client", "examples"):
        files += sorted((REPOSITORY / folder).rglob("CMakeLists.txt"))
        files += sorted((REPOSITORY / folder).rglob("*.cmake*"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@cache
def targets() -> frozenset[str]:
    """The programs that CMake builds."""
    return frozenset(re.findall(r"\b(?:bench_\w+|attention_autotuner_\w+)\b", cmake_text())) | (
        frozenset(re.findall(r"add_executable\(\s*(\w+)", cmake_text()))
    )


def _cmake(words: list[str]) -> None:
    for before, word in pairwise(words):
        if word.startswith("-D"):
            name = re.split("[:=]", word.removeprefix("-D"))[0]
            known = name.startswith("CMAKE_") or name.endswith(("_DIR", "_ROOT"))
            if not known and name not in cmake_text():
                raise NotRightError(f"no CMakeLists.txt has {name}")
        elif before == "--target" and word not in targets() and word not in ("install", "all"):
            raise NotRightError(f"CMake has no target {word}")
        elif before == "-S" and not (REPOSITORY / word / "CMakeLists.txt").is_file():
            raise NotRightError(f"there is no {word}/CMakeLists.txt")


def _export(words: list[str]) -> None:
    check_assignments(words[1:])


def _known(words: list[str]) -> None:
    """Accept any arguments of a program."""


RULES: dict[str, Callable[[list[str]], None]] = {
    "attention-autotuner": _cli,
    "python": _python,
    "python3": _python,
    "torchrun": _torchrun,
    "pytest": _pytest,
    "make": _make,
    "pip": _pip,
    "cmake": _cmake,
    "export": _export,
    **dict.fromkeys(
        ("cat", "cd", "ctest", "git", "head", "jq", "ls", "pre-commit", "sha256sum", "unzip"),
        _known,
    ),
}
