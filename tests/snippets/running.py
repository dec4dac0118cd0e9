"""Run blocks in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.cli import main
from attention_autotuner.settings import PREFIX

from .pages import REPOSITORY, Block
from .shell import OURS, Command, NotRightError, commands, run_module

COMPILES = {"c": ("gcc", "-std=c11"), "cpp": ("g++", "-std=c++17")}
INCLUDE = ("client/include", "templates/include", "templates/include/attention_autotuner")
CUDA_HOMES = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")


@contextlib.contextmanager
def at_home(folder: Path, *, cache: Path | None = None) -> Iterator[None]:
    """Enter a private working folder that looks like a checkout, with the settings of a fresh shell.

    Args:
        folder: the working folder.
        cache: cache of kernels and records. By default the folder is also the home, and so holds the cache.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(PREFIX):
                patch.delenv(name)
        if cache is None:
            patch.setenv("HOME", str(folder))
            patch.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
        else:
            patch.setenv(f"{PREFIX}CACHE_DIR", str(cache))
        # For processes that are started from the folder.
        places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(str(Path(place).absolute()) for place in places if place)
        )
        patch.chdir(folder)
        if not Path("tests").exists():
            Path("tests").symlink_to(REPOSITORY / "tests")  # pages name data files there
        settings.reload()
        try:
            yield
        finally:
            patch.undo()
            settings.reload()


def source_of(block: Block) -> str:
    """Python of a block with blank lines before it, so that an error names the line of the page."""
    return "\n" * (block.line - 1) + block.code


def compile_python(block: Block) -> None:
    """Compile a block without running it."""
    compile(source_of(block), str(block.page), "exec")


def run_python(blocks: Sequence[Block], *, gpu: bool) -> int:
    """Run blocks of one page in one namespace; returns the number of blocks that ran.

    Args:
        blocks: Python blocks of one page, in order.
        gpu: also run the blocks for a GPU. Otherwise the other blocks use the CPU in place of ``"cuda"``, where the
            reference computes the results.
    """
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__page__"}
    count = 0
    for block in blocks:
        if block.kind not in (("", "setup", "gpu") if gpu else ("", "setup")):
            continue
        source = source_of(block)
        if not gpu:
            source = re.sub(r"""(device=|torch\.device\()"cuda\"""", r'\1"cpu"', source)
        exec(compile(source, str(block.page), "exec"), names)
        count += 1
    return count


def run_commands(block: Block) -> Iterator[tuple[Command, str]]:
    """Run the commands of a block; yields each with its standard output, in which paths of folders are shortened.

    Raises:
        NotRightError: a command fails or cannot be run in a test.
    """
    for command in commands(block):
        printed = ""
        for joint, words in command.stages:
            if joint == "|":
                printed = _filtered(words, printed)
            else:
                printed += _run(words, command)
        for folder, shown in ((Path.cwd(), "~"), (REPOSITORY, "~/attention-autotuner")):
            printed = printed.replace(str(folder), shown)
        yield command, printed


def _filtered(words: Sequence[str], text: str) -> str:
    if words[0] != "head" or words[1] != "-n":
        raise NotRightError(f"{' '.join(words)} cannot be run in a test")
    return "".join(text.splitlines(keepends=True)[: int(words[2])])


def _run(words: Sequence[str], command: Command) -> str:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        if words[0] == "attention-autotuner":
            status = main(list(words[1:]))
        elif words[:2] == ("python", "-m") and words[2].partition(".")[0] in OURS:
            status = _run_module(words[2], words[3:])
        else:
            raise NotRightError(f"{words[0]} cannot be run in a test: mark the block")
    if status:
        raise NotRightError(f"{command.text}: status {status}\n{stderr.getvalue()}")
    return stdout.getvalue()


def _run_module(module: str, arguments: Sequence[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *arguments])
        try:
            run_module(module)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def same(expected: str, printed: str) -> bool:
    """True when a command printed the output in the page; a line ``...`` in the page matches any lines."""
    patterns = [re.escape(part) for part in re.split(r"^\.\.\.\n", expected, flags=re.MULTILINE)]
    trimmed = "".join(line.rstrip() + "\n" for line in printed.rstrip("\n").split("\n"))
    return re.fullmatch("(?:.*\n)*?".join(patterns), trimmed) is not None


def compile_c(block: Block, folder: Path, setup: str = "") -> str:
    """Compile a block of C or C++, with lines outside of functions wrapped into one; returns the compiler's errors.

    Skips the test where the compiler is missing.

    Args:
        block: the block.
        folder: folder for the source file.
        setup: code before the block.
    """
    compiler, standard = COMPILES[block.language]
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    includes = [f"-I{REPOSITORY / path}" for path in INCLUDE]
    cuda = [Path(home) / "include" for home in CUDA_HOMES if home]
    includes += [f"-I{path}" for path in cuda if (path / "cuda_runtime.h").is_file()]
    lines = block.code.splitlines()
    head = [line if line.startswith("#") else "" for line in lines]
    body = ["" if line.startswith("#") else line for line in lines]
    source = folder / f"snippet.{block.language}"
    if re.search(r"^\w.*\) \{$", block.code, re.MULTILINE):
        text = setup + block.code
    else:
        text = "\n".join([setup, *head, "void snippet() {", *body, "}", ""])
    source.write_text(text, encoding="utf-8")
    command = [compiler, standard, "-fsyntax-only", *includes, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def quoted(block: Block) -> bool:
    """True when a block consists of consecutive lines of the file that its mark names, in any indentation."""
    lines = (REPOSITORY / block.argument).read_text(encoding="utf-8").splitlines()
    wanted = [line.strip() for line in block.code.splitlines()]
    stripped = [line.strip() for line in lines]
    return any(
        stripped[at : at + len(wanted)] == wanted for at in range(len(lines) - len(wanted) + 1)
    )


def parse_json(block: Block) -> None:
    """Parse a block of JSON."""
    json.loads(block.code)
