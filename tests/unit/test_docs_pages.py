"""Statements of the pages about the code: settings, errors, checks, verbs, the C ABI."""

from __future__ import annotations

import argparse
import builtins
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import attention_autotuner
from attention_autotuner import arch, errors, reference, settings
from attention_autotuner.cli import doctor, entry
from attention_autotuner.core import abi
from attention_autotuner.kernels.registry import KERNELS
from tests.snippets.pages import pages
from tests.snippets.settings_table import markdown_table


def text_of(repository: Path, name: str) -> str:
    return (repository / "docs" / name).read_text(encoding="utf-8")


def test_the_settings_page_shows_the_table_as_it_is(repository: Path) -> None:
    page = text_of(repository, "settings.md")
    shown = page.split("compared by a test -->\n", 1)[1].split("<!-- end of settings -->", 1)[0]
    assert shown == markdown_table(), "python -m tests.snippets --write docs/settings.md"


def public_errors() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value)
        and issubclass(value, Exception)
        and value.__module__ == errors.__name__
    }


def test_every_error_has_its_part_of_troubleshooting_with_its_bases(repository: Path) -> None:
    page = text_of(repository, "troubleshooting.md")
    sections = dict(re.findall(r"^### `(\w+)`\n\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    declared = public_errors()
    assert sections.keys() == declared.keys()
    for name, error in declared.items():
        bases = [
            base.__name__ for base in error.__bases__ if base is not errors.AttentionAutotunerError
        ]
        if error is errors.AttentionAutotunerError:
            continue
        first = sections[name].partition(". ")[0]
        assert all(f"`{base}`" in first for base in bases), name


def test_every_check_of_doctor_has_its_line(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = text_of(repository, "troubleshooting.md")
    table = page.split("## Checks of `doctor`", 1)[1].split("\n## ", 1)[0]
    listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert listed == [finding.name for finding in doctor.diagnose()]


def verbs(parser: argparse.ArgumentParser) -> list[str]:
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return list(commands.choices)


def test_every_verb_has_its_part_of_the_command_line_page(repository: Path) -> None:
    page = text_of(repository, "cli.md")
    headings = re.findall(r"^## `([\w-]+)`$", page, re.MULTILINE)
    assert sorted(headings) == sorted(verbs(entry.make_parser()))
    for verb in headings:
        part = page.split(f"## `{verb}`\n", 1)[1].split("\n## ", 1)[0]
        assert f"$ attention-autotuner {verb}" in part, f"{verb} has no sample"


def test_the_abi_page_names_every_function_struct_and_status(repository: Path) -> None:
    page = text_of(repository, "c_abi.md")
    for name in abi.PROTOTYPES:
        assert f"`{abi.SYMBOL_PREFIX}{name}`" in page, name
    for name in abi.STRUCTS:
        assert f"`{name}`" in page, name
    statuses = {
        name.removeprefix("STATUS_"): value
        for name, value in vars(abi).items()
        if name.startswith("STATUS_")
    }
    rows = re.findall(r"^\| `ATTENTION_AUTOTUNER_(\w+)` \| (\d+)", page, re.MULTILINE)
    assert {name: int(value) for name, value in rows} == statuses
    assert f"`{abi.ABI_VERSION}`" in page


def test_the_api_pages_have_every_public_name(repository: Path) -> None:
    pages = text_of(repository, "api.rst") + text_of(repository, "internals.rst")
    described = set(
        re.findall(r"^\.\. (?:auto\w+|currentmodule):: (?:[\w.]+\.)?(\w+)$", pages, re.MULTILINE)
    )
    described |= set(re.findall(r"``(\w+)``", pages))
    for module in (attention_autotuner, arch, reference):
        missing = set(module.__all__) - described - {"__version__"}
        assert not missing, f"{module.__name__}: {', '.join(sorted(missing))}"
    missing = {kernel.knobs.__name__ for kernel in KERNELS.values()} - described
    assert not missing, f"knobs: {', '.join(sorted(missing))}"


def sources(repository: Path) -> list[str]:
    """The files that git tracks or would track, each behind a slash."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    return [f"/{name}" for name in listed.stdout.splitlines() if (repository / name).is_file()]


def test_sources_that_pages_name_are_there(repository: Path) -> None:
    files = sources(repository)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`([\w./-]+\.(?:cpp|cu|cuh|h|hpp|jinja|py|toml))`", text):
            module = f"/{name.replace('.', '/')}.py"  # `core.cpp` is one
            there = any(file.endswith((f"/{name}", module)) for file in files)
            assert there, f"{page.name}: there is no {name}"


def test_constants_and_types_that_pages_name_are_there(repository: Path) -> None:
    text = "".join(
        (repository / file[1:]).read_text(encoding="utf-8")
        for file in sources(repository)
        if file.endswith((".py", ".h", ".cuh", ".hpp", ".cpp", ".txt")) and "/docs/" not in file
    )
    words = set(re.findall(r"\w+", text)) | set(dir(builtins))
    prefix = "ATTENTION_AUTOTUNER_"  # which pages may leave out
    words |= {word for s in settings.TABLE for word in (s.name, s.name.removeprefix(prefix))}
    for page in pages():
        for name in re.findall(
            r"`((?:[A-Z]{2,}_?)+|(?:[A-Z][a-z0-9]+){2,})`", page.read_text("utf-8")
        ):
            assert name in words, f"{page.name}: nothing is called {name}"


def test_no_registry_and_no_machine_is_named(repository: Path) -> None:
    hosts = ("pypi" + ".org", "download" + ".pytorch", "/wor" + "k/", "/roo" + "t/")
    for file in sources(repository):
        if file.startswith("/benchmarks/results/"):
            continue  # written by programs, with the paths of their machines
        text = (repository / file[1:]).read_text(encoding="utf-8", errors="replace")
        assert not [host for host in hosts if host in text], file
