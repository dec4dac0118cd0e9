"""Every code block and command of README, CONTRIBUTING and docs/: see tests/snippets for the rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.snippets.pages import CHINESE, REPOSITORY, Block, blocks, pages
from tests.snippets.running import (
    at_home,
    compile_c,
    compile_python,
    parse_json,
    quoted,
    run_commands,
    run_python,
    same,
)
from tests.snippets.shell import LANGUAGES, NotRightError, check, commands

C_LANGUAGES = ("c", "cpp")
BLOCKS = [block for page in pages() for block in blocks(page)]
# The Chinese README has the English one's blocks, which test_docs_readme.py compares.
TRIED = [block for block in BLOCKS if block.page != CHINESE]


def of(*languages: str, marked: bool | None = None) -> list[Block]:
    """Blocks of some languages: those with a mark, those without, or both."""
    return [
        block
        for block in TRIED
        if block.language in languages
        and block.kind not in ("setup", "file", "prose")
        and (marked is None or bool(block.kind) is marked)
    ]


def where(block: Block) -> str:
    return block.where


def test_every_block_has_a_language_that_is_tried() -> None:
    tried = ("python", "json", *LANGUAGES, *C_LANGUAGES)
    for block in BLOCKS:
        if block.kind == "prose":
            assert block.language == "text", f"{block.where}: only text is prose"
        elif block.kind != "file":
            assert block.language in tried, f"{block.where}: nobody tries {block.language!r}"


@pytest.mark.parametrize(
    "page", sorted({block.page for block in of("python")}), ids=lambda p: p.name
)
def test_python_runs_on_a_cpu_in_the_order_of_the_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    blocks_of_page = [block for block in TRIED if block.page == page and block.language == "python"]
    with at_home(tmp_path):
        run_python([block for block in blocks_of_page if block.kind != "file"], gpu=False)


@pytest.mark.parametrize("block", of("python", marked=True), ids=where)
def test_python_that_is_not_run_here_compiles(block: Block) -> None:
    compile_python(block)


@pytest.mark.parametrize("block", of(*LANGUAGES), ids=where)
def test_commands_are_what_their_parsers_take(block: Block, tmp_path: Path) -> None:
    with at_home(tmp_path):
        for command in commands(block):
            check(command)


@pytest.mark.parametrize("block", of(*LANGUAGES, marked=False), ids=where)
def test_commands_run_and_print_what_the_page_shows(block: Block, tmp_path: Path) -> None:
    with at_home(tmp_path):
        for command, printed in run_commands(block):
            if command.output is not None:
                shown = f"{command.text} prints otherwise: python -m tests.snippets --write"
                assert same(command.output, printed), f"{shown}\n{printed}"


def test_commands_marked_for_a_gpu_are_such_as_a_test_can_wait_for() -> None:
    for block in of(*LANGUAGES, marked=True):
        if block.kind == "gpu":
            used = {command.stages[0][1][:2] for command in commands(block)}
            allowed = {("attention-autotuner", verb) for verb in ("tune", "warmup", "why")}
            assert used <= allowed, f"{block.where}: mark it slow"


@pytest.mark.parametrize("block", of(*C_LANGUAGES), ids=where)
def test_c_compiles(block: Block, tmp_path: Path) -> None:
    before = [b for b in TRIED if b.page == block.page and b.line < block.line]
    setup = "".join(b.code for b in before if b.kind == "setup" and b.language == "cpp")
    assert not compile_c(block, tmp_path, setup)


@pytest.mark.parametrize("block", of("json"), ids=where)
def test_json_parses(block: Block) -> None:
    parse_json(block)


@pytest.mark.parametrize("block", [block for block in TRIED if block.kind == "file"], ids=where)
def test_quotations_stand_in_their_files(block: Block) -> None:
    assert quoted(block), f"{block.argument} does not hold these lines"


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    for page in pages():
        if page.parent != REPOSITORY:
            continue  # the strict build of the site looks at those of docs/
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path = link.partition("#")[0]
            if path and "://" not in path:
                assert (page.parent / path).exists(), f"{page.name}: {link}"


# --- the rules themselves ---------------------------------------------------------------------------


def block_of(code: str, language: str = "bash", kind: str = "") -> Block:
    page = REPOSITORY / "README.md"
    return Block(page=page, line=1, language=language, code=code, kind=kind)  # type: ignore[arg-type]  # a literal


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("attention-autotuner candidates --dims 64", "the parser refuses"),
        ("attention-autotuner compile", "the parser refuses"),
        ("python -m attention_autotuner why --op convolution", "the parser refuses"),
        ("python -m benchmarks.run --no-such-option", "the parser refuses"),
        ("cd .. && make tunes", "no tunes"),
        ("make test NO_SUCH_VARIABLE=1", "no NO_SUCH_VARIABLE=1"),
        ("pip install '.[torchh]'", "no extra torchh"),
        (".venv/bin/pytest tests/units", "no tests/units"),
        ("python no_such_file.py", "no no_such_file.py"),
        ("frobnicate --all", "no rule"),
        ("cmake -S . -B build -DNO_SUCH_OPTION=1", "NO_SUCH_OPTION"),
    ],
)
def test_a_command_that_cannot_be_right_is_refused(line: str, complaint: str) -> None:
    (command,) = commands(block_of(line + "\n"))
    with pytest.raises(NotRightError, match=complaint):
        check(command)


def test_a_setting_that_does_not_exist_is_refused() -> None:
    (command,) = commands(block_of("ATTENTION_AUTOTUNER_MOOD=off attention-autotuner doctor\n"))
    with pytest.raises(ValueError, match="no such setting"):
        check(command)


def test_a_command_that_fails_or_cannot_run_is_refused(tmp_path: Path) -> None:
    with at_home(tmp_path):
        with pytest.raises(NotRightError, match="positive multiple of 8"):
            list(
                run_commands(
                    block_of("attention-autotuner candidates --device-type A100 --dim-qk 3\n")
                )
            )
        with pytest.raises(NotRightError, match="mark the block"):
            list(run_commands(block_of("git push\n")))


def test_output_is_compared_line_by_line_with_gaps_where_the_page_has_dots() -> None:
    assert same("a\nb\n", "a  \nb\n\n")
    assert same("a\n...\nd\n", "a\nb\nc\nd\n")
    assert not same("a\nb\n", "a\nc\n")
    assert not same("a\n...\nd\n", "a\nb\n")
    assert not same("a\n", "a\nb\n")


def test_console_blocks_hold_prompts_continuations_and_output() -> None:
    code = "$ first --option \\\n    more  # comment\nout 1\nout 2\n$ second | head -n 1\n"
    first, second = commands(block_of(code, "console"))
    assert first.stages == (("", ("first", "--option", "more")),)
    assert first.output == "out 1\nout 2\n"
    assert second.stages == (("", ("second",)), ("|", ("head", "-n", "1")))
    assert second.output is None
    assert (first.line, second.line) == (1, 5)


def test_blocks_are_read_with_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.snippets.pages.REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    text = "<!-- snippet: setup\nx = 1\n-->\n\n- in a list:\n\n"
    text += "  <!-- snippet: gpu, because -->\n  ```python\n  y = x\n  ```\n"
    page.write_text(text + "\n<!-- snippet: file a/b.c -->\n```c\nz\n```\n", encoding="utf-8")
    setup, python, c = blocks(page)
    assert (setup.kind, setup.code, setup.line) == ("setup", "x = 1\n", 2)
    assert (python.kind, python.code, python.line) == ("gpu", "y = x\n", 9)
    assert (c.kind, c.argument) == ("file", "a/b.c")
    for wrong in (
        "<!-- snippet: whenever -->\n```c\n```\n",
        "<!-- snippet: gpu -->\ntext\n",
        "```c\n",
    ):
        page.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=r"page\.md:"):
            blocks(page)
